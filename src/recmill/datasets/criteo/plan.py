"""Plan the preparation of Criteo logs: find the raw files, decide limits and splits, describe the result."""

import json
import logging
import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recmill.config.options import given_path, parse_bytes
from recmill.data.click_rows import BLOCK_ROWS
from recmill.datasets.click_log import ParsedLog
from recmill.datasets.clicks import PARQUET_ROWS, dense_names, sparse_names, split_rows
from recmill.datasets.compressed import forecast_rows, sample_digest
from recmill.datasets.criteo.npy_logs import open_npy
from recmill.datasets.criteo.options import CRITEO, LOG_MIN, STORED, Options, Rules, rules_of
from recmill.datasets.vocabularies import FIRST_ID
from recmill.datasets.writing import MADE_BY, Work, seal
from recmill.errors import ConfigError, DataError, did_you_mean_path
from recmill.hardware.cpu import num_cores
from recmill.schema import (
    RECORDS,
    SPLITS,
    ClicksDescription,
    Description,
    FileInfo,
    RowRange,
    SourceFile,
    SparseFeature,
)

log = logging.getLogger(__name__)

_PROGRAM_BYTES = 300_000_000  # Python with its libraries
_LOG_NAME = re.compile(r"day_\d+|train|test")
_LOG_FILE = re.compile(r"(?:day_(?P<day>\d+)|(?P<kaggle>train|test)\.txt)(?:\.gz|\.zst)?")


@dataclass(frozen=True)
class RawLog:
    """A raw file. `name` is day_0, day_1, ... or, for Kaggle, train and test.

    If the log is npy files, as TorchRec writes them, `path` holds its ids, and the directory `others` the other two.
    """

    name: str
    path: Path
    bytes: int
    sample: str  # digest of the file, or of samples spread over a large one
    others: Path | None = None

    @property
    def has_labels(self) -> bool:
        return self.name != "test"

    def forecast_rows(self) -> int:
        return len(open_npy(self.path)) if self.others else forecast_rows(self.path)


@dataclass(frozen=True)
class Limits:
    """How much is processed at once. The prepared rows are the same for all limits."""

    memory: int  # bytes, besides the program itself
    chunk_bytes: int  # of text that a thread parses at once
    block_rows: int = 1 << 17  # shuffled rows that are written at once
    rows_per_file: int = PARQUET_ROWS
    rows_per_group: int = BLOCK_ROWS  # in Spark's Parquet files


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of one log, all of one split."""

    split: str
    log_index: int
    start: int
    stop: int
    offset: int  # rows of the same split before this segment

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Written:
    """What an engine has written and needs for the description."""

    file_rows: dict[str, int]
    parsed: list[ParsedLog]
    vocabulary_sizes: list[int]  # empty if ids are not contiguous
    notes: list[str]


@dataclass(frozen=True)
class Plan:
    rules: Rules
    logs: list[RawLog]
    limits: Limits
    engine: str
    spark_master: str | None

    @property
    def is_one_pass(self) -> bool:
        """Whether what is written of a row depends on that row alone, so that it can be written when it is read."""
        rules = self.rules
        is_independent = rules.ids != "contiguous" and rules.dense not in (LOG_MIN, STORED) and rules.shuffle == "none"
        return is_independent and rules.format == "npy"  # in other formats, each split has its own file

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the bytes (with Spark, the rows): not memory, cores or paths."""
        files = {raw.name: f"{raw.bytes} bytes, sample {raw.sample}" for raw in self.logs}
        return json.loads(json.dumps({**asdict(self.rules), "engine": self.engine, "files": files}))

    @property
    def inputs(self) -> dict[str, Any]:
        return {str(raw.path): [raw.bytes, raw.path.stat().st_mtime_ns] for raw in self.logs}

    def segments(self, parsed: list[ParsedLog]) -> list[Segment]:
        """Return segments that cover every row of every log, in the order of the logs."""
        names = [raw.name for raw in self.logs]
        rows = {name: read.rows for name, read in zip(names, parsed, strict=True)}
        labelled = {raw.name: rows[raw.name] for raw in self.logs if raw.has_labels}
        splits = split_rows(labelled, self.rules.last_day, self.rules.val_fraction)
        splits["unlabelled"] = [RowRange(day=name, start=0, stop=rows[name]) for name in names if name not in labelled]
        segments = []
        for split, ranges in splits.items():
            offset = 0
            for rows_of_day in ranges:
                log_index = names.index(rows_of_day.day)
                segments.append(Segment(split, log_index, rows_of_day.start, rows_of_day.stop, offset))
                offset += segments[-1].rows
        return sorted(segments, key=lambda segment: (segment.log_index, segment.start))

    def features(self, vocabulary_sizes: list[int]) -> list[SparseFeature]:
        rules = self.rules
        names = sparse_names(CRITEO.num_sparse)
        if rules.ids == "hash64" and not rules.table_size:
            return [SparseFeature(name=name, rows=2**64, first_id=-(2**63)) for name in names]
        if rules.compat == "oneflow":
            size = rules.table_size[0]
            return [SparseFeature(name=name, rows=size + 1, first_id=size * c) for c, name in enumerate(names)]
        sizes = rules.table_size or (2**32,) * len(names)
        if rules.ids == "contiguous" and not (rules.compat and rules.table_size):
            sizes = tuple(size + FIRST_ID for size in vocabulary_sizes)
        if rules.is_rounded:
            sizes = tuple(max(size, int(np.float32(size - 1)) + 1) for size in sizes)  # the last id may be rounded up
        return [SparseFeature(name=name, rows=size) for name, size in zip(names, sizes, strict=True)]

    def id_type(self, vocabulary_sizes: list[int]) -> np.dtype:
        is_wide = self.rules.wide_ids or max(feature.rows for feature in self.features(vocabulary_sizes)) > 2**31
        return np.dtype(np.int64 if is_wide else np.int32)

    def describe(self, written: Written, files: dict[str, FileInfo]) -> ClicksDescription:
        rules = self.rules
        splits = self._ranges(written)
        skipped = [f"skipped: {problem}" for parsed in written.parsed for problem in parsed.first_bad]
        notes = [*rules.notes, *skipped, *written.notes]
        if empty := [split for split in SPLITS if not splits[split]]:
            notes.append(f"no rows for {' and '.join(empty)}: this dataset cannot be trained on as it is")
        sources = [
            SourceFile(
                name=raw.path.name,
                bytes=raw.bytes,
                rows=read.rows,
                bad_rows=read.bad_rows,
                sample=raw.sample,
                smallest_dense=int(read.smallest_dense) if rules.dense == LOG_MIN else None,
            )
            for raw, read in zip(self.logs, written.parsed, strict=True)
        ]
        return ClicksDescription(
            name="criteo",
            made_by=MADE_BY,
            recipe=self.recipe,
            files=files,
            notes=notes,
            layout=rules.format,
            dense=dense_names(CRITEO.num_dense),
            dense_stored="plus-one" if rules.compat == "oneflow" else "ready",
            sparse=self.features(written.vocabulary_sizes),
            multi_hot=list(rules.multi_hot),
            splits=splits,
            source=sources,
        )

    def _ranges(self, written: Written) -> dict[str, list[RowRange]]:
        """Return where the rows of each split are stored."""
        ranges: dict[str, list[RowRange]] = {split: [] for split in SPLITS}
        for segment in self.segments(written.parsed):
            name = self.logs[segment.log_index].name
            stored = [RowRange(day=name, start=segment.start, stop=segment.stop)]
            if self.rules.format == "parquet":
                files = sorted(file for file in written.file_rows if file.startswith(f"{segment.split}-{name}-"))
                days = {file.removesuffix(".parquet"): written.file_rows[file] for file in files}
                stored = [RowRange(day=day, start=0, stop=rows) for day, rows in days.items()]
            elif self.rules.format == "bin":
                day = record_file(segment).removesuffix(RECORDS)
                stored = [RowRange(day=day, start=segment.offset, stop=segment.offset + segment.rows)]
            ranges.setdefault(segment.split, []).extend(stored)
        return ranges


def seal_written(plan: Plan, written: Written, work: Work) -> Description:
    """Digest the written files, vocabularies included, and write the description."""
    vocabulary_files = map(vocabulary_file, sparse_names(len(written.vocabulary_sizes)))
    vocabularies = dict(zip(vocabulary_files, written.vocabulary_sizes, strict=True))
    return seal(work.data, partial(plan.describe, written), written.file_rows | vocabularies)


def record_file(segment: Segment) -> str:
    return f"{'validation' if segment.split == 'val' else segment.split}{RECORDS}"


def vocabulary_file(name: str) -> str:
    return f"vocabulary_{name}.npy"


def log_read(raw: RawLog, parsed: ParsedLog) -> None:
    skipped = f", {parsed.bad_rows:,} bad rows skipped" if parsed.bad_rows else ""
    log.info("read %s: %s rows%s", raw.path, f"{parsed.rows:,}", skipped)


def plan(options: Options) -> Plan:
    logs = _find_npy_logs(Path(options.input), options.sparse_input) or _find_logs(Path(options.input), options.source)
    rules = rules_of(options, [raw.name for raw in logs], are_npy=logs[0].others is not None)
    budget = parse_bytes(options.memory_budget or "4GB", "--memory-budget")
    if budget < 512_000_000:
        raise ConfigError(f"--memory-budget {options.memory_budget}: 512MB is the minimum.")
    memory = budget - _PROGRAM_BYTES
    limits = Limits(memory, chunk_bytes=min(max(memory // (40 * num_cores()), 1 << 20), 1 << 24))
    return Plan(rules, logs, limits, options.engine, options.spark_master)


def _find_npy_logs(path: Path, sparse_path: str | None) -> list[RawLog]:
    """Return the logs that are npy files, in order; none if there are no such files."""
    sparse = path if sparse_path is None else given_path(sparse_path, "--sparse-input")
    is_raw = path.is_file() or (path.is_dir() and any(_LOG_FILE.fullmatch(file.name) for file in path.iterdir()))
    by_name = {file.name.removesuffix("_sparse.npy"): file for file in sparse.glob("*_sparse.npy")}
    by_name = {name: file for name, file in by_name.items() if _LOG_NAME.fullmatch(name)}
    if sparse_path is not None and not by_name:
        raise DataError(f"--sparse-input {sparse}: no day_0_sparse.npy, no train_sparse.npy. Name their directory.")
    if is_raw or not by_name:
        return []
    logs = []
    for name in _kaggle_names(path, by_name) if "train" in by_name else _day_names(path, by_name):
        files = [by_name[name], path / f"{name}_dense.npy", path / f"{name}_labels.npy"]
        if missing := [file for file in files if not file.is_file()]:
            raise DataError(f"{missing[0]}: no such file, though {files[0]} exists. Add it, or give --sparse-input.")
        sample = "-".join(map(sample_digest, files))
        logs.append(RawLog(name, files[0].absolute(), files[0].stat().st_size, sample, path.absolute()))
    _check_different([raw for raw in logs if raw.has_labels])
    return logs


def _find_logs(path: Path, source: str | None) -> list[RawLog]:
    """Return the logs in the directory `path`, or the single log `path`, in order."""
    if not path.exists():
        raise DataError(
            f"{path}: no such file or directory. {did_you_mean_path(path)}--input is where the raw logs are."
        )
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    matches = [(file, match) for file in files if (match := _LOG_FILE.fullmatch(file.name))]
    days = [(file, f"day_{int(match['day'])}") for file, match in matches if match["day"]]
    kaggle = [(file, match["kaggle"]) for file, match in matches if match["kaggle"]]
    if source is None and days and kaggle:
        raise DataError(f"{path} holds both {days[0][0].name} and {kaggle[0][0].name}. Choose one with --source.")
    is_kaggle = source == "kaggle" or (source is None and bool(kaggle))
    by_name: dict[str, Path] = {}
    for file, name in kaggle if is_kaggle else days:
        if name in by_name:
            raise DataError(f"{path}: {name} exists twice, as {by_name[name].name} and {file.name}.")
        by_name[name] = file
    if not by_name:
        expected = "train.txt" if is_kaggle else "day_0, day_1, ..."
        present = ", ".join(file.name for file in files[:5]) or "nothing"
        raise DataError(f"{path}: no {expected} (nor with .gz or .zst); it holds {present}.")
    names = _kaggle_names(path, by_name) if is_kaggle else _day_names(path, by_name)
    logs = [RawLog(n, by_name[n].absolute(), by_name[n].stat().st_size, sample_digest(by_name[n])) for n in names]
    _check_different([raw for raw in logs if raw.has_labels])
    return logs


def _check_different(logs: list[RawLog]) -> None:
    """Raise if two logs are the same file, or have the same content: their rows would count twice."""
    seen: dict[tuple[int, str], RawLog] = {}
    for raw in logs:
        other = seen.setdefault((raw.bytes, raw.sample), raw)
        if other is not raw and raw.bytes:
            raise DataError(f"{raw.path} has the same content as {other.path}. Replace it by the log of its own day.")


def _kaggle_names(path: Path, by_name: dict[str, Path]) -> list[str]:
    if "train" not in by_name:
        raise DataError(f"{path}: test.txt without train.txt: it has no labels to learn from.")
    return sorted(by_name, reverse=True)  # train, test


def _day_names(path: Path, by_name: dict[str, Path]) -> list[str]:
    names = sorted(by_name, key=lambda name: int(name.removeprefix("day_")))
    gaps = [name for day in range(int(names[-1].removeprefix("day_"))) if (name := f"day_{day}") not in by_name]
    if gaps and path.is_dir():
        raise DataError(f"{path}: {', '.join(gaps)} missing, though {names[-1]} exists. Add the missing days.")
    return names
