"""Number the values of a column while its file is read, so that later steps work on whole numbers, not on texts."""

from collections.abc import Callable

import numpy as np
import polars as pl

from recmill.datasets.parallel import compiled

_FIRST_SLOTS = 1 << 12
_SEEDS = (0, 0x9E3779B97F4A7C15)


def can_be_numbered(dtype: pl.DataType) -> bool:
    """Return whether values of this type can be told apart by their hashes in every block of a file."""
    return dtype in (pl.String, pl.Boolean, pl.Date) or dtype.is_integer() or isinstance(dtype, pl.Datetime)


class Coder:
    """Numbers the values of a column in the order in which they occur first: 0, 1, ...

    Values are equal if two 64-bit hashes of them are: should two values collide in one, the other tells them apart.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(_FIRST_SLOTS, np.uint32)  # code + 1; 0: free
        self._keys = np.empty((_FIRST_SLOTS // 2, 2), np.uint64)
        self._found: list[pl.Series] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def codes(self, values: pl.Series) -> np.ndarray:
        """Return the codes of these values, uint32 [n]; those that are new get the next ones."""
        one, other = (values.hash(seed).to_numpy() for seed in _SEEDS)
        return self.codes_of(one, other, values.gather)

    def codes_of(self, hashes: np.ndarray, others: np.ndarray, gather: Callable[[np.ndarray], pl.Series]) -> np.ndarray:
        """Return the codes of values with these hashes; `gather` returns the values of some rows."""
        codes = np.empty(len(hashes), np.uint32)
        first_rows = np.empty(len(hashes), np.int64)
        size_before = self._size
        done = 0
        while True:
            done, self._size = _number(
                self._slots, self._keys, self._size, hashes, others, done, codes, first_rows[self._size - size_before :]
            )
            if done == len(hashes):
                break
            self._grow()
        if self._size > size_before or not self._found:
            self._found.append(gather(first_rows[: self._size - size_before]))
        return codes

    def values(self) -> pl.Series:
        """Return the values, in the order of their codes."""
        return pl.concat(self._found)

    def _grow(self) -> None:
        keys = np.empty((2 * len(self._keys), 2), np.uint64)
        keys[: self._size] = self._keys[: self._size]
        self._keys = keys
        self._slots = np.zeros(2 * len(self._slots), np.uint32)
        _fill(self._slots, self._keys, self._size)


@compiled
def _number(slots, keys, size, hashes, others, start, codes, first_rows):
    """Number values from `start` on, until the keys are full. Return (values done, codes in use)."""
    mask = len(slots) - 1
    new = 0
    for row in range(start, len(hashes)):
        key = hashes[row]
        other = others[row]
        slot = np.int64(key & np.uint64(mask))
        while slots[slot] != 0:
            code = slots[slot] - 1
            if keys[code, 0] == key and keys[code, 1] == other:
                break
            slot = (slot + 1) & mask
        if slots[slot] == 0:
            if size == len(keys):
                return row, size
            keys[size, 0] = key
            keys[size, 1] = other
            first_rows[new] = row
            new += 1
            size += 1
            slots[slot] = size
        codes[row] = slots[slot] - 1
    return len(hashes), size


@compiled
def _fill(slots, keys, size):
    mask = len(slots) - 1
    for code in range(size):
        slot = np.int64(keys[code, 0] & np.uint64(mask))
        while slots[slot] != 0:
            slot = (slot + 1) & mask
        slots[slot] = code + 1


@compiled
def add_up(counts, codes):
    """Add to `counts` how often each code occurs: `bincount` would pass over all values for each block of rows."""
    for code in codes:
        counts[code] += 1
