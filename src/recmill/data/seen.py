"""Sets for counting over a click log in bounded memory: ids by one bit each, rows by their hashes."""

import numpy as np

from recmill.data.click_rows import BLOCK_ROWS, ClickRows


class BitSet:
    """A set of numbers below `size`, one bit each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bits = np.zeros(size // 8 + 1, dtype=np.uint8)

    def has(self, numbers: np.ndarray) -> np.ndarray:
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(bool)

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Add the numbers and return those that are new, each once."""
        new = np.sort(numbers[~self.has(numbers)])  # np.unique would take four times as long
        new = new[np.diff(new, prepend=-1) != 0]
        np.bitwise_or.at(self._bits, new >> 3, np.left_shift(1, new & 7).astype(np.uint8))
        return new


def row_hashes(rows: ClickRows, ids: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of everything that each row holds; `ids` are the transposed ids, int64 [columns, n]."""
    hashes = np.zeros(len(rows), dtype=np.uint64)
    dense = np.ascontiguousarray(rows.dense.T).view(np.uint32)
    for column in (*dense, *ids.view(np.uint64), rows.labels.view(np.uint32)):
        hashes ^= column
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, as in splitmix64
        hashes ^= hashes >> np.uint64(32)
    return hashes


class SeenRows:
    """Remembers which of the rows with these hashes were seen. Sorts `hashes` in place."""

    def __init__(self, hashes: np.ndarray) -> None:
        hashes.sort()
        self._hashes = hashes
        self._is_seen = np.zeros(len(hashes), dtype=bool)  # of equal hashes only the first one is marked
        # Most rows are not found: a filter of 16 bits per hash says so faster than a search in the sorted hashes.
        self._filter = BitSet(16 * len(hashes) + 1)
        for start in range(0, len(hashes), BLOCK_ROWS):
            self._filter.add(self._bit(hashes[start : start + BLOCK_ROWS]))

    def _bit(self, hashes: np.ndarray) -> np.ndarray:
        return ((hashes >> np.uint64(1)) % np.uint64(self._filter.size)).astype(np.int64)

    def mark(self, hashes: np.ndarray) -> None:
        """Mark the rows with these hashes as seen; hashes of other rows are ignored."""
        if not len(self._hashes):
            return
        hashes = np.sort(hashes[self._filter.has(self._bit(hashes))])
        positions = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        self._is_seen[positions[self._hashes[positions] == hashes]] = True

    def num_marked(self, hashes: np.ndarray) -> int:
        """Count the marked ones of `hashes`, which must all be among those of the constructor."""
        return int(self._is_seen[np.searchsorted(self._hashes, np.sort(hashes))].sum())
