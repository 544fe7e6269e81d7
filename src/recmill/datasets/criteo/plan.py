"""What is decided before any work on Criteo logs, and what comes out of it: splits, tables, the description."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from recmill.datasets.clicks import split_rows
from recmill.datasets.criteo.ids import FIRST_ID
from recmill.datasets.criteo.input import RawLog, find_logs
from recmill.datasets.criteo.log import NUM_DENSE, NUM_SPARSE
from recmill.datasets.criteo.rules import Options, Rules, rules_of
from recmill.datasets.writing import MADE_BY
from recmill.errors import ConfigError
from recmill.schema import ClicksDescription, Description, FileInfo, RowRange, SourceFile, SparseFeature

_PROGRAM_BYTES = 300_000_000  # Python with its libraries
_SMALLEST_BUDGET = 512_000_000


@dataclass(frozen=True)
class Plan:
    """All that is decided before any work."""

    rules: Rules
    logs: list[RawLog]
    memory: int  # bytes beside the program itself
    engine: str
    spark_master: str | None

    @property
    def recipe(self) -> dict[str, Any]:
        """Same recipe, same bytes (rows, for Spark): memory, cores and paths are no part of it."""
        files = {raw.name: f"{raw.bytes} bytes, sample {raw.sample}" for raw in self.logs}
        return json.loads(json.dumps({**asdict(self.rules), "engine": self.engine, "files": files}))

    @property
    def inputs(self) -> dict[str, Any]:
        return {str(raw.path): [raw.bytes, raw.path.stat().st_mtime_ns] for raw in self.logs}


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of log `index`, all of one split; for training rows, `number` counts through all of them."""

    split: str
    index: int
    start: int
    stop: int
    number: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


def plan(options: Options) -> Plan:
    logs = find_logs(Path(options.input), options.source)
    rules = rules_of(options, [raw.name for raw in logs])
    if options.memory_bytes < _SMALLEST_BUDGET:
        raise ConfigError(f"--memory-budget {options.memory_budget}: 512MB is the least.")
    return Plan(rules, logs, options.memory_bytes - _PROGRAM_BYTES, options.engine, options.spark_master)


def describer(
    plan: Plan,
    sparse: list[SparseFeature],
    ranges: dict[str, list[RowRange]],
    counts: list[tuple[int, int]],
    notes: list[str],
) -> Callable[[dict[str, FileInfo]], Description]:
    rules = plan.rules

    def describe(files: dict[str, FileInfo]) -> Description:
        return ClicksDescription(
            name="criteo",
            made_by=MADE_BY,
            recipe=plan.recipe,
            files=files,
            notes=notes,
            layout="parquet" if rules.format == "parquet" else "npy",
            dense=[f"I{i + 1}" for i in range(NUM_DENSE)],
            dense_stored="plus-one" if rules.compat == "oneflow" else "ready",
            sparse=sparse,
            multi_hot=list(rules.multi_hot),
            splits=ranges,
            source=[
                SourceFile(name=raw.path.name, bytes=raw.bytes, rows=rows, bad_rows=bad, sample=raw.sample)
                for raw, (rows, bad) in zip(plan.logs, counts, strict=True)
            ],
        )

    return describe


def features(rules: Rules, vocabulary_sizes: list[int]) -> list[SparseFeature]:
    names = [f"C{c + 1}" for c in range(NUM_SPARSE)]
    sizes = rules.table_size or (2**32,) * NUM_SPARSE
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


def segments(rules: Rules, logs: list[RawLog], rows: list[int]) -> list[Segment]:
    """Every row of every log in one split, in the order of the logs."""
    names = [raw.name for raw in logs]
    labelled = {raw.name: count for raw, count in zip(logs, rows, strict=True) if raw.has_labels}
    splits = split_rows(labelled, rules.last_day, rules.val_fraction)
    splits["unlabelled"] = [
        RowRange(day=n, start=0, stop=count) for n, count in zip(names, rows, strict=True) if n not in labelled
    ]
    found = [Segment(s, names.index(r.day), r.start, r.stop) for s, ranges in splits.items() for r in ranges]
    train = [part for part in found if part.split == "train"]
    numbers = accumulate((part.rows for part in train), initial=0)
    numbered = [replace(part, number=number) for part, number in zip(train, numbers, strict=False)]
    return sorted([*numbered, *found[len(train) :]], key=lambda part: (part.index, part.start))


def ranges_by_split(
    rules: Rules, logs: list[RawLog], parts: list[Segment], rows_of: dict[str, int]
) -> dict[str, list[RowRange]]:
    ranges: dict[str, list[RowRange]] = {"train": [], "val": [], "test": []}
    for part in parts:
        name = logs[part.index].name
        if rules.format == "npy":
            ranges.setdefault(part.split, []).append(RowRange(day=name, start=part.start, stop=part.stop))
            continue
        for file in sorted(file for file in rows_of if file.startswith(f"{part.split}-{name}-")):
            day = file.removesuffix(".parquet")
            ranges.setdefault(part.split, []).append(RowRange(day=day, start=0, stop=rows_of[file]))
    return ranges
