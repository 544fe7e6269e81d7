"""Replace FBGEMM's lookups inside TorchRec with ours. FBGEMM still owns the rows and their optimizer state."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from recmill.kernels.library import KernelLibrary
from recmill.tables import torchrec_internals as internals
from recmill.tables.native_lookup import native_lookup

Lookup = Callable[[Tensor, Tensor], Tensor]  # (ids, offsets of each bag) -> rows or sums of rows


class TableLookup(nn.Module):
    """Look up the rows of a group of tables with `kernel`, or with FBGEMM if it is None.

    In training, first mark these rows if `mark_rows` was called. All other attributes are those of FBGEMM's module.
    """

    def __init__(self, fbgemm: nn.Module, shards: list[internals.ShardKey], kernel: Lookup | None = None) -> None:
        super().__init__()
        self.fbgemm = fbgemm
        self.kernel = kernel
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


def install_lookups(model: nn.Module, library: KernelLibrary | None, device: torch.device, world_size: int) -> None:
    """Replace the lookups of fused tables, and of replicated sequences on CPU. Call it once.

    `library` has our CPU kernels; without it, fused tables are looked up with FBGEMM's.
    """
    for collection in internals.sharded_collections(model):
        are_bags = isinstance(collection, ShardedEmbeddingBagCollection)
        groups = internals.table_groups(collection)
        for group in groups:
            fbgemm = group.module
            if internals.is_fused(fbgemm):
                kernel = native_lookup(internals.FusedTables(fbgemm), library) if library and are_bags else None
                group.replace_module(TableLookup(fbgemm, group.shards, kernel))
            elif device.type == "cpu" and not are_bags:
                kernel = partial(internals.replicated_sequence_rows, fbgemm)
                group.replace_module(TableLookup(fbgemm, [], kernel))
        if are_bags and library and world_size == 1 and len(groups) == 1 and isinstance(groups[0].module, TableLookup):
            internals.skip_exchange(collection, groups[0].module)


def fused_lookups(model: nn.Module) -> Iterator[TableLookup]:
    for collection in internals.sharded_collections(model):
        for group in internals.table_groups(collection):
            if isinstance(group.module, TableLookup) and internals.is_fused(group.module.fbgemm):
                yield group.module
