"""The first values of tables: from (seed, table, row, column) alone, so any cut of a table starts the same."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recmill import rng
from recmill.tables.spec import TableSpec

_CHUNK_VALUES = 1 << 16  # stays in cache


def fill_tables(model: nn.Module, tables: list[TableSpec], seed: int) -> None:
    specs = {table.name: table for table in tables}
    for name, first_row, first_column, values in local_shards(model):
        _fill(values, specs[name], seed, first_row, first_column)


def local_shards(model: nn.Module) -> Iterator[tuple[str, int, int, Tensor]]:
    """(table, first row, first column, values) of each piece of a table in this process."""
    for key, value in model.state_dict().items():
        collection, table = ["", "", *key.split(".")][-3:-1]
        if isinstance(value, ShardedTensor):
            for piece in value.local_shards():
                row, column = piece.metadata.shard_offsets
                yield table, row, column, piece.tensor
        elif collection in ("embedding_bags", "embeddings"):  # data_parallel: whole, on every rank
            yield table, 0, 0, value


def _fill(values: Tensor, table: TableSpec, seed: int, first_row: int, first_column: int) -> None:
    rows, columns = values.shape
    key = rng.stream_key(seed, "table", table.name)
    step = max(1, _CHUNK_VALUES // table.dim)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        whole = rng.uniform_floats(key, (first_row + start) * table.dim, count * table.dim, table.init_bound)
        part = whole.reshape(count, table.dim)[:, first_column : first_column + columns]
        values[start : start + count].copy_(torch.from_numpy(part))
