"""Incremental checkpoints: table rows that changed since the last full checkpoint, with their optimizer state."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Checkpoint, RowChange
from recmill.checkpoints.safe_reader import SafeReader, read_into, read_rows
from recmill.errors import CheckpointError
from recmill.tables.replicated import ReplicatedTables
from recmill.tables.table_lookup import TableLookup, fused_lookups
from recmill.tables.torchrec_internals import LocalShard, ShardKey, is_sharded, local_shards, table_of

_PIECE_BYTES = 1 << 24


def has_table_rows(key: str, value: Tensor) -> bool:
    """Return whether a tensor holds a table's rows, or the optimizer state of each of them."""
    return table_of(key) is not None and value.dim() > 0


class TouchedRows:
    """The rows of this rank's shards that training used since `clear`."""

    def __init__(self, model: nn.Module, optimizer: CombinedOptimizer) -> None:
        # Column-wise sharding can give a rank several shards of the same rows.
        self._marks: defaultdict[ShardKey, list[Tensor]] = defaultdict(list)
        replicated = [part for _, part in optimizer.optimizers if isinstance(part, ReplicatedTables)]
        sources: list[TableLookup | ReplicatedTables] = [*fused_lookups(model), *replicated]
        for source in sources:
            for shard, marks in source.mark_rows():
                self._marks[shard].append(marks)

    def in_shard(self, shard: ShardKey) -> Tensor:
        """Return the touched rows, relative to the first row of the shard."""
        return reduce(torch.logical_or, self._marks[shard]).nonzero().squeeze(1)

    def clear(self) -> None:
        for shards in self._marks.values():
            for marks in shards:
                marks.zero_()


def collect_changes(
    state: dict[str, Tensor], touched: TouchedRows, rank: int, bits: int
) -> tuple[dict[str, Tensor], list[RowChange]]:
    """Copy this rank's touched rows, under keys that no other rank uses, and describe where they belong.

    `bits` per value apply to weights, which are packed when they are written; optimizer states keep 32.
    """
    tensors: dict[str, Tensor] = {}
    changes: list[RowChange] = []
    for key, value in state.items():
        table = table_of(key)
        if table is None or not has_table_rows(key, value) or (rank and not is_sharded(value)):
            continue  # rank 0 saves replicated tables
        for shard in local_shards(value):
            ids = touched.in_shard((table, shard.row))
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
    """Write the changed rows of an incremental checkpoint into the shards that this process holds."""
    for change in checkpoint.state.changes:
        if change.key not in state:
            continue  # an optimizer state, when only weights are loaded
        ids, rows = changed_rows(checkpoint, change)
        for shard in local_shards(state[change.key]):
            write_rows(shard, ids, rows, change.column)


def changed_rows(checkpoint: Checkpoint, change: RowChange) -> tuple[Tensor, Tensor]:
    """Return the numbers of changed rows, and the rows."""
    described = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    if missing := [key for key in (change.ids, change.values) if key not in described]:
        raise CheckpointError(
            f"{checkpoint.path / '.metadata'}: does not describe {missing[0]}, which state.json names. Restore the "
            "checkpoint from an intact copy, or use another one."
        )
    tensors = {
        key: torch.empty(described[key].size, dtype=described[key].properties.dtype)
        for key in (change.ids, change.values)
    }
    read_into(tensors, checkpoint.path, alone=True)
    rows = tensors[change.values]
    if change.bits == 8:
        rows = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows)
    return tensors[change.ids], rows


def pieces_of(rows: int, row_bytes: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of consecutive pieces of a few megabytes."""
    step = max(1, _PIECE_BYTES // row_bytes)
    for begin in range(first, first + rows, step):
        yield begin, min(step, first + rows - begin)


def dense_pieces(
    checkpoint: Checkpoint, keys: list[str], pieces: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the first row and the values by key, for each (first row, rows) of tensors that are in no row file.

    Only one piece is in memory at a time, and all rows that an incremental checkpoint has changed.
    """
    reader = SafeReader(checkpoint.base or checkpoint.path)
    metadata = reader.read_metadata()
    changed = [(change, *changed_rows(checkpoint, change)) for change in checkpoint.state.changes if change.key in keys]
    for first, count in pieces:
        values = {key: read_rows(reader, metadata, key, first, count) for key in keys}
        for change, ids, rows in changed:
            write_rows(LocalShard(first, 0, values[change.key]), ids, rows, change.column)
        yield first, values


@torch.no_grad()
def write_rows(shard: LocalShard, ids: Tensor, rows: Tensor, column: int) -> None:
    """Write the part of `rows` that belongs to this shard. `column` is their first column in the complete tensor."""
    values = shard.values
    is_here = (ids >= shard.row) & (ids < shard.row + len(values))
    own_ids = (ids[is_here] - shard.row).to(values.device)
    if rows.dim() == 1:  # one value per row
        values[own_ids] = rows[is_here].to(values.device)
        return
    begin = max(column, shard.column)
    end = min(column + rows.shape[1], shard.column + values.shape[1])
    if begin < end:
        part = rows[is_here, begin - column : end - column].to(values.device)
        values[own_ids, begin - shard.column : end - shard.column] = part


def quantize_rows(rows: Tensor) -> Tensor:
    """Quantize each value to 8 bits: one of 256 levels between the minimum and the maximum of its row."""
    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.contiguous())
