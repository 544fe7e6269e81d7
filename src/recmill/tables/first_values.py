"""The initial values of tables: functions of (seed, table, row, column) only, so every sharding starts the same."""

import numpy as np
import torch
from torch import nn

from recmill import rng
from recmill.tables.spec import TableSpec
from recmill.tables.table_lookup import cached_tables
from recmill.tables.torchrec_internals import LocalShard, table_shards

_CHUNK_VALUES = 1 << 16  # stays in the CPU's cache


def fill_tables(model: nn.Module, tables: list[TableSpec], seed: int) -> None:
    """Set the rows that this process holds in memory to their initial values."""
    specs = {table.name: table for table in tables}
    in_caches = {name for cached in cached_tables(model) for name in cached.names}
    for name, shard in table_shards(model):
        if name in in_caches:
            continue  # its rows get their initial values when they are first used
        fill_shard(shard, rng.stream_key(seed, "table", name), specs[name].dim, specs[name].init_bound)
    zero_padding(model, tables)


def zero_padding(model: nn.Module, tables: list[TableSpec]) -> None:
    """Set the rows of padding ids to 0, with their optimizer state if they are cached. They are never trained."""
    padding = {table.name: table.padding_id for table in tables if table.padding_id is not None}
    in_caches = {name: cached for cached in cached_tables(model) for name in cached.names}
    for name in padding.keys() & in_caches.keys():
        cached = in_caches[name]
        _, keys = cached.keys_of(name, np.array([padding[name]]))
        zeros = (np.zeros((len(keys), n), np.float32) for n in (cached.dim, cached.cache.layout.state_columns))
        cached.cache.load(keys, *zeros)
    for name, shard in table_shards(model) if padding else ():
        if name in padding.keys() - in_caches.keys() and 0 <= (row := padding[name] - shard.row) < len(shard.values):
            shard.values.detach()[row] = 0


def fill_shard(shard: LocalShard, stream: np.uint64, dim: int, bound: float) -> None:
    """Set a shard of a table of width `dim` to the first values of a stream."""
    row = shard.row
    for chunk in shard.values.detach().split(max(1, _CHUNK_VALUES // dim)):
        rows, columns = chunk.shape
        values = rng.uniform_floats(stream, row * dim, rows * dim, bound).reshape(rows, dim)
        chunk.copy_(torch.from_numpy(values[:, shard.column : shard.column + columns]))
        row += rows
