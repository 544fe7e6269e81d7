"""Save large tensors in several chunks, so that little memory is needed to write one or to read a part of it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

CHUNK_BYTES = 1 << 26


class ChunkedPlanner(DefaultSavePlanner):
    """Split shards of more than CHUNK_BYTES into chunks of rows. Every reader of torch's checkpoints can join them."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._shards: dict[MetadataIndex, tuple[MetadataIndex, int, int]] = {}  # index, first row, rows
        self.plan = replace(plan, items=[chunk for item in plan.items for chunk in self._chunks(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index not in self._shards:
            return super().resolve_data(write_item)
        shard, first, rows = self._shards[write_item.index]
        values: Tensor = self.lookup_object(shard)
        return values[first : first + rows].contiguous()

    def _chunks(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not data.chunk.sizes:
            return [item]
        rows, *columns = data.chunk.sizes
        row_bytes = torch.Size(columns).numel() * data.properties.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))
        if rows <= step:
            return [item]
        out = []
        first_row, *first_columns = data.chunk.offsets
        for first in range(0, rows, step):
            count = min(step, rows - first)
            offsets = torch.Size([first_row + first, *first_columns])
            chunk = ChunkStorageMetadata(offsets, torch.Size([count, *columns]))
            index = MetadataIndex(item.index.fqn, offsets)
            self._shards[index] = item.index, first, count
            out.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
        return out
