"""Loading into a plain network. Sharded models are in tests/distributed/test_reshard.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recmill.checkpoints import loading
from recmill.checkpoints.format import Position
from recmill.checkpoints.saver import Saver
from recmill.config.sections import CheckpointSection
from recmill.errors import CheckpointError
from recmill.launch.watchdog import Heartbeat

from ..checkpoints import ALONE, ORIGIN, newest_in, save_network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant


def test_weights_and_position_come_back(tmp_path: Path) -> None:
    network, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_network(tmp_path, network, step=7)
    found = newest_in(tmp_path)
    assert found.position == Position(step=7, epoch=1, batch=2)
    loading.load(found, other)
    assert torch.equal(network.weight, other.weight)
    assert not dist.is_initialized()


class Network(nn.Module):
    def __init__(self, sizes: dict[str, tuple[int, int]], hidden: int) -> None:
        super().__init__()
        self.tables = nn.Module()
        bags = {name: nn.EmbeddingBag(*size) for name, size in sizes.items()}
        self.tables.embedding_bags = nn.ModuleDict(bags)
        self.top = nn.Linear(hidden, 1)


def test_another_model_s_checkpoint_is_refused_with_every_difference(tmp_path: Path) -> None:
    """A table grown, one narrower, one new, one gone, and a wider layer; no process group, as in `recommend`."""
    old = Network({"a": (50, 8), "b": (20, 8), "same": (5, 4), "gone": (3, 4)}, hidden=4)
    new = Network({"a": (60, 8), "b": (20, 4), "same": (5, 4), "new": (1000, 4)}, hidden=6)
    save_network(tmp_path, old, step=1)
    found = newest_in(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        loading.load(found, new)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == f"{found.path} does not fit this model:"
    assert lines[1:-1] == [
        "table a: 50 rows of 8 in the checkpoint, 60 rows of 8 here",
        "table b: 20 rows of 8 in the checkpoint, 20 rows of 4 here",
        "table gone: 3 rows of 4 in the checkpoint, not here",
        "table new: not in the checkpoint, 1,000 rows of 4 here",
        "layer top.weight: [1, 4] in the checkpoint, [1, 6] here",
    ]
    before = {key: value.clone() for key, value in new.state_dict().items()}
    loading.load(found, new, allow_partial=True)
    loaded = [key for key, value in new.state_dict().items() if not torch.equal(value, before[key])]
    assert sorted(loaded) == ["tables.embedding_bags.same.weight", "top.bias"]
    assert torch.equal(new.top.bias, old.top.bias)


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    save_network(tmp_path, Network({f"t{number:02d}": (50, 8) for number in range(26)}, hidden=4), step=1)
    with pytest.raises(CheckpointError) as caught:
        loading.load(newest_in(tmp_path), Network({f"t{number:02d}": (60, 8) for number in range(26)}, hidden=4))
    lines = str(caught.value).splitlines()
    assert lines[10] == "  table t09: 50 rows of 8 in the checkpoint, 60 rows of 8 here"
    assert lines[11] == "  and 16 more"
    assert len(lines) == 13


def optimizer_of(network: nn.Module) -> CombinedOptimizer:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5)

    return CombinedOptimizer([("dense", KeyedOptimizerWrapper(dict(network.named_parameters()), make))])


def trained(hidden: int) -> tuple[nn.Module, CombinedOptimizer]:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, hidden))
    optimizer = optimizer_of(network)
    for _ in range(5):
        optimizer.zero_grad()
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return network, optimizer


def test_a_partial_load_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    """Layer 1 has another width: neither its values nor its count of steps come from there, nor are they changed."""
    old, old_optimizer = trained(hidden=2)
    saver = Saver(tmp_path, old, old_optimizer, ORIGIN, CheckpointSection(), ALONE, Heartbeat())
    saver.save(Position(step=5))
    saver.finish()
    new = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6))
    optimizer = optimizer_of(new)
    before = {key: value.clone() for key, value in new.state_dict().items()}
    loading.load(newest_in(tmp_path), new, optimizer, allow_partial=True)
    assert [key for key, value in new.state_dict().items() if torch.equal(value, before[key])] == ["1.weight", "1.bias"]
    (dense,) = [part for _, part in optimizer.optimizers]
    expected = old_optimizer.state_dict()["state"]["dense.0.weight"]
    found = dense.state_dict()["state"]["0.weight"]
    assert all(torch.equal(found[name], expected[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert [float(value.abs().sum()) for value in dense.state[new[1].weight].values()] == [0.0, 0.0, 0.0]
    saver = Saver(tmp_path, new, optimizer, ORIGIN, CheckpointSection(), ALONE, Heartbeat())
    saver.save(Position(step=6))
    saver.finish()
    again = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6))
    loading.load(newest_in(tmp_path), again, optimizer_of(again))
