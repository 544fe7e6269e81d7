"""`recmill audit`: what in a prepared click log would make a result wrong, with numbers."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from recmill.config.sections import Section
from recmill.config.sizes import parse_bytes
from recmill.data.click_rows import BLOCK_ROWS, ClickRows, StoredDay, bad_id_text, feature_of_column, id_limits
from recmill.errors import ConfigError
from recmill.observe.progress import Progress
from recmill.schema import ClicksDescription, Dataset, SparseFeature, open_dataset

HELD_OUT = ("val", "test")
# A log repeats a few rows by coincidence. A split that overlaps with train repeats a large part of itself: all of it in
# TorchRec's Kaggle loader, whose val and test are the second half of its train.
MAX_SHARED = 0.01
MANY_UNSEEN = 0.5
FLOAT32_EXACT = 2**24  # float32 holds every id up to here, half of those up to 2^25, a quarter of those up to 2^26, ...
ROUNDED_SHARE, ROUNDED_IDS = 0.999, 32  # so large a share of so many ids is no chance
LEAST_MEMORY = 10**6
_BYTES_PER_HELD_OUT_ROW = 20  # its hash, twice while they are sorted; its part of the sieve; whether it was found
_NO_LOGARITHM, _UNCLEAR = "no logarithm of whole numbers", "unclear"


class Options(Section):
    memory_budget: str = Field("2GB", description="Most memory to use; with less the data is read more often.")


@dataclass(frozen=True)
class Finding:
    kind: Literal["failure", "remark"]
    text: str


@dataclass(frozen=True)
class PartReport:
    """The rows of a day that belong to one split. `clicks`: how many of them have label 1."""

    day: str
    split: str
    rows: int
    clicks: int
    dense: str  # what was done to the dense values, as far as it shows: log(x+3), for example


@dataclass(frozen=True)
class TableReport:
    """`unseen`: split -> share of its ids that do not occur in train. None, and empty: not counted."""

    name: str
    rows: int
    ids_in_train: int | None
    unseen: dict[str, float]


@dataclass(frozen=True)
class AuditReport:
    """`shared_rows`: split -> how many of its rows are in train too."""

    path: str
    rows: dict[str, int]
    shared_rows: dict[str, int]
    parts: list[PartReport]
    tables: list[TableReport]
    findings: list[Finding]

    @property
    def num_failures(self) -> int:
        return sum(finding.kind == "failure" for finding in self.findings)


def audit(path: str | Path, *, memory_budget: str = "2GB") -> AuditReport:
    """Reads the whole dataset: once, or as often as the memory is too small to count everything together."""
    dataset = open_dataset(path)
    description = dataset.description
    if not isinstance(description, ClicksDescription):
        raise ConfigError(f"{path} holds histories: recmill audit is for click logs.")
    if (memory := parse_bytes(memory_budget, "--memory-budget")) < LEAST_MEMORY:
        raise ConfigError(f"--memory-budget {memory_budget}: 1MB is the least.")
    rows = {split: sum(r.stop - r.start for r in ranges) for split, ranges in description.splits.items()}
    num_held_out = sum(rows.get(split, 0) for split in HELD_OUT)
    readings = _tables_per_reading([feature.rows for feature in description.sparse], num_held_out, memory)
    values, ids, shared = _Values(description), dict[int, _IdCounts](), Counter[str]()
    with Progress("auditing", len(readings) * (sum(rows.values()) + num_held_out), "rows") as progress:
        for number, tables in enumerate(readings):
            counts = {table: _IdCounts() for table in tables}
            hashes = _HeldOutHashes(number, len(readings))
            _read(dataset, counts, hashes, values if number == 0 else None, progress)
            ids |= counts
            shared.update(hashes.num_found())
    parts = _parts(dataset, values)
    return AuditReport(
        path=str(path),
        rows=rows,
        shared_rows={split: shared[split] for split in HELD_OUT if split in rows},
        parts=parts,
        tables=[_table_report(feature, ids.get(table)) for table, feature in enumerate(description.sparse)],
        findings=[
            *values.findings(),
            *_label_findings(parts),
            *_dense_findings(parts),
            *_shared_findings(rows, shared),
            *(f for table, feature in enumerate(description.sparse) for f in _id_findings(feature, ids.get(table))),
        ],
    )


def _tables_per_reading(sizes: list[int], num_held_out: int, memory: int) -> list[list[int]]:
    """Half of the memory is for a bit per id of these tables, half for the hashes of held-out rows.

    A table that does not fit alone is in no reading.
    """
    readings: list[list[int]] = [[]]
    free = memory // 2
    for table, rows in enumerate(sizes):
        if rows // 8 > memory // 2:
            continue
        if rows // 8 > free:
            readings.append([])
            free = memory // 2
        readings[-1].append(table)
        free -= rows // 8
    needed = -(-num_held_out * _BYTES_PER_HELD_OUT_ROW // (memory // 2))
    return readings + [[] for _ in range(needed - len(readings))]


@dataclass(frozen=True)
class _Block:
    """Some rows of a split. Their ids column by column, since that is how they are counted: int64 [columns, rows]."""

    split: str
    day: str
    start: int
    rows: ClickRows
    ids: np.ndarray

    def hashes(self) -> np.ndarray:
        """uint64 [rows], each of all that a row holds."""
        hashes = np.zeros(len(self.rows), dtype=np.uint64)
        dense = np.ascontiguousarray(self.rows.dense.T).view(np.uint32)
        for column in (*dense, *self.ids.view(np.uint64), self.rows.labels.view(np.uint32)):
            hashes ^= column
            hashes *= np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, as in splitmix64
            hashes ^= hashes >> np.uint64(32)
        return hashes


def _blocks(dataset: Dataset, splits: list[str], progress: Progress) -> Iterator[_Block]:
    assert isinstance(dataset.description, ClicksDescription)
    for split in splits:
        for part in dataset.description.splits.get(split, []):
            for start, rows in StoredDay(dataset, part.day).blocks(part.start, part.stop):
                yield _Block(split, part.day, start, rows, np.ascontiguousarray(rows.ids.T, dtype=np.int64))
                progress.advance(len(rows))


def _read(
    dataset: Dataset,
    counts: dict[int, "_IdCounts"],
    hashes: "_HeldOutHashes",
    values: "_Values | None",
    progress: Progress,
) -> None:
    """Held-out rows first, to look for them in train; and again after it, to look for their ids there."""
    description = dataset.description
    assert isinstance(description, ClicksDescription)
    seen = {table: _Seen(description.sparse[table].rows) for table in counts}
    hot = description.multi_hot or [1] * len(description.sparse)
    columns = {table: slice(sum(hot[:table]), sum(hot[: table + 1])) for table in counts}
    for block in _blocks(dataset, [split for split in description.splits if split != "train"], progress):
        if values:
            values.add(block)
        if block.split in HELD_OUT:
            hashes.add(block.split, block.hashes())
    hashes.sort()
    for block in _blocks(dataset, ["train"], progress):
        if values:
            values.add(block)
        hashes.find(block.hashes())
        for table, count in counts.items():
            count.add_train(seen[table], block.ids[columns[table]])
    for block in _blocks(dataset, list(HELD_OUT), progress):
        for table, count in counts.items():
            count.add_held_out(seen[table], block.split, block.ids[columns[table]])


class _Seen:
    """A bit for each of so many numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bits = np.zeros(size // 8 + 1, dtype=np.uint8)

    def has(self, numbers: np.ndarray) -> np.ndarray:
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(bool)

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Those that are new, each once."""
        new = np.sort(numbers[~self.has(numbers)])
        new = new[np.append(True, new[1:] != new[:-1])[: len(new)]]
        np.bitwise_or.at(self._bits, new >> 3, np.left_shift(1, new & 7).astype(np.uint8))
        return new


class _HeldOutHashes:
    """Held-out rows whose hash is `number` modulo `readings`, and which of them were found in train."""

    def __init__(self, number: int, readings: int) -> None:
        self._number, self._readings = np.uint64(number), np.uint64(readings)
        self._parts: dict[str, list[np.ndarray]] = defaultdict(list)
        self._sorted: dict[str, np.ndarray] = {}
        self._is_found: dict[str, np.ndarray] = {}

    def _own(self, hashes: np.ndarray) -> np.ndarray:
        return hashes if self._readings == 1 else hashes[hashes % self._readings == self._number]

    def add(self, split: str, hashes: np.ndarray) -> None:
        self._parts[split].append(self._own(hashes))

    def sort(self) -> None:
        for split in list(self._parts):
            hashes = self._sorted[split] = np.concatenate(self._parts.pop(split))
            hashes.sort()
            self._is_found[split] = np.zeros(len(hashes), dtype=bool)
        # Most rows of train are in no other split: a few bits tell so faster than a search in the sorted hashes.
        self._sieve = _Seen(16 * sum(map(len, self._sorted.values())) + 1)
        for hashes in self._sorted.values():
            for start in range(0, len(hashes), BLOCK_ROWS):
                self._sieve.add(self._bit(hashes[start : start + BLOCK_ROWS]))

    def _bit(self, hashes: np.ndarray) -> np.ndarray:
        return ((hashes >> np.uint64(1)) % np.uint64(self._sieve.size)).astype(np.int64)

    def find(self, hashes: np.ndarray) -> None:
        hashes = self._own(hashes)
        hashes = np.sort(hashes[self._sieve.has(self._bit(hashes))])
        for split, own in self._sorted.items():
            if not len(own):
                continue
            places = np.minimum(np.searchsorted(own, hashes), len(own) - 1)
            self._is_found[split][places[own[places] == hashes]] = True

    def num_found(self) -> dict[str, int]:
        """Rows per split. Of equal rows only the first was marked."""
        counts = {}
        for split, own in self._sorted.items():
            found = own[self._is_found[split]]
            counts[split] = int((np.searchsorted(own, found, side="right") - np.searchsorted(own, found)).sum())
        return counts


@dataclass
class _IdCounts:
    """Of one table. Ids of train count once each, held-out ones as often as they occur."""

    in_train: int = 0
    occurrences: Counter[str] = field(default_factory=Counter)  # by split
    unseen: Counter[str] = field(default_factory=Counter)
    large: Counter[str] = field(default_factory=Counter)  # beyond what float32 holds exactly
    exact: Counter[str] = field(default_factory=Counter)  # of these, held exactly nevertheless

    def add_train(self, seen: _Seen, ids: np.ndarray) -> None:
        """ids [per row, rows]. Only the first of a row is judged: MLPerf's multi-hot logs add random ones to it."""
        for number, column in enumerate(ids):
            new = seen.add(_inside(column, seen.size))
            self.in_train += len(new)
            if number == 0:
                self._judge("train", new)

    def add_held_out(self, seen: _Seen, split: str, ids: np.ndarray) -> None:
        inside = _inside(ids.ravel(), seen.size)
        self.occurrences[split] += len(inside)
        self.unseen[split] += int((~seen.has(inside)).sum())
        self._judge("held out", _inside(ids[0], seen.size))

    def _judge(self, where: str, ids: np.ndarray) -> None:
        large = ids[ids > FLOAT32_EXACT]
        self.large[where] += len(large)
        self.exact[where] += int((large.astype(np.float32).astype(np.int64) == large).sum())

    def exact_share(self, where: str) -> float:
        return self.exact[where] / self.large[where] if self.large[where] else 0.0


def _inside(ids: np.ndarray, rows: int) -> np.ndarray:
    is_inside = ids.view(np.uint64) < np.uint64(rows)
    return ids if is_inside.all() else ids[is_inside]


class _Values:
    """Labels of 1 by (day, split), and single values that are wrong: how many of a kind in a file, and the first."""

    def __init__(self, description: ClicksDescription) -> None:
        self._about, self._limits = description, id_limits(description)[:, None]
        self.clicks: Counter[tuple[str, str]] = Counter()
        self._bad: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}

    def add(self, block: _Block) -> None:
        description, labels, dense = self._about, block.rows.labels, block.rows.dense
        self.clicks[block.day, block.split] += int((labels == 1).sum())
        files = description.day_files(block.day)
        is_label = labels == -1 if block.split == "unlabelled" else (labels == 0) | (labels == 1)
        if not is_label.all():
            row = int(np.argmin(is_label))
            self._note(files[-1], "wrong labels", ~is_label, f"row {block.start + row:,}: label {labels[row]}")
        if not np.isfinite(dense).all():
            row, column = np.argwhere(~np.isfinite(dense))[0]
            place = f"row {block.start + row:,}, column {description.dense[column]}"
            self._note(
                files[0], "dense values that are not finite", ~np.isfinite(dense), f"{place}: {dense[row, column]}"
            )
        is_outside = block.ids.view(np.uint64) >= self._limits
        if is_outside.any():
            row, column = np.argwhere(is_outside.T)[0]
            file, value = description.sparse_file(block.day), int(block.ids[column, row])
            text = bad_id_text(file, block.start + int(row), feature_of_column(description, int(column)), value)
            self._note(file, "ids outside their tables", is_outside, text.removeprefix(f"{file}: "))

    def _note(self, file: str, what: str, is_bad: np.ndarray, first: str) -> None:
        self._bad[file, what] += int(is_bad.sum())
        self._first.setdefault((file, what), first)

    def findings(self) -> list[Finding]:
        return [
            Finding("failure", f"{file}: {count:,} {what}, the first in {self._first[file, what]}")
            for (file, what), count in self._bad.items()
        ]


def _parts(dataset: Dataset, values: _Values) -> list[PartReport]:
    description = dataset.description
    assert isinstance(description, ClicksDescription)
    dense = {
        day: _dense_transform(StoredDay(dataset, day).take(slice(0, BLOCK_ROWS)).dense) for day in description.days
    }
    rows = Counter[tuple[str, str]]()
    for split, ranges in description.splits.items():
        for part in ranges:
            rows[part.day, split] += part.stop - part.start
    return [PartReport(day, split, n, values.clicks[day, split], dense[day]) for (day, split), n in rows.items()]


def _dense_transform(dense: np.ndarray) -> str:
    """log(x+a): by far the most frequent count is 0, which also stands for missing, and a is what it became."""
    numbers = np.exp(dense[dense < np.log(10_000)], dtype=np.float64)  # of larger ones float32 is too coarse to tell
    nearest = np.rint(numbers)
    is_whole = (np.abs(numbers - nearest) < 0.02) & (nearest >= 1)
    is_too_large = dense > np.log(2.0**32)  # counts have 32 bits
    if not len(numbers) or is_whole.mean() < 0.99 or is_too_large.mean() > 0.01:
        return _NO_LOGARITHM
    counts = np.bincount(nearest.astype(np.int64))
    return f"log(x+{counts.argmax()})" if counts.max() > 0.2 * dense.size else _UNCLEAR


def _label_findings(parts: list[PartReport]) -> list[Finding]:
    rows, clicks = Counter[str](), Counter[str]()
    for part in parts:
        rows[part.split] += part.rows
        clicks[part.split] += part.clicks
    return [
        Finding(
            "failure", f"{split}: {'every' if clicks[split] else 'no'} label is 1: nothing can be learned or measured"
        )
        for split in rows
        if split != "unlabelled" and clicks[split] in (0, rows[split])
    ]


def _dense_findings(parts: list[PartReport]) -> list[Finding]:
    days: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        if part.day not in days[part.dense]:
            days[part.dense].append(part.day)
    ways = [f"{way} in {', '.join(of_way)}" for way, of_way in days.items() if way != _UNCLEAR]
    if len(ways) > 1:
        text = f"dense values were transformed in different ways: {'; '.join(ways)}. Prepare all days in one way"
        return [Finding("failure", text)]
    remarks = {
        _NO_LOGARITHM: "dense values are not logarithms of whole numbers",
        _UNCLEAR: "no dense value is frequent",
    }
    return [Finding("remark", f"{text}: transform not checked") for way, text in remarks.items() if way in days]


def _shared_findings(rows: dict[str, int], shared: Counter[str]) -> list[Finding]:
    return [
        Finding(
            "failure" if shared[split] > MAX_SHARED * rows[split] else "remark",
            f"{split}: {shared[split]:,} of {rows[split]:,} rows ({shared[split] / rows[split]:.2%}) are in train too",
        )
        for split in HELD_OUT
        if shared[split]
    ]


def _table_report(feature: SparseFeature, counts: _IdCounts | None) -> TableReport:
    if counts is None:
        return TableReport(feature.name, feature.rows, None, {})
    unseen = {split: counts.unseen[split] / total for split, total in counts.occurrences.items() if total}
    return TableReport(feature.name, feature.rows, counts.in_train, unseen)


def _id_findings(feature: SparseFeature, counts: _IdCounts | None) -> list[Finding]:
    if counts is None:
        text = (
            f"{feature.name}: a table of {feature.rows:,} rows does not fit in the memory budget: its ids not counted"
        )
        return [Finding("remark", text)]
    findings = []
    if counts.large["train"] >= ROUNDED_IDS and counts.exact_share("train") >= ROUNDED_SHARE:
        text = (
            f"{feature.name}: {counts.exact['train']:,} of the {counts.large['train']:,} ids above 2^24 in train "
            f"({counts.exact_share('train'):.1%}) are exact in float32; by chance half or fewer would be; "
            f"in val and test: {counts.exact_share('held out'):.1%} of {counts.large['held out']:,}. "
            "Train was rounded through float32: prepare it again from the raw logs"
        )
        findings.append(Finding("failure", text))
    for split, share in _table_report(feature, counts).unseen.items():
        if share > MANY_UNSEEN:
            findings.append(
                Finding("remark", f"{feature.name}: {share:.1%} of the ids in {split} do not occur in train")
            )
    return findings
