"""`recmill audit`: what in a prepared click log would make a result wrong, with numbers."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np

from recmill.datasets.criteo_rules import memory_bytes
from recmill.errors import ConfigError
from recmill.observe.progress import Progress
from recmill.schema import ClicksDescription, Dataset, open_dataset
from recmill.stored import BLOCK_ROWS, ClickRows, StoredDay, bad_id_text, feature_of_column, id_limits

HELD_OUT = ("val", "test")
# A log repeats a few rows by coincidence (empty ones, mostly). A split that overlaps with train repeats a large part of
# itself: all of it in TorchRec's Kaggle loader, whose val and test are the second half of its train.
MAX_SHARED = 0.01
MANY_UNSEEN = 0.5
FLOAT32_EXACT = 2**24  # from here on float32 cannot hold every whole number
# Of ids between 2^24 and 2^25 half are exact in float32, by chance; fewer beyond.
ROUNDED_SHARE, ROUNDED_AT_LEAST = 0.999, 32
_BYTES_PER_HELD_OUT_ROW = 20  # its hash, twice while they are sorted, and what is known of it


@dataclass(frozen=True)
class Finding:
    kind: Literal["failure", "remark"]
    text: str


@dataclass(frozen=True)
class PartReport:
    """The rows of a day that belong to one split. `clicks` are its labels of 1."""

    day: str
    split: str
    rows: int
    clicks: int
    dense: str  # what was done to the dense values of the day, as far as it shows
    smallest_dense: float


@dataclass(frozen=True)
class TableReport:
    """`unseen`: split -> share of its ids that do not occur in train. None: not counted."""

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
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == "failure"]


@dataclass(frozen=True)
class _Block:
    """Some rows of a split, column by column: ids int64 [columns of ids, rows]."""

    split: str
    day: str
    start: int
    rows: ClickRows
    ids: np.ndarray

    def hashes(self) -> np.ndarray:
        """uint64 [rows], of all that a row holds."""
        hashes = np.zeros(len(self.rows), dtype=np.uint64)
        dense = np.ascontiguousarray(self.rows.dense.T).view(np.uint32)
        for column in (*dense, *self.ids.view(np.uint64), self.rows.labels.view(np.uint32)):
            hashes ^= column
            hashes *= np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step
            hashes ^= hashes >> np.uint64(32)
        return hashes


def audit(path: str | Path, *, memory_budget: str = "2GB") -> AuditReport:
    dataset = open_dataset(path)
    about = dataset.about
    if not isinstance(about, ClicksDescription):
        raise ConfigError(f"{path} holds histories; recmill audit is for click logs.")
    budget = memory_bytes(memory_budget) // 2  # for hashes of held-out rows, and for ids that were seen
    rows = {split: sum(r.stop - r.start for r in ranges) for split, ranges in about.splits.items()}
    held_out = sum(rows.get(split, 0) for split in HELD_OUT)
    groups = _groups(about, budget)
    passes = max(len(groups), ceil(held_out * _BYTES_PER_HELD_OUT_ROW / budget), 1)
    values, shared = _Values(about), Counter({split: 0 for split in HELD_OUT if split in rows})
    tables = {}
    with Progress("auditing", passes * (sum(rows.values()) + held_out), "rows") as progress:
        ...
