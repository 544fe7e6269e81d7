"""A cache of rows must behave like a dictionary, whatever is evicted, compacted, hinted or saved meanwhile."""

from pathlib import Path

import numpy as np
import pytest

from recmill import rng
from recmill.tables.stores.row_cache import CachePlan, Engine, RowCache, RowLayout, Shard, Snapshot

ENGINES: tuple[Engine, ...] = ("io_uring", "threads")
BOUND = 0.3


def layout(*rows: int, dim: int = 5, state_columns: int = 1) -> RowLayout:
    shards = [Shard(n, 100 * i, rng.stream_key(7, "table", f"C{i}"), BOUND + i) for i, n in enumerate(rows)]
    return RowLayout(tuple(shards), dim, state_columns)


def small_plan(slots: int, segment_bytes: int = 4096) -> CachePlan:
    """Return a plan in which everything is evicted, and written in segments of a few records."""
    return CachePlan(slots, segment_bytes, 0, 0)


def first_rows(of: RowLayout) -> np.ndarray:
    """Return the first values of all keys, as first_values.py fills tables."""
    pieces = [
        rng.uniform_floats(shard.stream, shard.first_row * of.dim, shard.rows * of.dim, shard.bound)
        for shard in of.shards
    ]
    return np.concatenate(pieces).reshape(-1, of.dim)


class Model:
    """The rows as plain arrays, and which of them were trained at which position."""

    def __init__(self, of: RowLayout) -> None:
        self.weights = first_rows(of)
        self.state = np.zeros((of.rows, of.state_columns), np.float32)
        self.positions = np.full(of.rows, -1)
        self.position = 0

    def train(self, cache: RowCache, keys: np.ndarray, batch: int = -1) -> None:
        slots = cache.pin(keys, batch)
        assert (cache.weights[slots] == self.weights[keys]).all()
        assert (cache.state[slots] == self.state[keys]).all()
        unique = np.unique(keys)
        self.weights[unique] = np.sin(self.weights[unique] + np.float32(unique[:, None] % 7))
        self.state[unique] += 1
        self.positions[unique] = self.position
        cache.weights[slots], cache.state[slots] = self.weights[keys], self.state[keys]
        cache.unpin()

    def expected(self, since: int = 0) -> dict[int, tuple[bytes, bytes]]:
        keys = np.flatnonzero(self.positions >= since)
        return {int(key): (self.weights[key].tobytes(), self.state[key].tobytes()) for key in keys}


def contents(snapshot: Snapshot) -> dict[int, tuple[bytes, bytes]]:
    rows: dict[int, tuple[bytes, bytes]] = {}
    for chunk in snapshot:
        for key, weights, state in zip(chunk.keys.tolist(), chunk.weights, chunk.state, strict=True):
            assert key not in rows, f"key {key} is twice in a snapshot"
            rows[key] = weights.tobytes(), state.tobytes()
    return rows


def batches(seed: int, count: int, rows: int, size: int) -> list[np.ndarray]:
    """Return batches in which some keys are frequent and repeated."""
    random = np.random.default_rng(seed)
    return [(rows * random.random(size) ** 3).astype(np.int64) for _ in range(count)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lookahead", [0, 1, 5, 60])
@pytest.mark.parametrize("state_columns", [0, 1, 5])
def test_rows_are_those_of_a_dictionary(engine: Engine, lookahead: int, state_columns: int, tmp_path: Path) -> None:
    of = layout(200, 1, 300, state_columns=state_columns)
    model, random = Model(of), np.random.default_rng(lookahead)
    coming = batches(1, 400, of.rows, 30)
    saved: tuple[Snapshot, dict[int, tuple[bytes, bytes]]] | None = None
    positions = [0]
    hinted = 0
    with RowCache(of, small_plan(64), tmp_path, engine=engine, lookahead=max(1, lookahead)) as cache:
        for step, keys in enumerate(coming):
            hinted = max(hinted, step)
            while lookahead and hinted < len(coming) and cache.hint(hinted, coming[hinted]):
                hinted += 1
            model.train(cache, keys, step if lookahead else -1)
            if step % 5 == 0:
                some, before = random.integers(0, of.rows, 50), cache.counters()
                assert (cache.read(some) == model.weights[some]).all()
                assert cache.counters()[:4] == before[:4]
            if step % 40 == 20:
                since = int(random.choice(positions))
                saved = cache.snapshot(since), model.expected(since)
                model.position = saved[0].position
                positions.append(model.position)
            if step % 40 == 25 + step // 40 and saved:
                assert contents(saved[0]) == saved[1]
        assert contents(cache.snapshot()) == model.expected()
        counters = cache.counters()
    assert counters.lookups == 30 * len(coming)
    assert counters.rows == sum(len(np.unique(keys)) for keys in coming)
    assert counters.first_touches >= 300 and counters.misses > 1000 and counters.hits > 1000
    assert counters.trained_rows == len(model.expected())
