"""The state of fused Adam, which is FBGEMM's also where our kernels update the rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.checkpoints import loading
from recmill.checkpoints.format import Position
from recmill.checkpoints.saver import Saver
from recmill.config.sections import CheckpointSection, OptimSection, TablesOptim
from recmill.launch.watchdog import Heartbeat
from recmill.nn.click_network import ClickNetwork, DenseLayers
from recmill.nn.interactions import DotInteraction
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import Request
from recmill.tables.sharding import shard
from recmill.tables.spec import TableSpec
from recmill.tables.table_lookup import fused_lookups
from recmill.tables.torchrec_internals import FusedTables, local_shards, table_of
from recmill.training.optim import build_optimizer
from recmill.world import World, joined_world

from ..checkpoints import ORIGIN, newest_in

TABLES = [TableSpec(f"t{i}", f"f{i}", rows, 4, 0.1) for i, rows in enumerate((5, 7))]
IDS = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([1, 3, 6, 0]), torch.tensor([1, 1, 1, 1]))
SETTINGS = OptimSection(tables=TablesOptim(name="adam"))


@pytest.fixture
def world() -> Iterator[World]:
    """A group of one process."""
    with joined_world("cpu") as found:
        yield found


def parts(world: World, kind: str) -> tuple[Any, CombinedOptimizer]:
    network = ClickNetwork(TABLES, DenseLayers(3, [4], [4]), DotInteraction(3, 4), torch.device("meta"))
    types = {table.name: kind for table in TABLES}
    request = Request(TABLES, types, "adam", 2, {table.feature: 1 for table in TABLES})
    model = shard(network, request, SETTINGS.tables, world)
    return model, build_optimizer(model, SETTINGS)


def states(model: Any, optimizer: CombinedOptimizer) -> dict[str, Tensor]:
    """The rows of the tables and their optimizer states, by their keys in a checkpoint."""
    found = loading.state_of(model, optimizer)
    return {key: shard.values for key, value in found.items() if table_of(key) for shard in local_shards(value)}


@pytest.mark.parametrize(("first", "second"), [("table_wise", "data_parallel"), ("data_parallel", "table_wise")])
def test_a_checkpoint_goes_between_fused_and_replicated_tables(
    first: str, second: str, world: World, tmp_path: Path
) -> None:
    model, optimizer = parts(world, first)
    saved = states(model, optimizer)
    with torch.no_grad():
        for number, (key, value) in enumerate(saved.items()):
            value.copy_(torch.tensor(7.0) if key.endswith(".steps") else torch.rand(value.shape) + number)
    saver = Saver(tmp_path, model, optimizer, ORIGIN, CheckpointSection(), world, Heartbeat())
    saver.save(Position(step=3))
    saver.finish()
    other, its_optimizer = parts(world, second)
    loading.load(newest_in(tmp_path), other, its_optimizer)
    loaded = states(other, its_optimizer)
    assert sorted(key.rpartition(".")[2] for key in loaded) == sorted(["weight", *OPTIMIZERS["adam"].state] * 2)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert [int(lookup.steps) for lookup in fused_lookups(other) if lookup.steps is not None] == (
        [7] if second == "table_wise" else []
    )


def test_only_steps_are_counted_not_evaluations(world: World) -> None:
    model, optimizer = parts(world, "table_wise")
    (lookup,) = fused_lookups(model)
    counted: Any = lookup.fbgemm
    used = []
    for is_training in (False, True, False, False, True, True):
        with torch.set_grad_enabled(is_training):
            model(torch.zeros(2, 3), IDS)
        if is_training:
            used.append(FusedTables(counted).memory.step)
            optimizer.step()
    assert used == [1, 2, 3]
