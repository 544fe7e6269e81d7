"""Tables in cached_ssd, and dynamic tables. Their rows are in the slots of a `RowCache`, or of `MemoryRows`, which are
the weights of an FBGEMM module.
"""

import threading
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recmill.tables.spec import TableSpec
from recmill.tables.stores.key_table import Entries, KeyTable, train_together
from recmill.tables.stores.memory_rows import MemoryRows
from recmill.tables.stores.row_cache import RowCache, Shard
from recmill.tables.torchrec_internals import FusedTables, RowMemory

_NOBODY = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class RowNames:
    """What checkpoints call the rows of a cache with dynamic tables, and all they know about keys."""

    starts: np.ndarray
    first_rows: np.ndarray
    of_rows: dict[int, np.ndarray]  # by the index of a dynamic table: the name of each row; _NOBODY if no id has it
    entries: dict[str, tuple[int, Entries]]  # by dynamic table: its clock, and its keys

    @property
    def bytes(self) -> int:
        """Bytes of the keys in a checkpoint."""
        return sum(values.nbytes for _, entries in self.entries.values() for values in entries)

    def of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index of each key's table, what `CachedTables.keys_of` calls its row, and whether an id has it."""
        tables = np.searchsorted(self.starts, keys, side="right") - 1
        rows = keys - self.starts[tables]
        names = rows + self.first_rows[tables]
        for index, of_rows in self.of_rows.items():
            names[tables == index] = of_rows[rows[tables == index]]
        return tables, names, names != _NOBODY


@dataclass
class CachedTables:
    """The cached tables of one FBGEMM module, in its order. Ids count from the first row of this process's shard."""

    cache: RowCache | MemoryRows
    fused: FusedTables | None  # None: rows are only read
    specs: list[TableSpec]
    dynamic: dict[str, KeyTable] = field(default_factory=dict)  # by table
    looks_ahead: bool = False  # whether the rows of coming batches shall be hinted
    next_batch: int = -1  # number of the next training batch; -1: batches are not numbered
    has_pinned: threading.Event = field(default_factory=threading.Event, init=False)  # for a thread that gives hints
    _is_pinned: bool = field(default=False, init=False)

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    def pin(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the slots of ids. Their rows stay in memory until `release`."""
        self.release()
        slots = self.cache.pin(self._keys(ids, offsets, trains=True), self.next_batch)
        self._is_pinned = True
        if self.next_batch >= 0:
            self.next_batch += 1
            self.has_pinned.set()
        return torch.from_numpy(slots)

    def own_keys(self, ids: dict[str, np.ndarray]) -> np.ndarray:
        """Return the keys of the rows that this process holds, of ids by feature that count from row 0 of the table."""
        return np.concatenate([self.keys_of(t.name, ids[feature])[1] for t in self.specs for feature in t.features])

    def release(self) -> None:
        """Unpin the rows of the last batch, if they are pinned: after its update, or before the next `pin`."""
        if self._is_pinned:
            self.cache.unpin()
            self._is_pinned = False

    def read(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows for an evaluation, and the position of each id's row. The cache does not change."""
        keys, positions = np.unique(self._keys(ids, offsets), return_inverse=True)
        return torch.from_numpy(self.cache.read(keys)), torch.from_numpy(positions)

    def shard_of(self, table: str) -> Shard:
        return self.cache.layout.shards[self.names.index(table)]

    def keys_of(self, table: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a mask of those `rows` of the complete table that this process holds, and the keys of these.

        The rows of dynamic tables are named by the keys of their ids, shared ones by -1, -2 and so on.
        """
        if table in self.dynamic:
            return self._rows_of_keys(table, rows)
        shard = self.shard_of(table)
        is_here = (rows >= shard.first_row) & (rows < shard.first_row + shard.rows)
        return is_here, rows[is_here] - shard.first_row + self.cache.layout.starts[self.names.index(table)]

    def row_names(self) -> RowNames | None:
        """Return the names of all rows as they are now; None if no table is dynamic."""
        if not self.dynamic:
            return None
        layout = self.cache.layout
        first_rows = np.array([shard.first_row for shard in layout.shards])
        names = RowNames(layout.starts, first_rows, {}, {})
        for table, keyed in self.dynamic.items():
            entries, shared_rows = keyed.entries(), keyed.shard.shared_rows
            of_rows = np.full(keyed.shard.rows, _NOBODY)
            of_rows[:shared_rows] = -1 - keyed.first_shared_row - np.arange(shared_rows)
            of_rows[entries.rows[entries.rows >= 0]] = entries.keys[entries.rows >= 0]
            names.of_rows[self.names.index(table)] = of_rows
            names.entries[table] = keyed.clock, entries
        return names

    def _rows_of_keys(self, table: str, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keyed = self.dynamic[table]
        shard = keyed.shard
        rows = np.where(names < 0, -1 - names - keyed.first_shared_row, -1)
        rows[rows >= shard.shared_rows] = -1
        has_key = (names >= shard.first_key) & (names < shard.end_key)
        rows[has_key] = keyed.find(names[has_key] - shard.first_key, only_own=True)
        return rows >= 0, rows[rows >= 0] + self.cache.layout.starts[self.names.index(table)]

    def _keys(self, ids: Tensor, offsets: Tensor, *, trains: bool = False) -> np.ndarray:
        """Return the keys of ids. Bags are ordered by feature, and every feature has the same number of bags."""
        values, layout = ids.numpy(), self.cache.layout
        tables = self.tables.numpy()
        ends = offsets.numpy()[:: (len(offsets) - 1) // len(tables)]
        if self.dynamic:
            of_table = ends[np.searchsorted(tables, np.arange(len(self.specs) + 1))].tolist()  # features are in order
            values = (self._train if trains else self._find)(values, of_table)
        counts = np.diff(ends)
        starts, limits = (np.repeat(edge[tables], counts) for edge in (layout.starts[:-1], layout.starts[1:]))
        keys = values + starts
        if len(keys) and (values.min() < 0 or (keys >= limits).any()):
            raise IndexError("an id is outside its table")  # ids are checked when they are loaded: this is a defect
        return keys

    def _find(self, local_keys: np.ndarray, of_table: list[int]) -> np.ndarray:
        """Replace keys of dynamic tables by their rows in an evaluation. `of_table`: where those of each table are."""
        rows = local_keys.copy()
        for index, keyed in self._dynamic_indices:
            own = slice(of_table[index], of_table[index + 1])
            rows[own] = keyed.find(local_keys[own])
        return rows

    def _train(self, local_keys: np.ndarray, of_table: list[int]) -> np.ndarray:
        """Replace the keys of dynamic tables by their rows in training, after new rows got their first values."""
        layout = self.cache.layout
        tables = [keyed for _, keyed in self._dynamic_indices]
        firsts, ends = zip(*((of_table[index], of_table[index + 1]) for index, _ in self._dynamic_indices), strict=True)
        rows, found = train_together(tables, local_keys, firsts, ends)
        made = [
            (new_rows + layout.starts[index], keyed.first_values(new_keys, layout.dim, layout.shards[index].bound))
            for (index, keyed), (new_keys, new_rows) in zip(self._dynamic_indices, found, strict=True)
            if len(new_keys)
        ]
        if made:
            new, first_values = (np.concatenate(parts) for parts in zip(*made, strict=True))
            self.cache.load(new, first_values, np.zeros((len(new), layout.state_columns), np.float32))
        return rows

    @cached_property
    def _dynamic_indices(self) -> list[tuple[int, KeyTable]]:
        """The dynamic tables, with their indices in `specs`."""
        return [(i, self.dynamic[spec.name]) for i, spec in enumerate(self.specs) if spec.name in self.dynamic]

    @cached_property
    def tables(self) -> Tensor:
        """The index of each feature's table."""
        return torch.tensor([index for index, spec in enumerate(self.specs) for _ in spec.features])

    @property
    def dim(self) -> int:
        return self.cache.layout.dim

    @property
    def memory(self) -> RowMemory:
        """The slots: every table begins at slot 0 and has all of them. A row's states are side by side."""
        assert self.fused
        layout = self.cache.layout
        starts = torch.zeros_like(self.tables)
        state = torch.from_numpy(self.cache.state).view(-1)
        return self.fused.memory._replace(
            starts=starts,
            state=state,
            state2=state[layout.dim :] if layout.state_columns > layout.dim else None,
            state_starts=starts,
            state_stride=layout.state_columns,
            rows=torch.full_like(self.tables, self.cache.plan.slots),
            tables=self.tables,
        )
