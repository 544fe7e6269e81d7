"""`recmill audit`: what in a prepared click log would make a result wrong, with numbers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from recmill.datasets.criteo_rules import memory_bytes
from recmill.errors import ConfigError
from recmill.observe.progress import Progress
from recmill.schema import ClicksDescription, Dataset, SparseFeature, open_dataset
from recmill.stored import BLOCK_ROWS, ClickRows, StoredDay, bad_id_text, feature_of_column, id_limits

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
    about = dataset.about
    if not isinstance(about, ClicksDescription):
        raise ConfigError(f"{path} holds histories: recmill audit is for click logs.")
    if (memory := memory_bytes(memory_budget)) < LEAST_MEMORY:
        raise ConfigError(f"--memory-budget {memory_budget}: 1MB is the least.")
    rows = {split: sum(r.stop - r.start for r in ranges) for split, ranges in about.splits.items()}
    held_out = {split: rows[split] for split in HELD_OUT if split in rows}
    groups = _groups(about, memory // 2)
    passes = max(len(groups), -(-sum(held_out.values()) * _BYTES_PER_HELD_OUT_ROW // (memory // 2)))
    values, counts, shared = _Values(about), dict[str, _IdCounts](), dict.fromkeys(held_out, 0)
    with Progress("auditing", passes * (sum(rows.values()) + sum(held_out.values())), "rows") as progress:
        for number in range(passes):
            found = _HeldOutRows(number, passes)
            for block in _blocks(dataset, [split for split in rows if split != "train"], progress):
                if number == 0:
                    values.add(block)
                if block.split in held_out: found.
