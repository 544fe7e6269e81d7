"""What every registered model must do, on one device and on tiny data. Its task and its batch source come along."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from recmill import registry
from recmill.commands.assemble import build_source, model_module, task_module
from recmill.config import Config, load_config
from recmill.data.opening import open_dataset
from recmill.protocols import Batch, ModelModule, SequenceModelModule, TaskModule
from recmill.schema import Dataset

every_model = pytest.mark.parametrize("name", sorted(registry.MODELS))


@pytest.fixture
def parts(name: str, clicks: Path, histories: Path) -> tuple[Config, Dataset]:
    """The model with its own defaults, on the kind of data that it learns from."""
    module = registry.load(registry.MODELS, name, "model")
    path = {"clicks": clicks, "histories": histories}[module.KIND]
    config = load_config({"data": {"path": str(path)}, "model": {"name": name}, "train": {"global_batch_size": 32}})
    return config, open_dataset(path)


def build(config: Config, dataset: Dataset) -> nn.Module:
    torch.manual_seed(1)
    return model_module(config).build(config.model, dataset.description, torch.device("cpu"))


def first_batch(config: Config, dataset: Dataset) -> Batch:
    return next(build_source(config, dataset, rank=0, size=1).train_batches(0, 0))


@every_model
def test_it_and_its_task_have_the_functions_of_their_protocols(parts: tuple[Config, Dataset]) -> None:
    config, dataset = parts
    module = model_module(config)
    assert isinstance(module, SequenceModelModule if module.KIND == "histories" else ModelModule)
    assert isinstance(task_module(config), TaskModule)
    assert dataset.description.kind == module.KIND


@every_model
def test_it_declares_the_tables_that_it_builds(parts: tuple[Config, Dataset]) -> None:
    config, dataset = parts
    declared = {(table.rows, table.dim) for table in model_module(config).tables(config.model, dataset.description)}
    network = build(config, dataset)
    built = {tuple(value.shape) for key, value in network.state_dict().items() if key.startswith("tables.")}
    assert built == declared


@every_model
def test_the_loss_and_every_gradient_are_finite(parts: tuple[Config, Dataset]) -> None:
    config, dataset = parts
    network, batch = build(config, dataset), first_batch(config, dataset)
    loss = task_module(config).loss_sum(network, batch) / batch.weight()
    loss.backward()
    assert math.isfinite(loss.item())
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@every_model
def test_it_can_learn_one_batch_by_heart(parts: tuple[Config, Dataset]) -> None:
    config, dataset = parts
    network, batch = build(config, dataset).eval(), first_batch(config, dataset)  # eval: no dropout
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = task_module(config).loss_sum(network, batch) / batch.weight()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@every_model
def test_its_state_goes_round(parts: tuple[Config, Dataset]) -> None:
    config, dataset = parts
    batch = first_batch(config, dataset)
    one = build(config, dataset).eval()
    torch.manual_seed(2)
    other = model_module(config).build(config.model, dataset.description, torch.device("cpu")).eval()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(*batch.inputs()), other(*batch.inputs()))


@every_model
def test_fillers_change_no_gradient(parts: tuple[Config, Dataset]) -> None:
    """Three processes and batches of 32: a share of 10 gets one filler, one of 11 none."""
    config, dataset = parts
    shares = [next(build_source(config, dataset, rank=rank, size=3).train_batches(0, 0)) for rank in range(3)]
    whole = first_batch(config, dataset)
    assert sum(share.weight() for share in shares) == whole.weight()
    networks = [build(config, dataset).eval() for _ in range(2)]
    task = task_module(config)
    task.loss_sum(networks[0], whole).backward()
    for share in shares:
        task.loss_sum(networks[1], share).backward()
    for (name, one), (_, other) in zip(networks[0].named_parameters(), networks[1].named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5), name  # type: ignore[arg-type]
