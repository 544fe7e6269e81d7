"""What is decided before any work on Criteo logs: the raw files, the limits, the splits and the description."""

import json
import logging
import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recmill.config.sizes import parse_bytes
from recmill.data.click_rows import BLOCK_ROWS
from recmill.datasets.click_log import ParsedLog
from recmill.datasets.clicks import PARQUET_ROWS, dense_names, sparse_names, split_rows
from recmill.datasets.compressed import SUFFIXES, sample_digest
from recmill.datasets.criteo.options import CRITEO, Options, Rules, rules_of
from recmill.datasets.vocabularies import FIRST_ID
from recmill.datasets.writing import MADE_BY, Work, seal
from recmill.errors import ConfigError, DataError
from recmill.hardware.cpu import num_cores
from recmill.schema import SPLITS, ClicksDescription, Description, FileInfo, RowRange, SourceFile, SparseFeature

log = logging.getLogger(__name__)

_DEFAULT_BUDGET = "4GB"
_SMALLEST_BUDGET = 512_000_000
_PROGRAM_BYTES = 300_000_000  # Python with its libraries
_DAY = re.compile(r"day_(\d+)(\.gz|\.zst)?")


@dataclass(frozen=True)
class RawLog:
    """A raw file. `name` is day_0, day_1, ... or, for Kaggle, train and test; Kaggle's test file has no labels."""

    name: str
    path: Path
    has_labels: bool
    bytes: int
    sample: str  # digest of the file, or of samples spread over a large one


@dataclass(frozen=True)
class Limits:
    """How much is worked on at once. The prepared rows are the same for all limits."""

    memory: int  # bytes, besides the program itself
    chunk_bytes: int  # of text that a thread parses at once
    block_rows: int = 1 << 17  # shuffled rows that are written at once
    rows_per_file: int = PARQUET_ROWS
    rows_per_group: int = BLOCK_ROWS  # in Spark's Parquet files


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of log `index`, all of one split. `number` is the first row's among all training rows."""

    split: str
    index: int
    start: int
    stop: int
    number: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    rules: Rules
    logs: list[RawLog]
    limits: Limits
    engine: str
    spark_master: str | None

    @property
    def recipe(self) -> dict[str, Any]:
        """Same recipe, same bytes (for Spark: same rows). Memory, cores and paths are not part of it."""
        files = {raw.name: f"{raw.bytes} bytes, sample {raw.sample}" for raw in self.logs}
        return json.loads(json.dumps({**asdict(self.rules), "engine": self.engine, "files": files}))

    @property
    def inputs(self) -> dict[str, Any]:
        return {str(raw.path): [raw.bytes, raw.path.stat().st_mtime_ns] for raw in self.logs}

    def segments(self, read: list[ParsedLog]) -> list[Segment]:
        """Return segments that cover every row of every log, in the order of the logs."""
        names = [raw.name for raw in self.logs]
        rows = {raw.name: parsed.rows for raw, parsed in zip(self.logs, read, strict=True)}
        labelled = {raw.name: rows[raw.name] for raw in self.logs if raw.has_labels}
        splits = split_rows(labelled, self.rules.last_day, self.rules.val_fraction)
        splits["unlabelled"] = [RowRange(day=n, start=0, stop=rows[n]) for n in names if n not in labelled]
        segments = []
        number = 0
        for split, ranges in splits.items():
            for part in ranges:
                is_train = split == "train"
                segments.append(Segment(split, names.index(part.day), part.start, part.stop, number if is_train else 0))
                number += part.stop - part.start
        return sorted(segments, key=lambda segment: (segment.index, segment.start))

    def features(self, vocabulary_sizes: list[int]) -> list[SparseFeature]:
        rules = self.rules
        names = sparse_names(CRITEO.num_sparse)
        sizes = rules.table_size or (2**32,) * len(names)
        if rules.ids == "contiguous" and not (rules.compat and rules.table_size):
            sizes = tuple(size + FIRST_ID for size in vocabulary_sizes)
        if rules.ids == "hash64" and not rules.table_size:
            return [SparseFeature(name=name, rows=2**64, first_id=-(2**63)) for name in names]
        if rules.compat == "oneflow":
            size = rules.table_size[0]
            return [SparseFeature(name=name, rows=size + 1, first_id=size * c) for c, name in enumerate(names)]
        if rules.is_rounded:
            sizes = tuple(max(size, int(np.float32(size - 1)) + 1) for size in sizes)  # the last id may be rounded up
        return [SparseFeature(name=name, rows=size) for name, size in zip(names, sizes, strict=True)]

    def id_type(self, vocabulary_sizes: list[int]) -> np.dtype:
        is_wide = self.rules.wide_ids or max(feature.rows for feature in self.features(vocabulary_sizes)) > 2**31
        return np.dtype(np.int64 if is_wide else np.int32)

    def describe(self, written: "Written", files: dict[str, FileInfo]) -> Description:
        rules = self.rules
        splits = self._ranges(written)
        notes = [*rules.notes, *(f"skipped: {bad}" for parsed in written.read for bad in parsed.first_bad)]
        notes += written.notes
        empty = [split for split in SPLITS if not splits[split]]
        if empty:
            notes.append(f"no rows for {' and '.join(empty)}: this dataset cannot be trained on as it is")
        return ClicksDescription(
            name="criteo",
            made_by=MADE_BY,
            recipe=self.recipe,
            files=files,
            notes=notes,
            layout="parquet" if rules.format == "parquet" else "npy",
            dense=dense_names(CRITEO.num_dense),
            dense_stored="plus-one" if rules.compat == "oneflow" else "ready",
            sparse=self.features(written.vocabulary_sizes),
            multi_hot=list(rules.multi_hot),
            splits=splits,
            source=[
                SourceFile(
                    name=raw.path.name, bytes=raw.bytes, rows=read.rows, bad_rows=read.bad_rows, sample=raw.sample
                )
                for raw, read in zip(self.logs, written.read, strict=True)
            ],
        )

    def _ranges(self, written: "Written") -> dict[str, list[RowRange]]:
        """Return where the rows of each split are stored."""
        ranges: dict[str, list[RowRange]] = {split: [] for split in SPLITS}
        for part in written.segments:
            name = self.logs[part.index].name
            if self.rules.format == "npy":
                ranges.setdefault(part.split, []).append(RowRange(day=name, start=part.start, stop=part.stop))
                continue
            for file in sorted(file for file in written.rows_of if file.startswith(f"{part.split}-{name}-")):
                day = file.removesuffix(".parquet")
                ranges.setdefault(part.split, []).append(RowRange(day=day, start=0, stop=written.rows_of[file]))
        return ranges


@dataclass(frozen=True)
class Written:
    """What an engine has written: the rows of each file, and what the description says about them."""

    rows_of: dict[str, int]
    read: list[ParsedLog]
    segments: list[Segment]
    vocabulary_sizes: list[int]  # none if ids are not contiguous
    notes: list[str]


def seal_written(plan: Plan, written: Written, work: Work) -> Description:
    names = sparse_names(CRITEO.num_sparse)[: len(written.vocabulary_sizes)]
    vocabularies = zip(map(vocabulary_file, names), written.vocabulary_sizes, strict=True)
    return seal(work.data, partial(plan.describe, written), {**written.rows_of, **dict(vocabularies)})


def vocabulary_file(name: str) -> str:
    return f"vocabulary_{name}.npy"


def log_read(raw: RawLog, parsed: ParsedLog) -> None:
    skipped = f", {parsed.bad_rows:,} bad rows skipped" if parsed.bad_rows else ""
    log.info("read %s: %s rows%s", raw.path, f"{parsed.rows:,}", skipped)


def plan(options: Options) -> Plan:
    logs = find_logs(Path(options.input), options.source)
    rules = rules_of(options, [raw.name for raw in logs])
    budget = parse_bytes(options.memory_budget or _DEFAULT_BUDGET, "--memory-budget")
    if budget < _SMALLEST_BUDGET:
        raise ConfigError(f"--memory-budget {options.memory_budget}: 512MB is the minimum.")
    memory = budget - _PROGRAM_BYTES
    limits = Limits(memory, chunk_bytes=min(max(memory // (40 * num_cores()), 1 << 20), 1 << 24))
    return Plan(rules, logs, limits, options.engine, options.spark_master)


def find_logs(path: Path, source: str | None) -> list[RawLog]:
    """Return the logs in the directory `path`, or the single log `path`, in order."""
    if not path.exists():
        raise DataError(f"{path}: no such file or directory. --input is where the raw logs are.")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    days = [file for file in files if _DAY.fullmatch(file.name)]
    kaggle = [file for file in files if _uncompressed_name(file) in ("train.txt", "test.txt")]
    if source is None and days and kaggle:
        raise DataError(f"{path} holds both {days[0].name} and {kaggle[0].name}. Choose one with --source.")
    source = source or ("kaggle" if kaggle else "1tb")
    found = kaggle if source == "kaggle" else days
    if not found:
        expected = "train.txt" if source == "kaggle" else "day_0, day_1, ..."
        present = ", ".join(file.name for file in files[:5]) or "nothing"
        raise DataError(f"{path}: no {expected} (nor with {' or '.join(SUFFIXES[1:])}); it holds {present}.")
    return _kaggle_logs(path, found) if source == "kaggle" else _day_logs(path, found)


def _uncompressed_name(file: Path) -> str:
    return file.stem if file.suffix in SUFFIXES[1:] else file.name


def _by_name(path: Path, files: list[Path]) -> dict[str, Path]:
    by_name: dict[str, Path] = {}
    for file in files:
        day = _DAY.fullmatch(file.name)
        name = f"day_{int(day[1])}" if day else _uncompressed_name(file).removesuffix(".txt")
        if name in by_name:
            raise DataError(f"{path}: {name} exists twice, as {by_name[name].name} and {file.name}.")
        by_name[name] = file
    return by_name


def _day_logs(path: Path, files: list[Path]) -> list[RawLog]:
    by_name = _by_name(path, files)
    numbers = sorted(int(name.removeprefix("day_")) for name in by_name)
    gaps = [f"day_{number}" for number in range(numbers[-1]) if number not in numbers]
    if gaps and path.is_dir():
        raise DataError(f"{path}: {', '.join(gaps)} missing, though day_{numbers[-1]} exists. Add the missing days.")
    return [_raw_log(f"day_{number}", by_name[f"day_{number}"], True) for number in numbers]


def _kaggle_logs(path: Path, files: list[Path]) -> list[RawLog]:
    by_name = _by_name(path, files)
    if "train" not in by_name:
        raise DataError(f"{path}: test.txt without train.txt: it has no labels to learn from.")
    return [_raw_log(name, by_name[name], name == "train") for name in ("train", "test") if name in by_name]


def _raw_log(name: str, file: Path, has_labels: bool) -> RawLog:
    return RawLog(name, file.absolute(), has_labels, file.stat().st_size, sample_digest(file))
