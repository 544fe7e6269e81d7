"""Tables in cached_ssd. Their rows are in the slots of a `RowCache`, which are the weights of an FBGEMM module."""

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from recmill.tables.spec import TableSpec
from recmill.tables.stores.row_cache import RowCache, Shard
from recmill.tables.torchrec_internals import FusedTables


@dataclass
class CachedTables:
    """The cached tables of one FBGEMM module, in its order. Ids count from the first row of this process's shard."""

    cache: RowCache
    fused: FusedTables
    specs: list[TableSpec]
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
        slots = self.cache.pin(self._keys(ids, offsets), self.next_batch)
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
        """Return a mask of those `rows` of the complete table that this process holds, and the keys of these."""
        shard = self.shard_of(table)
        is_here = (rows >= shard.first_row) & (rows < shard.first_row + shard.rows)
        return is_here, rows[is_here] - shard.first_row + self.cache.layout.starts[self.names.index(table)]

    def _keys(self, ids: Tensor, offsets: Tensor) -> np.ndarray:
        """Return the keys of ids. Bags are ordered by feature, and every feature has the same number of bags."""
        values, layout = ids.numpy(), self.cache.layout
        tables = self.fused.tables.numpy()
        counts = np.diff(offsets.numpy()[:: (len(offsets) - 1) // len(tables)])
        starts, limits = (np.repeat(edge[tables], counts) for edge in (layout.starts[:-1], layout.starts[1:]))
        keys = values + starts
        if len(keys) and (values.min() < 0 or (keys >= limits).any()):
            raise IndexError("an id is outside its table")  # ids are checked when they are loaded: this is a defect
        return keys

    # The attributes of `FusedTables` that our kernels need. Every table begins at slot 0 and has all slots.

    @property
    def tables(self) -> Tensor:
        return self.fused.tables

    @property
    def dim(self) -> int:
        return self.fused.dim

    @property
    def rows(self) -> Tensor:
        return torch.full_like(self.tables, self.cache.plan.slots)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.fused.weights[0], torch.zeros_like(self.tables)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        return self.fused.state[0], torch.zeros_like(self.tables)

    @property
    def learning_rate_and_eps(self) -> tuple[float, float]:
        return self.fused.learning_rate_and_eps
