"""`recmill audit`: report what in a prepared click log would make results wrong."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import numpy as np

from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Verify, dataset_checks
from recmill.config.options import checked_options, given_path, parse_bytes
from recmill.config.sections import Section, key
from recmill.data.checks import BadValues, ClickChecks
from recmill.data.click_rows import BLOCK_ROWS, Block, StoredDay, split_blocks
from recmill.data.opening import open_dataset
from recmill.data.recipes import RECIPE_FILE, vocabulary_file
from recmill.data.seen import BitSet, SeenRows, row_hashes
from recmill.datasets.vocabularies import RARE
from recmill.errors import ConfigError
from recmill.metrics.auc import auroc_alone
from recmill.observe.printed import print_audit, printed_text
from recmill.observe.progress import Progress
from recmill.schema import UNLABELLED, ClicksDescription, Dataset, SparseFeature

HELD_OUT = ("val", "test")
# A log repeats a few rows by coincidence. A split that overlaps with train repeats a large part of itself: all of it in
# TorchRec's Kaggle loader, whose val and test are the second half of its train.
MAX_SHARED = 0.01
MANY_UNSEEN = 0.5
FLOAT32_EXACT = 2**24  # float32 holds every id up to here, then every second one up to 2^25, every fourth up to 2^26
ROUNDED_SHARE = 0.999  # of the larger ids: if this share is exact in float32, all of them were rounded
ROUNDED_IDS = 32  # fewer larger ids prove nothing
LEAK = 0.99  # AUROC of one feature alone; `recmill schema` leaves such columns out
SUSPICIOUS = 0.9
FEW_LABELS = 40  # with fewer rows of a class, a high AUROC may be chance
_BYTES_PER_HELD_OUT_ROW = 20  # two copies of its hash while hashes are collected, 16 bits of a filter, its mark
_NO_LOGARITHM = "no logarithm of whole numbers"
_UNCLEAR = "unclear"
_BAD_VALUES = {"id": "ids outside their tables", "dense": "dense values that are not finite", "label": "wrong labels"}


class Options(Section):
    memory_budget: str = key("2GB", "Most memory to use; with less the data is read more often.")
    verify: Verify = None


@dataclass(frozen=True)
class Finding:
    kind: Literal["failure", "remark"]
    text: str


@dataclass(frozen=True)
class PartReport:
    """The rows of a day that belong to one split."""

    day: str
    split: str
    rows: int
    clicks: int  # rows with label 1
    dense: str  # how the dense values seem to have been transformed: log(x+3), for example; of own logs empty


@dataclass(frozen=True)
class TableReport:
    """The ids of one table.

    Vocabularies map both rare and unseen ids to one row. If train uses that row, `unseen` does not count it and
    is too small, and `unseen_or_rare` counts it and is too large; otherwise `unseen_or_rare` is empty.
    """

    name: str
    rows: int
    ids_in_train: int | None  # None: not counted
    unseen: dict[str, float]  # split -> share of its ids that do not occur in train; empty: not counted
    unseen_or_rare: dict[str, float]
    rare_in_train: float | None  # share of the ids of train that are in this row; None: there is no such row


@dataclass(frozen=True)
class AuditReport:
    path: str
    rows: dict[str, int]  # by split
    shared_rows: dict[str, int]  # by split: rows that are in train too
    parts: list[PartReport]
    tables: list[TableReport]
    findings: list[Finding]

    @property
    def num_failures(self) -> int:
        return sum(finding.kind == "failure" for finding in self.findings)

    def __str__(self) -> str:
        return printed_text(print_audit, self)


class AuditOptions(TypedDict, total=False):
    memory_budget: str
    verify: bool | None


@checked_keywords
def audit(path: str | Path, **options: Unpack[AuditOptions]) -> AuditReport:
    """Read a click log and report what is wrong with it. With a small memory budget it is read several times.

    Options are those of `recmill audit --help`, with underscores: audit("d", memory_budget="500MB").
    """
    checked: Options = checked_options("audit", Options, dict(options))
    dataset = open_dataset(given_path(path, "DATASET"), dataset_checks(checked.verify))
    description = dataset.description
    if not isinstance(description, ClicksDescription):
        raise ConfigError(f"{path} holds histories: recmill audit is for click logs.")
    if (memory := parse_bytes(checked.memory_budget, "--memory-budget")) < 10**6:
        raise ConfigError(f"--memory-budget {checked.memory_budget}: 1MB is the least.")
    rows = {split: sum(r.stop - r.start for r in ranges) for split, ranges in description.splits.items()}
    num_held_out = sum(rows.get(split, 0) for split in HELD_OUT)
    readings = _readings([feature.rows for feature in description.sparse], num_held_out, memory)
    values = _Values(description)
    shared = Counter[str]()
    tables = {table: _not_counted(feature) for table, feature in enumerate(description.sparse)}
    with Progress("auditing", len(readings) * (sum(rows.values()) + num_held_out), "rows") as progress:
        for reading in readings:
            counted, shared_rows = _read(dataset, reading, values if reading.number == 0 else None, progress)
            tables |= counted
            shared.update(shared_rows)
    parts = _part_reports(dataset, values)
    return AuditReport(
        path=str(path),
        rows=rows,
        shared_rows={split: shared[split] for split in HELD_OUT if split in rows},
        parts=parts,
        tables=[report for report, _ in tables.values()],
        findings=[
            *values.findings(),
            *_label_findings(rows, parts),
            *_dense_findings(parts),
            *_shared_findings(rows, shared),
            *_leak_findings(dataset),
            *(finding for _, findings in tables.values() for finding in findings),
        ],
    )


@dataclass(frozen=True)
class _Reading:
    """One of `count` passes over the data. It counts ids of `tables`, and rows whose hash % `count` is `number`."""

    tables: list[int]
    number: int
    count: int

    def hashes(self, block: Block, ids: np.ndarray) -> np.ndarray:
        hashes = row_hashes(block.rows, ids)
        return hashes if self.count == 1 else hashes[hashes % np.uint64(self.count) == np.uint64(self.number)]


def _readings(sizes: list[int], num_held_out: int, memory: int) -> list[_Reading]:
    """Plan passes: half of the memory holds one bit per id of their tables, half the hashes of held-out rows."""
    tables: list[list[int]] = [[]]
    free = memory // 2
    for table, rows in enumerate(sizes):
        if rows // 8 > memory // 2:  # too large for any pass
            continue
        if rows // 8 > free:
            tables.append([])
            free = memory // 2
        tables[-1].append(table)
        free -= rows // 8
    count = max(len(tables), -(-num_held_out * _BYTES_PER_HELD_OUT_ROW // (memory // 2)))
    return [_Reading(tables[number] if number < len(tables) else [], number, count) for number in range(count)]


def _blocks(
    dataset: Dataset, splits: Iterable[str], progress: Progress, values: "_Values | None" = None
) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield blocks and their ids transposed, int64 [columns, n], to count them by column; add them to `values`."""
    for block in split_blocks(dataset, splits):
        if values:
            values.add(block)
        yield block, np.ascontiguousarray(block.rows.ids.T, dtype=np.int64)
        progress.advance(len(block.rows))


def _read(
    dataset: Dataset, reading: _Reading, values: "_Values | None", progress: Progress
) -> tuple[dict[int, "_Table"], Counter[str]]:
    """Return the reports of this reading's tables, and by split how many of its rows are in train too.

    Held-out rows are read before train, for the hashes to look for in it, and again after train, to count them.
    """
    description = dataset.clicks
    ids_of = {table: _IdCounts(description, table) for table in reading.tables}
    ends = np.cumsum(description.ids_per_row)
    columns = {table: slice(ends[table] - description.ids_per_row[table], ends[table]) for table in reading.tables}
    not_train = [split for split in description.splits if split != "train"]
    blocks = _blocks(dataset, not_train, progress, values)
    hashes = (reading.hashes(block, ids) for block, ids in blocks if block.split in HELD_OUT)
    rows = SeenRows(np.concatenate([np.empty(0, np.uint64), *hashes]))
    for block, ids in _blocks(dataset, ["train"], progress, values):
        rows.mark(reading.hashes(block, ids))
        for table, counts in ids_of.items():
            counts.add_train(ids[columns[table]])
    shared = Counter[str]()
    for block, ids in _blocks(dataset, HELD_OUT, progress):
        shared[block.split] += rows.num_marked(reading.hashes(block, ids))
        for table, counts in ids_of.items():
            counts.add_held_out(block.split, ids[columns[table]])
    return {table: counts.result() for table, counts in ids_of.items()}, shared


class _IdCounts:
    """Counts the ids of one table: each id of train once, ids of held-out splits as often as they occur."""

    def __init__(self, description: ClicksDescription, table: int) -> None:
        self._feature = description.sparse[table]
        self._seen = BitSet(self._feature.rows)
        # `prepare criteo` and vocabularies of own logs give both rare and unseen ids the row RARE.
        is_criteo = description.name == "criteo" and description.recipe.get("ids") == "contiguous"
        self._has_rare = is_criteo or vocabulary_file(self._feature.name) in description.files
        self._remedy = "lower --min-frequency" if is_criteo else "lower its min_frequency in the schema"
        self._in_train = 0
        self._occurrences = Counter[str]()  # by split
        self._unseen = Counter[str]()
        self._rare = Counter[str]()
        self._large = Counter[str]()  # ids beyond FLOAT32_EXACT, in "train" and "held out"
        self._exact = Counter[str]()  # those of them that float32 holds exactly nevertheless

    def add_train(self, ids: np.ndarray) -> None:
        """Add ids [per row, n]. Only the first id of a row shows rounding: MLPerf's multi-hot logs add random ones."""
        for number, column in enumerate(ids):
            inside = self._inside(column)
            new = self._seen.add(inside)
            self._in_train += len(new)
            if self._has_rare:
                self._occurrences["train"] += len(inside)
                self._rare["train"] += int((inside == RARE).sum())
            if number == 0:
                self._count_rounded("train", new)

    def add_held_out(self, split: str, ids: np.ndarray) -> None:
        inside = self._inside(ids.ravel())
        self._occurrences[split] += len(inside)
        self._unseen[split] += int((~self._seen.has(inside)).sum())
        if self._has_rare:
            self._rare[split] += int((inside == RARE).sum())
        self._count_rounded("held out", self._inside(ids[0]))

    def _inside(self, ids: np.ndarray) -> np.ndarray:
        is_inside = ids.view(np.uint64) < np.uint64(self._seen.size)
        return ids if is_inside.all() else ids[is_inside]

    def _count_rounded(self, where: str, ids: np.ndarray) -> None:
        large = ids[ids > FLOAT32_EXACT]
        self._large[where] += len(large)
        self._exact[where] += int((large.astype(np.float32).astype(np.int64) == large).sum())

    def result(self) -> "_Table":
        totals = {split: total for split, total in self._occurrences.items() if total and split != "train"}
        unseen = {split: self._unseen[split] / total for split, total in totals.items()}
        unseen_or_rare: dict[str, float] = {}
        if self._has_rare and self._seen.has(np.array([RARE]))[0]:
            unseen_or_rare = {s: (self._unseen[s] + self._rare[s]) / total for s, total in totals.items()}
        name = self._feature.name
        what = "are rare or do not occur in train" if unseen_or_rare else "do not occur in train"
        findings = [
            Finding("remark", f"{name}: {share:.1%} of the ids in {split} {what}")
            for split, share in (unseen_or_rare or unseen).items()
            if share > MANY_UNSEEN
        ]
        rare = self._rare["train"] / max(self._occurrences["train"], 1) if self._has_rare else None
        if rare and rare > MANY_UNSEEN:
            text = f"{name}: {rare:.1%} of the ids in train are rare and share one row: {self._remedy}"
            findings.append(Finding("remark", text))
        report = TableReport(name, self._feature.rows, self._in_train, unseen, unseen_or_rare, rare)
        return report, [*self._rounding_findings(), *findings]

    def _rounding_findings(self) -> list[Finding]:
        share = {where: self._exact[where] / count for where, count in self._large.items() if count}
        if self._large["train"] < ROUNDED_IDS or share["train"] < ROUNDED_SHARE:
            return []
        text = (
            f"{self._feature.name}: {self._exact['train']:,} of the {self._large['train']:,} ids above 2^24 in train "
            f"({share['train']:.1%}) are exact in float32; by chance half or fewer would be; "
            f"in val and test: {share.get('held out', 0.0):.1%} of {self._large['held out']:,}. "
            "Train was rounded through float32: prepare it again from the raw logs"
        )
        return [Finding("failure", text)]


_Table = tuple[TableReport, list[Finding]]


def _not_counted(feature: SparseFeature) -> _Table:
    text = f"{feature.name}: a table of {feature.rows:,} rows does not fit in the memory budget; ids were not counted"
    return TableReport(feature.name, feature.rows, None, {}, {}, None), [Finding("remark", text)]


class _Values:
    """Labels of 1 by (day, split), and bad values by file and kind."""

    def __init__(self, description: ClicksDescription) -> None:
        self._checks = ClickChecks(description)
        self.clicks = Counter[tuple[str, str]]()
        self._counts = Counter[tuple[str, str]]()
        self._first: dict[tuple[str, str], BadValues] = {}

    def add(self, block: Block) -> None:
        self.clicks[block.day, block.split] += int((block.rows.labels == 1).sum())
        for bad in self._checks.find(block):
            self._counts[bad.file, bad.kind] += bad.count
            self._first.setdefault((bad.file, bad.kind), bad)

    def findings(self) -> list[Finding]:
        return [
            Finding("failure", f"{bad.file}: {count:,} {_BAD_VALUES[bad.kind]}, the first in {bad.where}: {bad.fact}")
            for bad, count in zip(self._first.values(), self._counts.values(), strict=True)
        ]


def _part_reports(dataset: Dataset, values: _Values) -> list[PartReport]:
    rows = Counter[tuple[str, str]]()
    for split, ranges in dataset.clicks.splits.items():
        for part in ranges:
            rows[part.day, split] += part.stop - part.start
    days = {day for day, _ in rows}
    dense = dict.fromkeys(days, "")
    if RECIPE_FILE not in dataset.description.files:  # whose schema says how numbers are transformed
        dense = {day: _dense_transform(StoredDay(dataset, day).take(slice(0, BLOCK_ROWS)).dense) for day in days}
    return [PartReport(day, split, n, values.clicks[day, split], dense[day]) for (day, split), n in rows.items()]


def _dense_transform(dense: np.ndarray) -> str:
    """Guess the transform log(x+a). The most frequent count x is 0, also used for missing values: it became log(a)."""
    numbers = np.exp(dense[dense < np.log(10_000)], dtype=np.float64)  # float32 is too coarse to judge larger ones
    nearest = np.rint(numbers)
    is_integer = (np.abs(numbers - nearest) < 0.02) & (nearest >= 1)
    is_too_large = dense > np.log(2.0**32)  # counts have 32 bits
    if not len(numbers) or is_integer.mean() < 0.99 or is_too_large.mean() > 0.01:
        return _NO_LOGARITHM
    counts = np.bincount(nearest.astype(np.int64))
    return f"log(x+{counts.argmax()})" if counts.max() > 0.2 * dense.size else _UNCLEAR


def _label_findings(rows: dict[str, int], parts: list[PartReport]) -> Iterator[Finding]:
    for split in rows:
        clicks = sum(part.clicks for part in parts if part.split == split)
        if rows[split] and split != UNLABELLED and clicks in (0, rows[split]):
            which = "every" if clicks else "no"
            yield Finding("failure", f"{split}: {which} label is 1: nothing can be learned or measured")


def _dense_findings(parts: list[PartReport]) -> list[Finding]:
    days: dict[str, dict[str, None]] = defaultdict(dict)  # by transform, in order
    for part in parts:
        days[part.dense][part.day] = None
    known = [f"{transform} in {', '.join(days[transform])}" for transform in days if transform != _UNCLEAR]
    if len(known) > 1:
        fact = f"dense values were transformed in different ways: {'; '.join(known)}"
        return [Finding("failure", f"{fact}. Prepare all days in one way")]
    remarks = {
        _NO_LOGARITHM: "dense values are not logarithms of whole numbers",
        _UNCLEAR: "no dense value is frequent",
    }
    return [Finding("remark", f"{text}: transform not checked") for kind, text in remarks.items() if kind in days]


def _shared_findings(rows: dict[str, int], shared: Counter[str]) -> Iterator[Finding]:
    for split in HELD_OUT:
        if shared[split]:
            share = shared[split] / rows[split]
            kind: Literal["failure", "remark"] = "failure" if share > MAX_SHARED else "remark"
            yield Finding(kind, f"{split}: {shared[split]:,} of {rows[split]:,} rows ({share:.2%}) are in train too")


def _leak_findings(dataset: Dataset) -> Iterator[Finding]:
    """Yield the features that predict the label too well alone, in the first block of train."""
    rows = next(block.rows for block in split_blocks(dataset, ["train"]))
    is_click = rows.labels == 1
    if min(is_click.sum(), (~is_click).sum()) < FEW_LABELS:
        return
    features = dict(zip(dataset.clicks.dense, np.nan_to_num(rows.dense).T, strict=True))
    ids = np.split(rows.ids, np.cumsum(dataset.clicks.ids_per_row)[:-1], axis=1)
    names = [feature.name for feature in dataset.clicks.sparse]
    for name, values in (features | dict(zip(names, ids, strict=True))).items():
        if (area := auroc_alone(values, is_click) or 0.5) > SUSPICIOUS:
            fact = f"{name}: alone it reaches an AUROC of {area:.3f} in train"
            remedy = "Is its value known before the label? If not, prepare the data without it"
            yield Finding("failure" if area > LEAK else "remark", f"{fact}. {remedy}")
