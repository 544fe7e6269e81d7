"""The same run for any world size and any sharding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recmill import rng
from recmill.commands.assemble import build_source, model_module, task_module
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.tables.spec import TableSpec

from ..group import evaluate, train
from .runs import assert_same_run, losses


@pytest.mark.parametrize("model", ["dlrm", "bert4rec", "sasrec"])
def test_any_number_of_processes_gives_the_same_losses_and_metrics(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = request.getfixturevalue(model)
    sizes = (1, 3) if model == "bert4rec" else (1, 2)
    results = [train(config, tmp_path / str(procs), procs=procs) for procs in sizes]
    assert len(losses(tmp_path / "1")) > 4
    first, *later, before_last, _ = losses(tmp_path / "1")  # the last batch may be a single row
    # A batch of histories has rows of like length, and losses of different lengths are hard to compare.
    assert (before_last if model == "dlrm" else min(later)) < first
    assert_same_run(tmp_path / "1", tmp_path / str(sizes[1]))
    for split in ("val", "test"):
        assert results[1][split] == pytest.approx(results[0][split], rel=2e-5)
    if model == "dlrm":  # the metrics of one checkpoint, summed over one rank and over two
        assert evaluate(tmp_path / "1", split="val", procs=2) == pytest.approx(results[0]["val"], rel=1e-6)


def test_all_that_ranking_has_is_the_same_for_one_and_two_processes(sasrec: dict[str, Any], tmp_path: Path) -> None:
    trained = train(sasrec, tmp_path / "run", overrides=["train.max_steps=3"])["val"]
    asked: dict[str, Any] = {"protocols": ["uni100", "full", "pop100"], "ks": [3, 10], "bootstrap": 200}
    one, two = (evaluate(tmp_path / "run", split="val", procs=procs, **asked) for procs in (1, 2))
    assert len(one) == 4 * 18 + 1  # values, both ends of intervals, popularity; users
    assert two == one
    shared = one.keys() & trained.keys()
    assert len(shared) == 7
    assert {name: one[name] for name in shared} == {name: trained[name] for name in shared}


@pytest.mark.parametrize(
    ("model", "sharding"),
    [
        ("dlrm", "row_wise"),
        ("dcnv2", "row_wise"),
        ("projection", "row_wise"),
        ("bert4rec", "row_wise"),
        ("sasrec", "row_wise"),
        ("gsasrec", "row_wise"),
    ],
)
def test_two_sharded_processes_equal_plain_torch(
    model: str, sharding: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The reference: an unsharded network, torch's own SGD on everything, one process, no launcher.

    test_sharding.py shows the same for the other ways to shard tables.
    """
    config = request.getfixturevalue(model)
    config["optim"] = {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "sgd", "lr": 0.1}}
    config["train"]["max_steps"] = 6
    train(config, tmp_path / "run", procs=2, overrides=[f"sharding.default={sharding}"])
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(config, steps=6), rel=2e-5)


def plain_losses(values: dict[str, Any], steps: int) -> list[float]:
    config = load_config(values)
    dataset = open_dataset(config.settings.data.path)
    module, task = model_module(config), task_module(config)
    torch.manual_seed(config.settings.train.seed)
    network = module.build(config.model, dataset.description, torch.device("meta"))
    give_tables_memory(network, module.tables(config.model, dataset.description), config.settings.train.seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    out = []
    for _, batch in zip(range(steps), build_source(config, dataset, rank=0, size=1).train_batches(0, 0), strict=False):
        loss = task.loss_sum(network, batch) / batch.weight()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def give_tables_memory(network: torch.nn.Module, tables: list[TableSpec], seed: int) -> None:
    """Ordinary parameters, by the documented formula: stream (seed, table), value number row * dim + column."""
    for table in tables:
        key = rng.stream_key(seed, "table", table.name)
        values = rng.uniform_floats(key, 0, table.rows * table.dim, table.init_bound).reshape(table.rows, table.dim)
        (holder,) = [module for name, module in network.named_modules() if name.endswith(f".{table.name}")]
        holder.weight = torch.nn.Parameter(torch.from_numpy(values.copy()))
