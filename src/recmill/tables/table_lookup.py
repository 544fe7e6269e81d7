"""How table rows are looked up: our modules, which take the place of FBGEMM's inside TorchRec.

FBGEMM keeps the rows and their optimizer state, TorchRec shards and saves them; only the lookup and the update in
backward may be ours.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recmill.kernels.library import KernelLibrary
from recmill.tables import torchrec_internals as internals
from recmill.tables.native_lookup import native_lookup

Lookup = Callable[[Tensor, Tensor], Tensor]  # (ids, offsets of each bag) -> rows or sums of rows


class TableLookup(nn.Module):
    """The lookup of a group of tables. Each call, in this order,

    1. marks the rows that are looked up, if `mark_rows` was called and gradients are enabled;
    2. looks them up, with our kernel if there is one and with FBGEMM otherwise.

    Whatever else TorchRec needs of the group, such as its weights, it gets from FBGEMM's module.
    """

    def __init__(self, fbgemm: nn.Module, shards: list[tuple[str, int]], kernel: Lookup | None = None) -> None:
        super().__init__()
        self.fbgemm = fbgemm
        self.kernel = kernel
        self._shards = shards
        self._marks: list[tuple[Tensor, Tensor]] = []  # one mark per row, and the first of each feature's table

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("fbgemm"), name)

    def mark_rows(self) -> list[tuple[tuple[str, int], Tensor]]:
        """Mark looked-up rows from now on. Return (table, first row) of each shard with its marks, one per row."""
        sizes, marks, starts = internals.new_row_marks(self.fbgemm)
        self._marks.append((marks, starts))
        return list(zip(self._shards, marks.split(sizes), strict=True))

    def forward(self, indices: Tensor, offsets: Tensor, *others: Any, **options: Any) -> Tensor:
        for marks, starts in self._marks if torch.is_grad_enabled() else []:
            batch_size = (len(offsets) - 1) // len(starts)
            marks[indices + starts.repeat_interleave(offsets[::batch_size].diff())] = True
        if self.kernel is None:
            return self.fbgemm(indices, offsets, *others, **options)
        assert not any(given is not None for given in (*others, *options.values())), "our kernels take plain ids"
        return self.kernel(indices, offsets)


def install_lookups(model: nn.Module, library: KernelLibrary | None, device: torch.device, world_size: int) -> None:
    """Replace the FBGEMM module of every group of fused tables, and of replicated sequences on CPU. Call it once.

    `library`: our kernels for CPU; None: FBGEMM's own.
    """
    for collection in internals.sharded_collections(model):
        are_bags = isinstance(collection, internals.BagCollection)
        groups = internals.table_groups(collection)
        for group in groups:
            fbgemm = group.module
            if internals.is_fused(fbgemm):
                kernel = native_lookup(internals.FusedTables(fbgemm), library) if library and are_bags else None
                group.replace_module(TableLookup(fbgemm, group.shards, kernel))
            elif device.type == "cpu" and not are_bags:
                kernel = partial(internals.replicated_sequence_rows, fbgemm)
                group.replace_module(TableLookup(fbgemm, [], kernel))
        lookups = [group.module for group in groups if isinstance(group.module, TableLookup)]
        if are_bags and library and world_size == 1 and len(lookups) == len(groups) == 1:
            collection.skip_exchange(lookups[0])


def fused_lookups(model: nn.Module) -> Iterator[TableLookup]:
    """Yield the lookups of all tables that FBGEMM updates in backward."""
    for collection in internals.sharded_collections(model):
        for group in internals.table_groups(collection):
            if isinstance(group.module, TableLookup) and internals.is_fused(group.module.fbgemm):
                yield group.module
