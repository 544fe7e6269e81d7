"""Row files, in which checkpoints hold cached tables: the rows that were ever trained, with their optimizer state.

A file is a sequence of chunks, each with n keys (int64), n rows and n states (float32). Keys number the rows of all
tables of a file consecutively. In a file with dynamic tables, each chunk has n indexes of tables and n names of rows
(int64) instead of keys: the number of a row, or in a dynamic table the key of its id, and -1, -2 ... for shared rows.
Such a file ends with all keys of each dynamic table, then when they last occurred, their counts, and their rows on that
process (-1: they have none), int64 each.
"""

import mmap
import os
from collections.abc import Callable, Iterator
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
    """Yield a table, numbers of rows (names, as in `CachedTables.keys_of`), values and states, by chunk and table."""
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


class RecordIndex:
    """Where the rows of one table are in row files: 8 bytes for each row are in memory, and what is read of them.

    find: returns the number of each row, by its name, or -1 if it is not wanted; `count` is the number of rows.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, count: int, find: Callable[[np.ndarray], np.ndarray]) -> None:
        self._records = np.full(count, -1)  # -1: the row has no record
        self._starts: list[int] = []  # the first record of each chunk
        self._chunks: list[tuple[np.ndarray, np.ndarray]] = []  # values and states of each chunk, mapped
        self._files: list[mmap.mmap] = []
        first = 0
        for directory, file in checkpoint.row_files:
            index = next((at for at, table in enumerate(file.tables) if table.name == name), None)
            if index is None:
                continue
            self.dim, self.state_columns = file.dim, file.state_columns
            if not sum(file.chunks):
                continue
            with _opened(directory, file) as content:
                self._files.append(mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ))
            starts, offset = _starts(file.tables), 0
            for size in file.chunks:
                parts, offset = self._parts(directory / file.name, file, offset, size)
                tables = parts[0] if file.keys else np.searchsorted(starts, parts[0], side="right") - 1
                chosen = np.flatnonzero(tables == index)
                rows = find(parts[1][chosen] if file.keys else parts[0][chosen] - starts[index])
                if rows.max(initial=-1) >= count:
                    raise _disagreement(directory / file.name)
                self._records[rows[rows >= 0]] = first + chosen[rows >= 0]  # the last record of a row counts
                self._starts.append(first)
                self._chunks.append((parts[-2].reshape(size, file.dim), parts[-1].reshape(size, file.state_columns)))
                first += size

    def _parts(self, path: Path, file: RowFile, offset: int, size: int) -> tuple[list[np.ndarray], int]:
        names = [("int64", size)] * (2 if file.keys else 1)
        parts: list[np.ndarray] = []
        for kind, count in [*names, ("float32", size * file.dim), ("float32", size * file.state_columns)]:
            end = offset + count * np.dtype(kind).itemsize
            if end > len(self._files[-1]):
                raise _disagreement(path)
            parts.append(np.frombuffer(self._files[-1], kind, count, offset) if count else np.empty(0, kind))
            offset = end
        return parts, offset

    def read(self, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values and states of rows, 0 if they have no record, and whether they have one."""
        records = self._records[rows]
        values, states = (np.zeros((len(records), n), np.float32) for n in (self.dim, self.state_columns))
        order = np.argsort(records)
        edges = np.searchsorted(records[order], [*self._starts, np.iinfo(np.int64).max])
        for chunk in np.flatnonzero(np.diff(edges)):
            at = order[edges[chunk] : edges[chunk + 1]]
            own = records[at] - self._starts[chunk]
            values[at], states[at] = (part[own] for part in self._chunks[chunk])
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)  # else all that was ever read counts as memory of this process
        return values, states, records >= 0


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
