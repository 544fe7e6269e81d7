"""Load rows of any checkpoint into the caches of cached_ssd, a few megabytes at a time."""

from collections.abc import Iterator

import numpy as np

from recmill import rng
from recmill.checkpoints.format import Checkpoint
from recmill.checkpoints.incremental import dense_pieces, pieces_of
from recmill.checkpoints.row_files import saved_keys, saved_rows
from recmill.tables.cached_tables import CachedTables

TableKeys = dict[str, tuple[str, list[str]]]  # by table: key of its rows; those of their states that are to be loaded


def load_into_caches(checkpoint: Checkpoint, caches: list[CachedTables], keys: TableKeys) -> None:
    """Load the tables in `keys`. Rows that still have their first values are left out."""
    own = {name: cached for cached in caches for name in cached.names if name in keys}
    in_row_files = {table.name: table for _, file in checkpoint.row_files for table in file.tables}
    if any(cached.dynamic for cached in own.values()):
        for name, (clock, entries) in saved_keys(checkpoint).items():
            if name in own:
                own[name].dynamic[name].load(entries, clock)
    for name, cached in own.items():
        if name in cached.dynamic:
            continue
        if name not in in_row_files:
            _load_dense(checkpoint, cached, name, keys[name])
            continue
        stream = rng.stream_key(checkpoint.state.origin.seed, "table", name)
        shard = cached.shard_of(name)
        if (stream, in_row_files[name].bound) != (shard.stream, shard.bound):  # another run's first values
            for first, count in _pieces(cached, name):
                values = _first_values(stream, first, count, cached.dim, in_row_files[name].bound)
                _load(cached, name, np.arange(first, first + count), values, None)
    for directory, file in checkpoint.row_files:
        for table, rows, weights, state in saved_rows(directory, file):
            if table.name in own:
                has_state = bool(keys[table.name][1])
                _load(own[table.name], table.name, rows, weights, state if has_state else None)


def _load(cached: CachedTables, name: str, rows: np.ndarray, weights: np.ndarray, state: np.ndarray | None) -> None:
    """Load those rows that this process holds. If `state` is None, their optimizer state is 0."""
    is_here, cache_keys = cached.keys_of(name, rows)
    columns = cached.cache.layout.state_columns
    zeros = np.zeros((len(cache_keys), columns), np.float32)
    own_state = zeros if state is None or not columns else state[is_here].reshape(-1, columns)
    cached.cache.load(cache_keys, weights[is_here], own_state)


def _load_dense(checkpoint: Checkpoint, cached: CachedTables, name: str, keys: tuple[str, list[str]]) -> None:
    """Load a table that the checkpoint holds as a tensor, with the changes of an incremental checkpoint."""
    weight_key, state_keys = keys
    shard = cached.shard_of(name)
    for first, values in dense_pieces(checkpoint, [weight_key, *state_keys], _pieces(cached, name)):
        count = len(values[weight_key])
        weights = values[weight_key].numpy()
        states = [values[key].numpy().reshape(count, -1) for key in state_keys]
        state = np.concatenate(states, axis=1) if states else np.zeros((count, 1), np.float32)
        untouched = _first_values(shard.stream, first, count, cached.dim, shard.bound)
        is_trained = (weights.view(np.uint32) != untouched.view(np.uint32)).any(axis=1) | (state != 0).any(axis=1)
        kept = np.flatnonzero(is_trained)
        _load(cached, name, first + kept, weights[kept], state[kept] if state_keys else None)


def _pieces(cached: CachedTables, name: str) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of consecutive pieces of this process's shard."""
    shard = cached.shard_of(name)
    return pieces_of(shard.rows, cached.cache.layout.value_bytes, shard.first_row)


def _first_values(stream: np.uint64, first: int, count: int, dim: int, bound: float) -> np.ndarray:
    return rng.uniform_floats(stream, first * dim, count * dim, bound).reshape(count, dim)
