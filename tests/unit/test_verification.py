import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from recmill.data import verification
from recmill.data.opening import Checks, open_dataset
from recmill.errors import DataError


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Returns the names of the files that are digested, with a cache folder that is empty at first."""
    names = []

    def noted(path: Path, *rest: Any) -> str:
        names.append(path.name)
        return digest(path, *rest)

    digest = verification.digest
    monkeypatch.setattr(verification, "digest", noted)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return names


@pytest.fixture
def copy(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset whose files have settled."""
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    return Path(shutil.copytree(clicks, tmp_path / "copy"))


def opened(path: Path, read: list[str], verify: Checks = "once") -> list[str]:
    """Open the dataset and return the files that were read for it."""
    read.clear()
    open_dataset(path, verify)
    return list(read)


def flip_last_bit(file: Path) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(-1, os.SEEK_END)
        last = opened_file.read(1)[0]
        opened_file.seek(-1, os.SEEK_END)
        opened_file.write(bytes([last ^ 1]))


def test_a_file_is_read_once_and_again_on_request(copy: Path, read: list[str]) -> None:
    files = list(json.loads((copy / "dataset.json").read_text())["files"])
    assert opened(copy, read) == files
    assert opened(copy, read) == []
    assert opened(copy, read, "sizes") == []
    assert opened(copy, read, "digests") == files


def test_a_file_that_changed_is_read_again_even_if_its_mtime_is_restored(copy: Path, read: list[str]) -> None:
    opened(copy, read)
    file = copy / "day_1_labels.npy"
    before = file.stat()
    flip_last_bit(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # a corrupt file is not remembered
        with pytest.raises(DataError, match=r"day_1_labels\.npy: its content changed"):
            opened(copy, read)
        assert read == ["day_1_labels.npy"]


def test_a_replaced_file_is_read_again(copy: Path, read: list[str]) -> None:
    opened(copy, read)
    shutil.copy2(copy / "day_0_dense.npy", copy / "new")
    os.replace(copy / "new", copy / "day_0_dense.npy")
    assert opened(copy, read) == ["day_0_dense.npy"]
    assert opened(copy, read) == []


def test_a_file_that_changed_a_moment_before_it_was_read_is_not_remembered(
    clicks: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read, it may change again within the resolution of its times. Reading the first file takes 10 s."""
    fresh = Path(shutil.copytree(clicks, tmp_path / "fresh"))
    now = max(file.stat().st_ctime for file in fresh.iterdir())
    monkeypatch.setattr(time, "time", lambda: now + 10 * bool(read))
    first, *_ = opened(fresh, read)
    assert opened(fresh, read) == [first]


def test_another_expected_digest_is_compared(copy: Path, read: list[str]) -> None:
    opened(copy, read)
    description = json.loads((copy / "dataset.json").read_text())
    description["files"]["day_0_dense.npy"]["xxh3"] = "0" * 32
    (copy / "dataset.json").write_text(json.dumps(description), encoding="utf-8")
    with pytest.raises(DataError, match=f"day_0_dense.npy: its content changed .* expected {'0' * 32}"):
        opened(copy, read)


def test_without_a_cache_folder_files_are_read_every_time(
    copy: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "cache_folder", lambda: None)
    assert opened(copy, read) == opened(copy, read) != []


def test_a_damaged_or_large_memory_is_forgotten(
    copy: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "home" / ".cache" / "recmill" / "verified-files.txt"
    opened(copy, read)
    memory.write_bytes(memory.read_bytes()[:-5] + b"\xff")  # of a line that was not completely written
    assert len(opened(copy, read)) == 1
    monkeypatch.setattr(verification, "_MAX_MEMORY_BYTES", 100)
    assert len(opened(copy, read)) == 12


def test_reading_is_shown_as_progress(copy: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []

    class Shown(verification.Progress):
        def __init__(self, label: str, total: int, unit: str) -> None:
            super().__init__(label, total, unit)
            shown.append((label, total))

        def __exit__(self, *exception: object) -> None:
            shown.append(("done", self._done))

    monkeypatch.setattr(verification, "Progress", Shown)
    monkeypatch.setattr(verification, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr("recmill.files.digests.BLOCK_BYTES", 1 << 12)
    opened(copy, read)
    size = sum(info.bytes for info in open_dataset(copy).description.files.values())
    assert shown == [(f"verifying {copy.name}", size), ("done", size)]
