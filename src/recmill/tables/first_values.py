"""The first values of tables: functions of (seed, table, row, column) alone, so that any sharding starts the same."""

import torch
from torch import nn

from recmill import rng
from recmill.tables.spec import TableSpec
from recmill.tables.torchrec_internals import LocalShard, table_shards

_CHUNK_VALUES = 1 << 16  # stays in the CPU's cache


def fill_tables(model: nn.Module, tables: list[TableSpec], seed: int) -> None:
    """Set all rows that this process holds to their first values."""
    specs = {table.name: table for table in tables}
    for name, shard in table_shards(model):
        _fill(shard, specs[name], seed)


def _fill(shard: LocalShard, table: TableSpec, seed: int) -> None:
    rows, columns = shard.values.shape
    key = rng.stream_key(seed, "table", table.name)
    step = max(1, _CHUNK_VALUES // table.dim)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        values = rng.uniform_floats(key, (shard.row + start) * table.dim, count * table.dim, table.init_bound)
        own_columns = values.reshape(count, table.dim)[:, shard.column : shard.column + columns]
        shard.values[start : start + count].copy_(torch.from_numpy(own_columns))
