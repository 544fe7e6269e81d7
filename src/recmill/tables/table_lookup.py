"""Replace FBGEMM's lookups inside TorchRec with ours. FBGEMM still owns the rows and their optimizer state."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recmill import rng
from recmill.tables import torchrec_internals as internals
from recmill.tables.cached_tables import CachedTables
from recmill.tables.native_lookup import Lookup, RowKernels, cached_lookup, fused_lookup
from recmill.tables.spec import Stores, TableSpec
from recmill.tables.stores.row_cache import RowCache, RowLayout, Shard, plan_cache

OpenCache = Callable[[list[str], internals.FusedTables], CachedTables | None]


class TableLookup(nn.Module):
    """Look up the rows of a group of tables with `kernel`, or with FBGEMM if it is None.

    In training, first mark these rows if `mark_rows` was called. All other attributes are those of FBGEMM's module.
    """

    def __init__(
        self,
        fbgemm: nn.Module,
        shards: list[internals.ShardKey],
        kernel: Lookup | None = None,
        cached: CachedTables | None = None,
    ) -> None:
        super().__init__()
        self.fbgemm = fbgemm
        self.kernel = kernel
        self.cached = cached
        self.steps: Tensor | None = None  # taken so far, if FBGEMM's optimizer depends on their number
        self._shards = shards
        self._marks: list[tuple[Tensor, Tensor]] = []  # one mark per row; the first mark of each feature's table

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("fbgemm"), name)

    def mark_rows(self) -> list[tuple[internals.ShardKey, Tensor]]:
        """Mark looked-up rows from now on. Return each shard with its marks, one per row; the caller may clear them."""
        if self.cached:
            return []  # the cache knows which rows have changed
        rows_per_table, marks, first_marks = internals.new_row_marks(self.fbgemm)
        self._marks.append((marks, first_marks))
        return list(zip(self._shards, marks.split(rows_per_table), strict=True))

    def forward(self, indices: Tensor, offsets: Tensor, *others: Any, **options: Any) -> Tensor:
        for marks, first_marks in self._marks if torch.is_grad_enabled() else []:
            marks[internals.shifted_by_feature(indices, offsets, first_marks)] = True
        if self.steps is not None:
            internals.set_step_count(self.fbgemm, int(self.steps))
        if self.kernel is None:
            return self.fbgemm(indices, offsets, *others, **options)
        assert not any(given is not None for given in (*others, *options.values())), "our kernels take plain ids"
        return self.kernel(indices, offsets)


def install_lookups(
    model: nn.Module, kernels: RowKernels, device: torch.device, world_size: int, open_cache: OpenCache
) -> None:
    """Replace the lookups of fused tables, and of replicated sequences on CPU. Call it once.

    `open_cache` returns the cache of a group of tables, or None if they are in memory.
    """
    on_cpu = device.type == "cpu"
    for collection in internals.sharded_collections(model):
        are_bags = isinstance(collection, ShardedEmbeddingBagCollection)
        groups = internals.table_groups(collection)
        for group in groups:
            fbgemm = group.module
            if internals.is_fused(fbgemm):
                fused = internals.FusedTables(fbgemm)
                cached = open_cache([table for table, _ in group.shards], fused)
                kernel = fused_lookup(fused, kernels, are_bags) if on_cpu else None
                if cached and (are_bags or kernels.are_needed):
                    kernel = cached_lookup(cached, kernels, are_bags)
                elif cached:
                    kernel = partial(_cached_sequences, cached, fbgemm)
                group.replace_module(TableLookup(fbgemm, group.shards, kernel, cached))
            elif on_cpu and not are_bags:
                kernel = partial(internals.replicated_sequence_rows, fbgemm)
                group.replace_module(TableLookup(fbgemm, [], kernel))
        if (
            are_bags
            and kernels.library
            and world_size == 1
            and len(groups) == 1
            and isinstance(groups[0].module, TableLookup)
        ):
            internals.skip_exchange(collection, groups[0].module)


def _cached_sequences(cached: CachedTables, fbgemm: nn.Module, ids: Tensor, offsets: Tensor) -> Tensor:
    """Return each id's row, in training from FBGEMM, which also updates it."""
    if torch.is_grad_enabled():
        return fbgemm(cached.pin(ids.long(), offsets.long()), offsets)
    rows, positions = cached.read(ids.long(), offsets.long())
    return rows[positions]


class RowsOnDisk(nn.Module):
    """A table of sequences in one process, whose rows are read from a file and never trained.

    It takes the place of an EmbeddingCollection with this table. Load a checkpoint into it as into any other model.
    """

    def __init__(self, table: TableSpec, stores: Stores) -> None:
        super().__init__()
        shard = Shard(table.rows, 0, rng.stream_key(stores.seed, "table", table.name), table.init_bound)
        layout = RowLayout((shard,), table.dim, state_columns=0)
        cache = RowCache(layout, plan_cache(layout, stores.budget_bytes), stores.directory)
        self.cached = CachedTables(cache, None, [table])
        slots = nn.Embedding.from_pretrained(torch.from_numpy(cache.weights))
        self.embeddings = nn.ModuleDict({table.name: slots})  # the key of the table in checkpoints

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        rows, positions = self.cached.read(ids.values(), ids.offsets())
        return {feature: JaggedTensor(rows[positions], lengths=ids.lengths()) for feature in ids.keys()}  # noqa: SIM118


def cached_tables(model: nn.Module) -> list[CachedTables]:
    """Return the cached tables of which this process holds a shard."""
    in_files = [module.cached for module in model.modules() if isinstance(module, RowsOnDisk)]
    return in_files + [lookup.cached for lookup in fused_lookups(model) if lookup.cached]


def fused_lookups(model: nn.Module) -> Iterator[TableLookup]:
    for collection in internals.sharded_collections(model):
        for group in internals.table_groups(collection):
            if isinstance(group.module, TableLookup) and internals.is_fused(group.module.fbgemm):
                yield group.module
