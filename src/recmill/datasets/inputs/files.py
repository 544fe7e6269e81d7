"""Which files an input names."""

import glob
from collections.abc import Sequence
from pathlib import Path

from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.remote import found_remote, is_remote
from recmill.errors import DataError, did_you_mean_path


def found_files(given: str, option: str = "--input") -> list[InputFile]:
    """Return the files that are named: a file, a pattern like logs/*.csv, a directory of files, an address like
    s3://bucket/logs/*.parquet, or several of them with commas between. Those of a pattern or a directory are in the
    order of their names.
    """
    patterns = [given] if Path(given).exists() else [part for part in given.split(",") if part]
    found = [file for pattern in patterns for file in _matching(pattern, option)]
    owners: dict[str, InputFile] = {}
    for file in found:
        place = str(file.resolve() if isinstance(file, Path) else file)
        if place in owners:
            raise DataError(f"{option} {given}: names {owners[place]} twice, also as {file}. Name each file once.")
        owners[place] = file
    return found


def _matching(pattern: str, option: str) -> list[InputFile]:
    if is_remote(pattern):
        found: list[InputFile] = [*found_remote(pattern)]
    else:
        local: list[Path] = []
        for path in sorted(map(Path, [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True))):  # noqa: PTH207
            local += _files_in(path) if path.is_dir() else [path]
        found = [*dict.fromkeys(local)]
        if pipe := next((path for path in local if not path.is_file()), None):
            raise DataError(f"{option} {pipe}: is no file, but rows are read more than once. Write them to a file.")
    if not found and Path(pattern).is_dir():
        raise DataError(f"{option} {pattern}: a directory without files, but for hidden ones. Name another one.")
    if not found:
        near = "" if is_remote(pattern) else did_you_mean_path(pattern)
        raise DataError(
            f"{option} {pattern}: no such file. {near}Give a file, a directory, or a pattern like 'logs/*.csv'."
        )
    return found


def _files_in(directory: Path) -> list[Path]:
    """Return its files and those of the directories in it, without hidden ones and marks like _SUCCESS."""
    inner = (path for path in directory.rglob("*") if path.is_file())
    return sorted(p for p in inner if not any(part.startswith(("_", ".")) for part in p.relative_to(directory).parts))


def distinct_names(files: Sequence[InputFile]) -> list[str]:
    """Return the names of the files, with as many of their directories as it takes to tell them apart."""
    parts = [str(file).split("/") for file in files]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
