"""Which raw Criteo files there are, and roughly how many rows they hold."""

import re
from dataclasses import dataclass
from pathlib import Path

from recmill.datasets.compressed import SUFFIXES, sample_digest
from recmill.errors import DataError

_DAY = re.compile(r"day_(\d+)(\.gz|\.zst)?")


@dataclass(frozen=True)
class RawLog:
    """`name` is day_0, day_1, ... or, for Kaggle, train and test. Kaggle's test has no labels."""

    name: str
    path: Path
    has_labels: bool
    bytes: int
    sample: str  # digest of the whole file, or of blocks all over a large one


def find_logs(directory: Path, source: str | None) -> list[RawLog]:
    """The logs under `directory` (or the one file that it is), in order."""
    if not directory.exists():
        raise DataError(f"{directory}: no such file or directory. --input is where the raw logs are.")
    files = [directory] if directory.is_file() else sorted(p for p in directory.iterdir() if p.is_file())
    days = [path for path in files if _DAY.fullmatch(path.name)]
    kaggle = [path for path in files if _plain_name(path) in ("train.txt", "test.txt")]
    if source is None and days and kaggle:
        raise DataError(f"{directory} holds both {days[0].name} and {kaggle[0].name}. Say which with --source.")
    source = source or ("kaggle" if kaggle else "1tb")
    wanted = kaggle if source == "kaggle" else days
    if not wanted:
        names = "train.txt" if source == "kaggle" else "day_0, day_1, ..."
        there = ", ".join(path.name for path in files[:5]) or "nothing"
        raise DataError(f"{directory}: no {names} (nor with {' or '.join(SUFFIXES[1:])}); it holds {there}.")
    return _kaggle_logs(wanted) if source == "kaggle" else _day_logs(directory, wanted)


def _plain_name(path: Path) -> str:
    return path.stem if path.suffix in SUFFIXES[1:] else path.name


def _day_logs(directory: Path, paths: list[Path]) -> list[RawLog]:
    by_number: dict[int, Path] = {}
    for path in paths:
        match = _DAY.fullmatch(path.name)
        assert match
        number = int(match[1])
        if number in by_number:
            raise DataError(f"{directory}: day {number} is there twice, {by_number[number].name} and {path.name}.")
        by_number[number] = path
    gaps = sorted(set(range(max(by_number) + 1)) - set(by_number))
    if gaps and not (len(paths) == 1 and directory.is_file()):
        names = ", ".join(f"day_{number}" for number in gaps)
        raise DataError(f"{directory}: {names} missing, though day_{max(by_number)} is there. Get the missing days.")
    return [_raw_log(f"day_{number}", by_number[number], True) for number in sorted(by_number)]


def _kaggle_logs(paths: list[Path]) -> list[RawLog]:
    by_name: dict[str, Path] = {}
    for path in paths:
        name = _plain_name(path).removesuffix(".txt")
        if name in by_name:
            raise DataError(f"{path.parent}: {name}.txt is there twice, {by_name[name].name} and {path.name}.")
        by_name[name] = path
    if "train" not in by_name:
        raise DataError(f"{by_name['test'].parent}: test.txt without train.txt: it has no labels to learn from.")
    return [_raw_log(name, by_name[name], name == "train") for name in ("train", "test") if name in by_name]


def _raw_log(name: str, path: Path, has_labels: bool) -> RawLog:
    return RawLog(name, path.absolute(), has_labels, path.stat().st_size, sample_digest(path))
