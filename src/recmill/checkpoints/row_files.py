"""Row files, in which checkpoints hold cached tables: the rows that were ever trained, with their optimizer state.

A file is a sequence of chunks, each with n keys (int64), n rows and n states (float32). Keys number the rows of all
tables of a file consecutively.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recmill.checkpoints.format import RowFile, SavedTable
from recmill.errors import CheckpointError
from recmill.failpoints import reach

if TYPE_CHECKING:
    from recmill.tables.cached_tables import CachedTables
    from recmill.tables.stores.row_cache import Chunk, Snapshot


class NotFiniteError(Exception):
    """A row holds a value that is not a finite number. The argument is the key of its tensor."""


def write_row_file(
    path: Path, cached: "CachedTables", snapshot: "Snapshot", tables: list[SavedTable], step: int
) -> RowFile:
    """Write a snapshot and sync the file. Only one chunk is in memory at a time."""
    counts: list[int] = []
    with path.open("xb") as file:
        for chunk in snapshot:
            _check_finite(chunk, cached, tables)
            for values in (_saved_keys(chunk.keys, cached, tables), chunk.weights, chunk.state):
                file.write(values.data)
            counts.append(len(chunk.keys))
            reach("ckpt.rows", step)
        file.flush()
        os.fsync(file.fileno())
    layout = cached.cache.layout
    return RowFile(path.name, tables, layout.dim, layout.state_columns, counts)


def _saved_keys(keys: np.ndarray, cached: "CachedTables", tables: list[SavedTable]) -> np.ndarray:
    """Convert keys of a cache, which number the rows of its shards, to keys that number the rows of complete tables."""
    layout = cached.cache.layout
    index = np.searchsorted(layout.starts, keys, side="right") - 1
    firsts = np.array([shard.first_row for shard in layout.shards])
    return keys - layout.starts[index] + firsts[index] + _starts(tables)[index]


def _starts(tables: list[SavedTable]) -> np.ndarray:
    return np.cumsum([0, *(table.rows for table in tables)], dtype=np.int64)


def _check_finite(chunk: "Chunk", cached: "CachedTables", tables: list[SavedTable]) -> None:
    for values in (chunk.weights, chunk.state):
        if np.isfinite(values.sum(dtype=np.float64)):
            continue
        bad = chunk.keys[~np.isfinite(values).all(axis=1)]
        if len(bad):
            raise NotFiniteError(tables[int(np.searchsorted(cached.cache.layout.starts, bad[0], side="right")) - 1].key)


def saved_rows(directory: Path, file: RowFile) -> "Iterator[tuple[SavedTable, np.ndarray, np.ndarray, np.ndarray]]":
    """Yield a table, numbers of rows, their values and their optimizer states, for each table of each chunk."""
    starts = _starts(file.tables)
    path = directory / file.name
    if path.parent != directory:
        raise CheckpointError(f"{path} is not a file of this checkpoint. Restore it from an intact copy.")
    with path.open("rb") as content:
        for count in file.chunks:
            keys = np.fromfile(content, np.int64, count)
            weights = np.fromfile(content, np.float32, count * file.dim)
            state = np.fromfile(content, np.float32, count * file.state_columns)
            is_in_range = not len(keys) or 0 <= keys.min() <= keys.max() < starts[-1]
            if len(state) != count * file.state_columns or len(weights) != count * file.dim or not is_in_range:
                raise CheckpointError(f"{path} and state.json disagree about its rows. Restore it from an intact copy.")
            tables = np.searchsorted(starts, keys, side="right") - 1
            for index in np.unique(tables):
                chosen = tables == index
                rows = keys[chosen] - starts[index]
                parts = weights.reshape(count, -1)[chosen], state.reshape(count, file.state_columns)[chosen]
                yield file.tables[index], rows, *parts
