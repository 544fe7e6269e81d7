"""Tables in files against tables in memory, bit for bit: each optimizer, sharding and kind of lookup, 1 to 3 processes.

The caches are so small that rows are evicted, written and read again in every step.
"""

import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recmill import prepare
from recmill.checkpoints.format import Position
from recmill.commands import assemble
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.launch.watchdog import Heartbeat
from recmill.tables import sharding, slots
from recmill.tables.first_values import fill_tables
from recmill.tables.stores.row_cache import CachePlan, RowCache, RowLayout
from recmill.tables.stores.row_file import file_system
from recmill.tables.table_lookup import cached_tables, fused_lookups
from recmill.tables.torchrec_internals import FusedTables
from recmill.training.look_ahead import looking_ahead
from recmill.training.optim import build_optimizer
from recmill.training.parts import Parts
from recmill.training.step import Step
from recmill.world import World, joined_world

from ..group import in_group

Config = dict[str, Any]
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
SHARDINGS = ("row_wise", "table_wise")
STEPS = 9  # the last batch of the epoch, the ninth, has one row: fewer than processes
LOOKAHEADS: tuple[int, ...] = (0, 1, 64)


def small_plan(layout: RowLayout, budget_bytes: int, min_slots: int = 1, max_slots: int | None = None) -> CachePlan:
    """Return a plan with room for the rows of a batch and few more."""
    return CachePlan(min(layout.rows, max(1, min_slots) + 4), 4096, 1, 1)


def bits(values: np.ndarray) -> bytes:
    return values.tobytes()


def rows_of(model: nn.Module) -> dict[tuple[str, int], tuple[bytes, bytes]]:
    """Return the weights and the optimizer state of each shard that this process holds, by table and first row."""
    found: dict[tuple[str, int], tuple[bytes, bytes]] = {}
    for lookup in fused_lookups(model):
        if lookup.cached:
            cache = lookup.cached.cache
            weights = cache.read(np.arange(cache.layout.rows))
            state = np.zeros((cache.layout.rows, cache.layout.state_columns), np.float32)
            for chunk in cache.snapshot():
                assert bits(weights[chunk.keys]) == bits(chunk.weights)
                state[chunk.keys] = chunk.state
            keys = [(name, lookup.cached.shard_of(name).first_row) for name in lookup.cached.names]
            parts = [np.split(values, cache.layout.starts[1:-1]) for values in (weights, state)]
        else:
            fused, keys = FusedTables(lookup.fbgemm), lookup._shards
            sizes = fused.rows.numpy()
            ends = np.cumsum(sizes)[:-1]
            memory, count = fused.memory, sizes.sum()
            own = [values for values in (memory.state, memory.state2) if values is not None]
            states = [values.detach().numpy()[: len(values) // count * count].reshape(count, -1) for values in own]
            weights = memory.weights.detach().numpy().reshape(-1)[: count * fused.dim].reshape(count, -1)
            parts = [np.split(values, ends) for values in (weights, np.hstack([weights[:, :0], *states]))]
        found |= {key: (bits(w), bits(s)) for key, w, s in zip(keys, *parts, strict=True)}
    return found


def learn(config: Config, folder: Path, world: World, is_validated: bool) -> tuple[Any, int]:
    """Train, and return everything that was learned, and how many rows were read from a file."""
    made = load_config(config)
    settings = made.settings
    dataset = open_dataset(settings.data.path)
    source = assemble.build_source(made, dataset, world.rank, world.size)
    model = assemble.build_sharded(made, dataset, world, folder)
    fill_tables(model, assemble.table_specs(made, dataset), settings.train.seed)
    optimizer = build_optimizer(model, settings.optim)
    parts = Parts(model, assemble.task_module(made), source, world, 0, Heartbeat())
    step = Step(parts, optimizer, settings.train, settings.optim.dense, Position())
    some = next(iter(source.eval_batches("val")))

    def predictions() -> bytes:
        with torch.no_grad():
            return bits(model(*some.inputs()).numpy())

    losses = []
    with looking_ahead(model, source, Position(), STEPS + 5):  # more batches than are trained
        for number, batch in zip(range(STEPS), source.train_batches(0, 0), strict=False):
            losses.append(float(step(batch, 1 / settings.train.global_batch_size)))
            if is_validated and number % 2:
                predictions()
    assert len(losses) == STEPS
    caches = [cached.cache for cached in cached_tables(model) if isinstance(cached.cache, RowCache)]
    misses = sum(cache.counters().misses for cache in caches)
    dense = {key: bits(p.detach().numpy()) for key, p in in_backward_optimizer_filter(model.named_parameters())}
    learned = losses, predictions(), dense, rows_of(model)
    for cache in caches:
        cache.close()
    return learned, misses


def compare(configs: dict[str, Config], folder: Path) -> Any:
    """In each process: train each config with both stores. Return on rank 0 what differs."""
    slots.plan_caches.__globals__["plan_cache"] = small_plan
    threading.excepthook = lambda failure: different.append(f"a thread failed: {failure.exc_value!r}")
    different: list[str] = []
    with joined_world("cpu") as world:
        for number, (name, config) in enumerate(configs.items()):
            sharding._open_cache.__globals__["RowCache"] = partial(RowCache, eviction_seed=number + 2)
            in_memory, _ = learn(config, folder, world, is_validated=False)
            tables = {"store": "cached_ssd", "cache_memory_budget_mb": 1}
            tables["lookahead"] = LOOKAHEADS[number % len(LOOKAHEADS)]
            cached, read = learn(config | {"tables": tables}, folder, world, is_validated=True)
            reports: list[Any] = world.gather((in_memory, cached, read)) or []
            kinds = ("losses", "predictions", "dense layers")
            for rank, (one, other, _) in enumerate(reports):
                pairs = zip(kinds, one[:3], other[:3], strict=True)
                different += [f"{name}, rank {rank}: {kind}" for kind, a, b in pairs if a != b]
            # A table may be on another rank.
            one, other = ({key: v for report in reports for key, v in report[i][3].items()} for i in (0, 1))
            different += [f"{name}: {key}" for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            if reports and not any(count for *_, count in reports):
                different.append(f"{name}: no row was read from a file")
    return different


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    if file_system(folder) == "tmpfs":
        pytest.skip(f"{folder} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")
    prepare("random-clicks", folder / "bags", rows=3 * (STEPS - 1) * 24 + 3, days=3, dense=2, tables=[1, 7, 400, 900])
    prepare("random-histories", folder / "sequences", random_user_count=160, random_item_count=900, random_size=1600)
    return {"bags": folder / "bags", "sequences": folder / "sequences"}


def config_of(kind: str, data: Path, optimizer: str, sharding: str) -> Config:
    models: dict[str, Config] = {
        "bags": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [4]},
        "sequences": {"name": "sasrec", "embedding_dim": 8, "num_layers": 1, "max_length": 5},
    }
    # Two lookups of the first table, which has one row, and of the second: the same id twice in a bag.
    multi_hot = {"multi_hot": {"sizes": [2, 3, 2, 1]}} if kind == "bags" else {}
    return {
        "data": {"path": str(data)} | multi_hot,
        "model": models[kind],
        "train": {"device": "cpu", "global_batch_size": 24 if kind == "bags" else 16},
        "eval": {"global_batch_size": 64} | ({} if kind == "bags" else {"protocols": ["full"]}),
        "optim": {"tables": {"name": optimizer, "lr": 0.3}},
        "sharding": {"default": sharding},
    }


@pytest.mark.parametrize("procs", [1, 2, 3])
def test_every_optimizer_sharding_and_lookup_gives_the_bits_of_tables_in_memory(
    procs: int, datasets: dict[str, Path], tmp_path: Path
) -> None:
    """Pairs of runs with look-ahead 0, 1 and 64, another order of eviction in each, validations only with a cache."""
    configs = {
        f"{kind} {sharding} {optimizer}": config_of(kind, datasets[kind], optimizer, sharding)
        for sharding, kind, optimizer in itertools.product(SHARDINGS, datasets, OPTIMIZERS)
    }
    for optimizer, kind in itertools.product(("adam", "ftrl"), datasets):
        configs[f"{kind} row_wise {optimizer}"] = config_of(kind, datasets[kind], optimizer, "row_wise")
    different = in_group(procs, compare, configs, tmp_path)
    assert different == []
