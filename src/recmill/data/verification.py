"""Compare files with their digests. Files that were found correct are remembered, so that each is read only once."""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from recmill.files.digests import BLOCK_BYTES, digest
from recmill.hardware.cpu import cache_folder
from recmill.observe.progress import Progress
from recmill.schema import Dataset, FileInfo

_MEMORY_FILE = "verified-files.txt"  # in the cache folder: one line for each version of a file
_MAX_MEMORY_BYTES = 1 << 23  # about 80,000 lines; then the file is started anew
_SETTLED_SECONDS = 2.0  # a file that changed less than this ago may change again without getting another time


def digest_problems(dataset: Dataset, which: Literal["new", "all"]) -> Iterator[str]:
    """Read all files, or those that are not known to be correct, and describe those whose content changed."""
    folder = cache_folder()
    memory = folder / _MEMORY_FILE if folder else None
    known = _known_versions(memory) if memory and which == "new" else set()
    files = {dataset.path / name: info for name, info in dataset.description.files.items()}
    unknown = {path: info for path, info in files.items() if _version(path.stat(), info) not in known}
    if not unknown:
        return
    total = sum(info.bytes for info in unknown.values())
    with Progress(f"verifying {dataset.path.absolute().name}", total, "bytes") as progress:
        for path, info in unknown.items():
            before = path.stat()
            is_settled = time.time() - before.st_ctime > _SETTLED_SECONDS
            blocks = iter([*[BLOCK_BYTES] * (info.bytes // BLOCK_BYTES), info.bytes % BLOCK_BYTES])
            found = digest(path, partial(_advance, progress, blocks))
            if found != info.xxh3:
                yield f"{path.name}: its content changed (xxh3 {found}, expected {info.xxh3})"
            elif memory and is_settled and _version(path.stat(), info) == _version(before, info):
                with contextlib.suppress(OSError), memory.open("a", encoding="ascii") as file:
                    file.write(f"{_version(before, info)}\n")


def _advance(progress: Progress, blocks: Iterator[int]) -> None:
    progress.advance(next(blocks, 0))


def _version(stat: os.stat_result, info: FileInfo) -> str:
    """Identify a file's content, which cannot change without a new ctime, and the digest that it should have."""
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {info.xxh3}"


def _known_versions(memory: Path) -> set[str]:
    try:
        if memory.stat().st_size > _MAX_MEMORY_BYTES:
            memory.unlink()
            return set()
        return set(memory.read_text(encoding="ascii", errors="replace").splitlines())
    except OSError:
        return set()
