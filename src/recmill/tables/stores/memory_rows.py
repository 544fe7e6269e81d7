"""Rows of dynamic tables in memory, with the methods of a `RowCache` that has a slot for each of them."""

from collections.abc import Iterator

import numpy as np

from recmill.tables.stores.row_cache import CachePlan, Chunk, RowLayout

_CHUNK_BYTES = 1 << 24


class MemoryRows:
    def __init__(self, layout: RowLayout, plan: CachePlan, slab: tuple[np.ndarray, np.ndarray]) -> None:
        assert plan.slots == layout.rows
        self.layout, self.plan = layout, plan
        self.weights, self.state = slab
        self._trained_at = np.zeros(layout.rows, np.int32)  # the position; 0: never
        self._position = 1

    def pin(self, keys: np.ndarray, batch: int = -1) -> np.ndarray:
        """Return the slot of each key, which the caller updates: its row."""
        self._trained_at[keys] = self._position
        return keys

    def unpin(self) -> None:
        """Do nothing: rows stay where they are."""

    def read(self, keys: np.ndarray) -> np.ndarray:
        return self.weights[keys]

    def load(self, keys: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        self.weights[keys], self.state[keys] = weights, state.reshape(len(keys), self.layout.state_columns)
        self._trained_at[keys] = self._position

    def snapshot(self, since: int = 0) -> "MemorySnapshot":
        """Return the rows that were ever trained, or trained or loaded from position `since` on."""
        self._position += 1
        return MemorySnapshot(self, np.flatnonzero(self._trained_at >= max(since, 1)), self._position)


class MemorySnapshot:
    """Chunks of rows as they are when the chunks are read, or as they were when `keep` was called."""

    def __init__(self, rows: MemoryRows, keys: np.ndarray, position: int) -> None:
        self._rows = rows
        self.keys, self.position = keys, position
        self._copy: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def bytes(self) -> int:
        return len(self.keys) * self._rows.layout.record_bytes

    def keep(self) -> None:
        """Copy the rows, so that training may continue."""
        self._copy = self._rows.weights[self.keys], self._rows.state[self.keys]

    def __iter__(self) -> Iterator[Chunk]:
        size = max(1, _CHUNK_BYTES // self._rows.layout.record_bytes)
        for first in range(0, len(self.keys), size):
            part = slice(first, first + size)
            keys = self.keys[part]
            if self._copy:
                yield Chunk(keys, self._copy[0][part], self._copy[1][part])
            else:
                yield Chunk(keys, self._rows.weights[keys], self._rows.state[keys])

    def close(self) -> None:
        self._copy = None
