"""Tables and their optimizer state load from any sharding and world size into any other, value for value."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints import loading as checkpoint
from recmill.checkpoints.choosing import choose
from recmill.checkpoints.format import Origin, Position
from recmill.checkpoints.saver import Saver
from recmill.commands.assemble import build_sharded, open_matching_dataset
from recmill.config import Config, load_config
from recmill.errors import UserError
from recmill.launch.watchdog import Heartbeat
from recmill.tables.torchrec_internals import local_shards
from recmill.training.guards import check_replicas
from recmill.training.optim import build_optimizer
from recmill.world import World, joined_world

from .. import group
from ..group import TWO_BACKENDS

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
SHARDINGS: dict[str, dict[str, Any]] = {kind: {"default": kind} for kind in KINDS[:-1]} | {
    "mixed": {"tables": {"C1": "data_parallel", "C2": "column_wise", "C3": "grid", "C4": "table_row_wise"}}
}
STATES = {"adam": KINDS, "rowwise_adagrad": ("table_wise", "row_wise", "data_parallel")}


def expected(key: str, row: int, column: int, shape: torch.Size) -> Tensor:
    """Values from (row, column) of the complete tensor on, different everywhere."""
    rows = torch.arange(row, row + shape[0], dtype=torch.float64)
    values = rows if len(shape) == 1 else rows[:, None] * 31 + torch.arange(column, column + shape[1])
    return (values + len(key) * 0.37 + sum(map(ord, key)) % 1009).float() / 7


@torch.no_grad()
def fill(state: dict[str, Tensor], junk: bool = False) -> None:
    for key, value in state.items():
        for shard in local_shards(value):
            if shard.values.dim():
                own = expected(key, shard.row, shard.column, shard.values.shape)
                shard.values.copy_(torch.full_like(own, -1.0) if junk else own)


def wrong(state: dict[str, Tensor]) -> list[str]:
    return [
        key
        for key, value in state.items()
        for shard in local_shards(value)
        if shard.values.dim()
        and not torch.equal(shard.values, expected(key, shard.row, shard.column, shard.values.shape))
    ]


def parts(config: Config, world: World) -> tuple[nn.Module, CombinedOptimizer]:
    model = build_sharded(config, open_matching_dataset(config), world)
    optimizer = build_optimizer(model, config.settings.optim)
    for _, part in optimizer.optimizers:
        if hasattr(part, "init_state"):
            part.init_state()
    return model, optimizer


def take_over(values: dict[str, Any], folder: Path, load_from: int) -> list[list[str]] | None:
    """Wrong tensors by rank."""
    with joined_world("cpu") as world:
        return world.gather(problems_of(values, folder, load_from, world))


def problems_of(values: dict[str, Any], folder: Path, load_from: int, world: World) -> list[str]:
    size = world.size
    problems: list[str] = []
    for optimizer_name, kinds in STATES.items():
        for kind in kinds:
            sharding = SHARDINGS[kind]
            optim = {"dense": {"name": "adam"}, "tables": {"name": optimizer_name}}
            config = load_config({**values, "sharding": sharding, "optim": optim})
            model, optimizer = parts(config, world)
            state = checkpoint.state_of(model, optimizer)
            for earlier in kinds if load_from else ():
                fill(state, junk=True)
                found = choose(folder / f"{load_from}-{optimizer_name}-{earlier}", "newest")
                assert found is not None
                checkpoint.load(found, model, optimizer)
                bad = wrong(checkpoint.state_of(model, optimizer))
                problems += [f"{optimizer_name} {earlier} of {load_from} -> {kind} of {size}: {key}" for key in bad]
            fill(state)
            origin = Origin("", "", 1, 8, size, {})
            target = folder / f"{size}-{optimizer_name}-{kind}"
            saver = Saver(target, model, optimizer, origin, config.settings.checkpoint, world, Heartbeat())
            saver.save(Position(step=load_from + 1))
            fill(state, junk=True)  # training continues at once
            saver.finish()
    if size == 2 and load_from == 1:
        problems += replicas_that_differ(model, world)
    return problems


def replicas_that_differ(model: nn.Module, world: World) -> list[str]:
    check_replicas(model, 3, world)
    with torch.no_grad():
        model.state_dict()["bottom.0.bias"][1] += float(world.rank)
    try:
        check_replicas(model, 4, world)
    except UserError as error:
        text = "After step 4 bottom.0.bias is not the same on all ranks: rank 0 differs from rank 1."
        return [] if str(error).startswith(text) else [str(error)]
    return ["a replica that differs was not noticed"]


def test_any_sharding_and_world_size_loads_into_any_other(
    dlrm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 -> 2 -> 4 -> 2 -> 1 processes, each time from every sharding to every other, also in groups as on GPUs."""
    for earlier, size, backend in ((0, 1, ""), (1, 2, TWO_BACKENDS), (2, 4, ""), (4, 2, TWO_BACKENDS), (2, 1, "")):
        monkeypatch.setattr(group, "backend", backend)
        assert group.in_group(size, take_over, dlrm, tmp_path, earlier) == [[]] * size
