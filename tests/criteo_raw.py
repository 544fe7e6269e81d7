"""Raw Criteo logs for tests, a plain reading of them that shares no code with recmill, and what was prepared."""

import gzip
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

PARTS = ("dense", "sparse", "labels")
COLUMNS = [f"C{c + 1}" for c in range(26)]
DAYS = [300, 257, 201]  # rows of the days of the fixture `logs`

Row = list[str]  # 40 fields: label, I1..I13, C1..C26; an empty one is missing

_DENSE, _ID = re.compile(rb"-?[0-9]+"), re.compile(rb"[0-9a-fA-F]{1,8}")


def random_rows(
    count: int,
    seed: int,
    *,
    missing: float = 0.15,
    distinct: int = 60,
    smallest: int = -2,
    largest_id: int = 2**32 - 1,
) -> list[Row]:
    """Skewed like a real log. Column c has (c + 1) / 26 of `distinct` ids, raw id 0 among them in every other column.

    The ids that occur depend on `largest_id` and `distinct` alone, so logs of other seeds share them.
    """
    generator, of_ids = np.random.default_rng(seed), np.random.default_rng(99)
    labels = (generator.random(count) < 0.3).astype(int).astype(str).tolist()
    dense = np.floor(generator.exponential(30, (count, 13)) ** 1.3).astype(int) + smallest
    columns = []
    for column in range(26):
        known = of_ids.integers(1, largest_id, max(distinct * (column + 1) // 26, 2), endpoint=True)
        known[0] = 0 if column % 2 else known[0]
        chosen = known[np.minimum(generator.geometric(min(4 / len(known), 0.7), count) - 1, len(known) - 1)]
        columns.append([f"{value:08x}" for value in chosen.tolist()])
    is_missing = generator.random((count, 39)) < missing
    rows = []
    for at, label in enumerate(labels):
        values = [str(value) for value in dense[at].tolist()] + [column[at] for column in columns]
        rows.append([label, *("" if gone else v for v, gone in zip(values, is_missing[at].tolist(), strict=True))])
    return rows


def to_text(rows: list[Row]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def write_text(path: Path, text: bytes) -> Path:
    """Compressed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        text = gzip.compress(text, mtime=0)
    if path.suffix == ".zst":
        text = zstandard.ZstdCompressor().compress(text)
    path.write_bytes(text)
    return path


def write_rows(path: Path, rows: list[Row]) -> Path:
    return write_text(path, to_text(rows))


def write_days(directory: Path, counts: list[int], seed: int = 1, **options: float) -> list[list[Row]]:
    """day_0, day_1, ... with so many rows each."""
    days = [random_rows(count, 1000 * seed + day, **options) for day, count in enumerate(counts)]  # type: ignore[arg-type]
    for day, rows in enumerate(days):
        write_rows(directory / f"day_{day}", rows)
    return days


def labels_of(rows: list[Row]) -> np.ndarray:
    return np.array([int(row[0]) for row in rows])


def dense_of(rows: list[Row]) -> np.ndarray:
    """Whole numbers [n, 13]; missing: 0."""
    return np.array([[int(value or "0") for value in row[1:14]] for row in rows])


def ids_of(rows: list[Row]) -> list[list[int | None]]:
    """Raw ids, n times 26; missing: None."""
    return [[int(value, 16) if value else None for value in row[14:]] for row in rows]


@dataclass(frozen=True)
class Reading:
    """What a text holds: its good rows as label, 13 numbers, 26 ids (missing: None), and which lines are bad."""

    rows: list[list[int | None]]
    bad_lines: list[int]  # the first is 1


def read_plainly(text: bytes, smallest: int) -> Reading:
    """Line by line, field by field. A field may stand in quotes; a line may end with a carriage return."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        values = _row_of(line.removesuffix(b"\r").split(b"\t"), smallest)
        if values is None:
            bad.append(number)
        else:
            rows.append(values)
    return Reading(rows, bad)


def _row_of(fields: list[bytes], smallest: int) -> list[int | None] | None:
    if len(fields) != 40:
        return None
    fields = [f[1:-1] if len(f) >= 2 and f.startswith(b'"') and f.endswith(b'"') else f for f in fields]
    if fields[0] not in (b"0", b"1"):
        return None
    values: list[int | None] = [int(fields[0])]
    for field in fields[1:14]:
        if field and not (_DENSE.fullmatch(field) and smallest <= int(field) < 2**31):
            return None
        values.append(int(field) if field else None)
    for field in fields[14:]:
        if field and not _ID.fullmatch(field):
            return None
        values.append(int(field, 16) if field else None)
    return values


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a dataset, without the times that its preparation took."""
    files = sorted(file for file in directory.iterdir() if file.name != "preparation.json")
    return {file.name: file.read_bytes() for file in files}


def day_rows(logs: Path, day: int) -> list[Row]:
    return [line.split("\t") for line in (logs / f"day_{day}").read_text().splitlines()]


def stored(path: Path, name: str) -> np.ndarray:
    return np.load(path / f"{name}.npy")


def sparse(path: Path, days: int = 3) -> np.ndarray:
    return np.concatenate([stored(path, f"day_{day}_sparse") for day in range(days)])


def split_ranges(description: dict[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    return {
        split: [(r["day"], r["start"], r["stop"]) for r in ranges] for split, ranges in description["splits"].items()
    }


def reference_tables(rows: list[int], sizes: list[int], distribution: str, seed: int) -> list[np.ndarray]:
    """The DLRM reference's recipe: one legacy stream, feature after feature."""
    np.random.seed(seed)
    tables = []
    for count, size in zip(rows, sizes, strict=True):
        others: np.ndarray
        if distribution == "uniform":
            others = np.random.randint(0, count, size=(count, size - 1))
        else:
            with np.errstate(invalid="ignore"):
                others = np.random.pareto(a=0.25, size=(count, size - 1)).astype(np.int32) % count
        tables.append(np.concatenate((np.arange(count)[:, None], others), axis=1).astype(np.int32))
    return tables


def set_limits(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Let `prepare criteo` work with other limits than its options give it, such as little memory."""
    from recmill.datasets.criteo import plan, steps

    def limited(options: steps.Options) -> plan.Plan:
        planned = plan.plan(options)
        return replace(planned, limits=replace(planned.limits, **limits))

    patch.setattr(steps, "plan", limited)
