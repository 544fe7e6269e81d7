"""Find and describe values that cannot be trained on: bad ids, dense values, labels and items of histories."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from recmill.data.click_rows import Block, split_blocks
from recmill.errors import DataError
from recmill.schema import UNLABELLED, ClicksDescription, Dataset, HistoriesDescription

REMEDY = "Copy the dataset again, or prepare it again with --overwrite."
_ITEMS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class BadValues:
    """How many bad values of one kind some rows of a file hold, and the first of them."""

    kind: Literal["id", "dense", "label"]
    file: str
    count: int
    where: str  # row and column of the first one
    value: float
    fact: str  # what is wrong with this value

    def __str__(self) -> str:
        return f"{self.file}: {self.where}: {self.fact}"


class ClickChecks:
    """Finds bad values in rows of one click log. Every training batch is checked, so it must be fast."""

    def __init__(self, description: ClicksDescription) -> None:
        self._description = description
        # The smallest id that is too large, by column of ids. uint64 cannot hold 2**64, the limit of 64-bit hashes.
        limits = np.array([min(feature.rows, 2**64 - 1) for feature in description.sparse], dtype=np.uint64)
        self._limits = np.repeat(limits, description.ids_per_row)
        self._limits_int32 = np.minimum(self._limits, 1 << 31).astype(np.uint32)

    def find(self, block: Block) -> list[BadValues]:
        dense_file, ids_file, labels_file = self._description.day_files(block.day)
        found = [
            self._bad_ids(block.rows.ids, ids_file, block.numbers),
            self._bad_dense(block.rows.dense, dense_file, block.numbers),
            bad_labels(block.rows.labels, labels_file, block.numbers, block.split),
        ]
        return [bad for bad in found if bad]

    def _bad_ids(self, ids: np.ndarray, file: str, numbers: range | np.ndarray) -> BadValues | None:
        # Negative ids are large as unsigned numbers. int32 is not converted: that takes three times as long as the
        # comparison.
        if ids.dtype == np.int32:
            is_bad = ids.view(np.uint32) >= self._limits_int32
        else:
            is_bad = ids.astype(np.int64, copy=False).view(np.uint64) >= self._limits
        if not is_bad.any():
            return None
        row, column = np.argwhere(is_bad)[0]
        tables = np.repeat(np.arange(len(self._description.sparse)), self._description.ids_per_row)
        feature = self._description.sparse[tables[column]]
        value = int(ids[row, column])
        where = f"row {numbers[row]:,}, column {feature.name}"
        fact = f"id {value} is not in 0..{feature.rows - 1} (table of {feature.rows:,} rows)"
        return BadValues("id", file, int(is_bad.sum()), where, value, fact)

    def _bad_dense(self, dense: np.ndarray, file: str, numbers: range | np.ndarray) -> BadValues | None:
        is_finite = np.isfinite(dense)
        if is_finite.all():
            return None
        row, column = np.argwhere(~is_finite)[0]
        value = float(dense[row, column])
        where = f"row {numbers[row]:,}, column {self._description.dense[column]}"
        return BadValues("dense", file, int((~is_finite).sum()), where, value, f"{value} is not a finite number")


def bad_labels(labels: np.ndarray, file: str, numbers: range | np.ndarray, split: str) -> BadValues | None:
    """Find labels other than 0 and 1; in the unlabelled split, other than -1."""
    is_good = labels == -1 if split == UNLABELLED else (labels == 0) | (labels == 1)
    if is_good.all():
        return None
    row = int(np.argmin(is_good))
    value = int(labels[row])
    fact = f"label {value} is {'not -1' if split == UNLABELLED else 'neither 0 nor 1'}"
    return BadValues("label", file, int((~is_good).sum()), f"row {numbers[row]:,}", value, fact)


def value_problems(dataset: Dataset) -> list[str]:
    """Read all rows, or all histories, and describe the first bad value of each file."""
    if isinstance(dataset.description, HistoriesDescription):
        return _item_problems(dataset.array("items.npy"), dataset.description.num_items)
    checks = ClickChecks(dataset.clicks)
    problems: dict[str, str] = {}
    for block in split_blocks(dataset, dataset.clicks.splits):
        for bad in checks.find(block):
            problems.setdefault(bad.file, str(bad))
    return list(problems.values())


def checked_items(dataset: Dataset) -> np.ndarray:
    """Check all items of the histories and return them, memory-mapped. Batches then need no checks."""
    if problems := value_problems(dataset):
        raise DataError(f"{dataset.path}/{problems[0]}. {REMEDY}")
    return dataset.array("items.npy")


def _item_problems(items: np.ndarray, num_items: int) -> list[str]:
    for start in range(0, len(items), _ITEMS_AT_ONCE):
        block = items[start : start + _ITEMS_AT_ONCE]
        is_bad = (block < 1) | (block > num_items)
        if is_bad.any():
            row = int(np.argmax(is_bad))
            return [f"items.npy: row {start + row}: item {block[row]} is not in 1..{num_items}"]
    return []
