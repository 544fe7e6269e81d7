"""The initial values of tables: functions of (seed, table, row, column) only, so every sharding starts the same."""

import torch
from torch import nn

from recmill import rng
from recmill.tables.spec import TableSpec
from recmill.tables.torchrec_internals import table_shards

_CHUNK_VALUES = 1 << 16  # stays in the CPU's cache


def fill_tables(model: nn.Module, tables: list[TableSpec], seed: int) -> None:
    """Set the rows that this process holds to their initial values."""
    specs = {table.name: table for table in tables}
    for name, shard in table_shards(model):
        dim = specs[name].dim
        key = rng.stream_key(seed, "table", name)
        row = shard.row
        for chunk in shard.values.split(max(1, _CHUNK_VALUES // dim)):
            rows, columns = chunk.shape
            values = rng.uniform_floats(key, row * dim, rows * dim, specs[name].init_bound).reshape(rows, dim)
            chunk.copy_(torch.from_numpy(values[:, shard.column : shard.column + columns]))
            row += rows
