"""Incremental checkpoints: table rows that changed since the last full checkpoint, with their optimizer state."""

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Checkpoint, RowChange
from recmill.checkpoints.safe_reader import SafeReader, read_into
from recmill.tables.replicated import ReplicatedTables
from recmill.tables.table_lookup import fused_lookups
from recmill.tables.torchrec_internals import LocalShard, is_sharded, local_shards, table_of


def has_table_rows(key: str, value: Tensor) -> bool:
    """Return whether a tensor holds a table's rows, or the optimizer state of each of them."""
    return table_of(key) is not None and value.dim() > 0


class TouchedRows:
    """Which rows of this rank's shards training used since `clear`: one mark per row, set by each lookup."""

    def __init__(self, model: nn.Module, optimizer: CombinedOptimizer) -> None:
        self._marks: dict[tuple[str, int], list[Tensor]] = {}  # by table and first row
        marked = [shard for lookup in fused_lookups(model) for shard in lookup.mark_rows()]
        for _, part in optimizer.optimizers:
            marked += part.mark_rows() if isinstance(part, ReplicatedTables) else []
        for shard, marks in marked:
            self._marks.setdefault(shard, []).append(marks)

    def ids(self, table: str, row: int) -> Tensor:
        """Return the marked rows of the shard that begins at `row`, counted from there."""
        first, *others = self._marks[table, row]
        for other in others:  # shards of other columns of the same rows
            first = first | other
        return first.nonzero().squeeze(1)

    def clear(self) -> None:
        for shards in self._marks.values():
            for marks in shards:
                marks.zero_()


def collect_changes(
    state: dict[str, Tensor], touched: TouchedRows, rank: int, bits: int
) -> tuple[dict[str, Tensor], list[RowChange]]:
    """Copy the touched rows of this rank, under keys that no other rank uses, and say where they belong.

    `bits`: per value of a table; they are packed when they are written. Optimizer states keep 32.
    """
    tensors: dict[str, Tensor] = {}
    changes: list[RowChange] = []
    for key, value in state.items():
        table = table_of(key)
        if table is None or not has_table_rows(key, value) or (rank and not is_sharded(value)):
            continue  # rank 0 saves what every rank holds
        for shard in local_shards(value):
            ids = touched.ids(table, shard.row)
            if not len(ids):
                continue
            ids_key = f"ids.{rank}.{table}.{shard.row}"
            rows_key = f"rows.{rank}.{len(changes)}"
            tensors.setdefault(ids_key, (ids + shard.row).cpu())
            tensors[rows_key] = shard.values[ids].cpu()
            own_bits = bits if key.startswith("model.") else 32
            changes.append(RowChange(key, ids_key, rows_key, shard.column, own_bits))
    return tensors, changes


def apply_changes(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """Write the changed rows into whatever shards this process holds."""
    described = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    ids_by_key: dict[str, Tensor] = {}

    def read(key: str) -> Tensor:
        description = described[key]
        tensors = {key: torch.empty(description.size, dtype=description.properties.dtype)}
        read_into(tensors, checkpoint.path, alone=True)
        return tensors[key]

    for change in checkpoint.state.changes:
        if change.key not in state:
            continue  # an optimizer state, when only weights are loaded
        if change.ids not in ids_by_key:
            ids_by_key[change.ids] = read(change.ids)
        rows = read(change.values)
        if change.bits == 8:
            rows = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows)
        for shard in local_shards(state[change.key]):
            _write_rows(shard, ids_by_key[change.ids], rows, change.column)


@torch.no_grad()
def _write_rows(shard: LocalShard, ids: Tensor, rows: Tensor, column: int) -> None:
    """Write the part of `rows` that belongs to this shard. `column` is the offset of their first value."""
    values = shard.values
    is_here = (ids >= shard.row) & (ids < shard.row + len(values))
    own_ids = (ids[is_here] - shard.row).to(values.device)
    if rows.dim() == 1:
        values[own_ids] = rows[is_here].to(values.device)
        return
    begin = max(column, shard.column)
    end = min(column + rows.shape[1], shard.column + values.shape[1])
    if begin < end:
        part = rows[is_here, begin - column : end - column].to(values.device)
        values[own_ids, begin - shard.column : end - shard.column] = part


def quantize_rows(rows: Tensor) -> Tensor:
    """Pack each value into 8 bits, as one of 256 steps between the smallest and the largest of its row."""
    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.contiguous())
