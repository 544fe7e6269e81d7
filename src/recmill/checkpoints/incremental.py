"""Incremental checkpoints: the rows of tables that changed since the last full one, and those of their optimizer."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Checkpoint, RowChange
from recmill.checkpoints.safe_reader import SafeReader, read_into
from recmill.tables.replicated import ReplicatedTables

_TABLE = re.compile(r"\.embedding(?:_bag)?s\.(.+?)\.weight(?:\.|$)")


def table_of(key: str) -> str | None:
    """The table that a tensor of a checkpoint belongs to, by its key."""
    found = _TABLE.search(key)
    return found[1] if found else None


def is_rows(key: str, value: Tensor) -> bool:
    """A table's rows, or a state that the optimizer keeps for each of them."""
    return table_of(key) is not None and value.dim() > 0


class Piece(NamedTuple):
    """What this process holds of a tensor."""

    row: int
    column: int
    values: Tensor


def pieces(value: Tensor) -> Iterator[Piece]:
    if not isinstance(value, ShardedTensor):
        yield Piece(0, 0, value)
        return
    for shard in value.local_shards():
        row, column = [*shard.metadata.shard_offsets, 0][:2]
        yield Piece(row, column, shard.tensor)


class TouchedRows:
    """One mark a row of this rank's pieces. Marking costs a write per looked-up id; only training marks."""

    def __init__(self, model: nn.Module, optimizer: CombinedOptimizer) -> None:
        self._marks: dict[tuple[str, int], list[Tensor]] = {}  # by table and first row
        lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", [])]
        for group in [part for lookup in lookups for part in lookup.modules()]:
            kernel = getattr(group, "_emb_module", None)
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                self._watch(kernel, group._config.embedding_tables)
        for _, part in optimizer.optimizers:
            if isinstance(part, ReplicatedTables):
                for key, weight in part.params.items():
                    part.marks[weight] = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
                    self._marks[table_of(f".{key}") or key, 0] = [part.marks[weight]]

    def _watch(self, kernel: SplitTableBatchedEmbeddingBagsCodegen, tables: Any) -> None:
        sizes = [rows for rows, *_ in kernel.embedding_specs]
        marks = torch.zeros(sum(sizes), dtype=torch.bool, device=kernel.current_device)
        for table, own in zip(tables, marks.split(sizes), strict=True):
            place = table.name, table.local_metadata.shard_offsets[0]
            self._marks.setdefault(place, []).append(own)
        starts = torch.tensor([0, *sizes], device=marks.device).cumsum(0)
        kernel.forward = partial(_marked, kernel.forward, marks, starts[kernel.feature_table_map])

    def ids(self, table: str, row: int) -> Tensor:
        """Marked rows of the piece that begins at `row`, counted from there."""
        first, *others = self._marks[table, row]
        for other in others:  # the same rows, other columns
            first = first | other
        return first.nonzero().squeeze(1)

    def clear(self) -> None:
        for marks in self._marks.values():
            for mark in marks:
                mark.zero_()


def _marked(
    forward: Any, marks: Tensor, starts: Tensor, indices: Tensor, offsets: Tensor, *rest: Any, **more: Any
) -> Any:
    if torch.is_grad_enabled():
        batch_size = (len(offsets) - 1) // len(starts)
        marks[indices + starts.repeat_interleave(offsets[::batch_size].diff())] = True
    return forward(indices, offsets, *rest, **more)


def taken_changes(
    state: dict[str, Tensor], touched: TouchedRows, rank: int, bits: int
) -> tuple[dict[str, Tensor], list[RowChange]]:
    """Copies of the touched rows, under names of this rank's own, and where they belong."""
    tensors: dict[str, Tensor] = {}
    changes: list[RowChange] = []
    for key, value in state.items():
        table = table_of(key)
        if table is None or not is_rows(key, value) or (rank and not isinstance(value, ShardedTensor)):
            continue  # what every rank has, rank 0 saves
        for piece in pieces(value):
            ids = touched.ids(table, piece.row)
            if not len(ids):
                continue
            name, number = f"ids.{rank}.{table}.{piece.row}", len(changes)
            tensors.setdefault(name, (ids + piece.row).cpu())
            rows = piece.values[ids].cpu()
            own_bits = bits if key.startswith("model.") else 32
            tensors[f"rows.{rank}.{number}"] = rows  # of 8 bits when it is written
            changes.append(RowChange(key, name, f"rows.{rank}.{number}", piece.column, own_bits))
    return tensors, changes


def apply_changes(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """To whatever pieces this process holds."""
    described = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    read: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        description = described[name]
        out = {name: torch.empty(description.size, dtype=description.properties.dtype)}
        read_into(out, checkpoint.path, alone=True)
        return out[name]

    for change in checkpoint.state.changes:
        if change.key not in state:
            continue  # the optimizer's, where only weights are asked for
        if change.ids not in read:
            read[change.ids] = tensor(change.ids)
        ids, rows = read[change.ids], tensor(change.values)
        rows = _as_floats(rows) if change.bits == 8 else rows
        for piece in pieces(state[change.key]):
            _put(piece, ids, rows, change.column)


@torch.no_grad()
def _put(piece: Piece, ids: Tensor, rows: Tensor, column: int) -> None:
    here = (ids >= piece.row) & (ids < piece.row + len(piece.values))
    places = (ids[here] - piece.row).to(piece.values.device)
    if rows.dim() == 1:
        piece.values[places] = rows[here].to(piece.values.device)
        return
    begin = max(column, piece.column)
    end = min(column + rows.shape[1], piece.column + piece.values.shape[1])
    if begin < end:
        part = rows[here, begin - column : end - column].to(piece.values.device)
        piece.values[places, begin - piece.column : end - piece.column] = part


def as_bytes(rows: Tensor) -> Tensor:
    """Each value as one of 256 steps between its row's least and greatest; both follow the row."""
    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.contiguous())


def _as_floats(packed: Tensor) -> Tensor:
    return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(packed)
