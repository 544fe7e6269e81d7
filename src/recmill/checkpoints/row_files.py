"""Row files, in which checkpoints hold cached tables: the rows that were ever trained, with their optimizer state.

A file is a sequence of chunks, each with n keys (int64), n rows and n states (float32). Keys number the rows of all
tables of a file consecutively. In a file with dynamic tables, each chunk has n indexes of tables and n names of rows
(int64) instead of keys: the number of a row, or in a dynamic table the key of its id, and -1, -2 ... for shared rows.
Such a file ends with all keys of each dynamic table, then when they last occurred, their counts, and their rows on that
process (-1: they have none), int64 each.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from recmill.checkpoints.format import Checkpoint, KeyList, RowFile, SavedTable
from recmill.errors import CheckpointError
from recmill.failpoints import reach

if TYPE_CHECKING:
    from recmill.tables.cached_tables import CachedTables, RowNames
    from recmill.tables.stores.key_table import Entries
    from recmill.tables.stores.memory_rows import MemorySnapshot
    from recmill.tables.stores.row_cache import Chunk, Snapshot


class NotFiniteError(Exception):
    """A row holds a value that is not a finite number. The argument is the key of its tensor."""


def write_row_file(
    path: Path,
    cached: "CachedTables",
    snapshot: "Snapshot | MemorySnapshot",
    names: "RowNames | None",
    tables: list[SavedTable],
    step: int,
) -> RowFile:
    """Write a snapshot and sync the file. Only one chunk is in memory at a time. `names`: if a table is dynamic."""
    counts: list[int] = []
    keys: dict[str, KeyList] = {}
    with path.open("xb") as file:
        for chunk in snapshot:
            if names is None:
                parts = [_saved_keys(chunk.keys, cached, tables), chunk.weights, chunk.state]
            else:
                of_tables, of_rows, is_used = names.of(chunk.keys)
                chunk = chunk._replace(**{name: values[is_used] for name, values in chunk._asdict().items()})
                parts = [of_tables[is_used], of_rows[is_used], chunk.weights, chunk.state]
            _check_finite(chunk, cached, tables)
            for values in parts:
                file.write(values.data)
            counts.append(len(chunk.keys))
            reach("ckpt.rows", step)
        for table, (clock, entries) in names.entries.items() if names else []:
            keys[table] = KeyList(clock, len(entries.keys))
            for values in entries:
                file.write(values.data)
        file.flush()
        os.fsync(file.fileno())
    layout = cached.cache.layout
    return RowFile(path.name, tables, layout.dim, layout.state_columns, counts, keys)


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
    """Yield a table, numbers of rows, their values and their optimizer states, for each table of each chunk.

    The rows of dynamic tables are named as in `CachedTables.keys_of`.
    """
    starts = _starts(file.tables)
    with _opened(directory, file) as content:
        for count in file.chunks:
            tables = np.fromfile(content, np.int64, count if file.keys else 0)
            rows = np.fromfile(content, np.int64, count)
            weights = np.fromfile(content, np.float32, count * file.dim)
            state = np.fromfile(content, np.float32, count * file.state_columns)
            if not file.keys:
                tables = np.searchsorted(starts, rows, side="right") - 1
            if len(state) != count * file.state_columns or len(weights) != count * file.dim:
                raise _disagreement(directory / file.name)
            for index in np.unique(tables):
                if not 0 <= index < len(file.tables):
                    raise _disagreement(directory / file.name)
                table, chosen = file.tables[index], tables == index
                own = rows[chosen] - (0 if file.keys else starts[index])
                if table.rows and not 0 <= own.min() <= own.max() < table.rows:
                    raise _disagreement(directory / file.name)
                yield table, own, weights.reshape(count, -1)[chosen], state.reshape(count, file.state_columns)[chosen]


def saved_keys(checkpoint: Checkpoint) -> "dict[str, tuple[int, Entries]]":
    """Return the clock and the keys of each dynamic table, of all processes together."""
    from recmill.tables.stores.key_table import Entries

    found: dict[str, tuple[int, Entries]] = {}
    for file in checkpoint.state.row_files:
        row_bytes = 16 + 4 * (file.dim + file.state_columns)
        with _opened(checkpoint.path, file) as content:
            content.seek(sum(file.chunks) * row_bytes)
            for table, listed in file.keys.items():
                own = Entries(*(np.fromfile(content, np.int64, listed.count) for _ in Entries._fields))
                if len(own.rows) != listed.count:
                    raise _disagreement(checkpoint.path / file.name)
                earlier = found[table][1] if table in found else Entries(*[np.empty(0, np.int64)] * 4)
                found[table] = listed.clock, Entries(*map(np.concatenate, zip(earlier, own, strict=True)))
    for table in {written.table for written in checkpoint.state.written_rows} & found.keys():
        clock, entries = found[table]
        _, last = np.unique(entries.keys[::-1], return_index=True)  # written keys replace earlier ones
        found[table] = clock, Entries(*(values[::-1][last] for values in entries))
    return found


def _opened(directory: Path, file: RowFile) -> BinaryIO:
    path = directory / file.name
    if path.parent != directory:
        raise CheckpointError(f"{path} is not a file of this checkpoint. Restore it from an intact copy.")
    return path.open("rb")


def _disagreement(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} and state.json disagree about its rows. Restore it from an intact copy.")
