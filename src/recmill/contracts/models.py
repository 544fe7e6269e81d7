"""The contract of a model, on one device and on tiny data; with two processes, that of its training."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from recmill.commands.assemble import build_source, model_module, task_module
from recmill.commands.evaluate import evaluate
from recmill.commands.train import train
from recmill.config import Config
from recmill.contracts import expect
from recmill.protocols import Batch, ModelModule, SequenceModelModule, TaskModule
from recmill.schema import Dataset

Check = Callable[[Config, Dataset], None]
_STEPS = 150  # in which one batch must be learned
_TOLERANCE = 1e-3  # of metrics with one and two processes; only the order of sums differs


def build(config: Config, dataset: Dataset, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return model_module(config).build(config.model, dataset.description, torch.device("cpu"))


def first_batch(config: Config, dataset: Dataset) -> Batch:
    return next(build_source(config, dataset, rank=0, size=1).train_batches(0, 0))


def it_and_its_task_have_the_functions_of_their_protocols(config: Config, dataset: Dataset) -> None:
    module = model_module(config)
    protocol = SequenceModelModule if module.KIND == "histories" else ModelModule
    expect(isinstance(module, protocol), f"the module lacks a function of {protocol.__name__}")
    expect(isinstance(task_module(config), TaskModule), f"task '{module.TASK}' lacks a function of TaskModule")
    expect(dataset.description.kind == module.KIND, f"KIND is {module.KIND}, the data is {dataset.description.kind}")


def it_declares_the_tables_that_it_builds(config: Config, dataset: Dataset) -> None:
    declared = {(table.rows, table.dim) for table in model_module(config).tables(config.model, dataset.description)}
    state = build(config, dataset).state_dict()
    built = {tuple(value.shape) for key, value in state.items() if key.startswith("tables.")}
    expect(
        built == declared,
        f"tables() declares the sizes {sorted(declared)}, and the network's attribute `tables` has {sorted(built)}",
    )


def the_loss_and_every_gradient_are_finite(config: Config, dataset: Dataset) -> None:
    network, batch = build(config, dataset), first_batch(config, dataset)
    loss = task_module(config).loss_sum(network, batch) / batch.weight()
    loss.backward()
    expect(math.isfinite(loss.item()), f"the loss of the first batch is {loss.item()}")
    for name, parameter in network.named_parameters():
        expect(parameter.grad is not None, f"{name} has no gradient: the loss does not depend on it")
        expect(bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite")  # type: ignore[arg-type]


def it_can_learn_one_batch_by_heart(config: Config, dataset: Dataset) -> None:
    network, batch = build(config, dataset).eval(), first_batch(config, dataset)  # eval: no dropout
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = task_module(config).loss_sum(network, batch) / batch.weight()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expect(
        losses[-1] < 0.1 * losses[0], f"in {_STEPS} steps the loss went only from {losses[0]:.4f} to {losses[-1]:.4f}"
    )


def its_state_can_be_saved_and_loaded(config: Config, dataset: Dataset) -> None:
    batch = first_batch(config, dataset)
    one, other = build(config, dataset).eval(), build(config, dataset, seed=2).eval()
    other.load_state_dict(one.state_dict())
    equal = torch.equal(one(*batch.inputs()), other(*batch.inputs()))
    expect(equal, "with the state of another network, it gives other outputs: something is not in state_dict()")


def fillers_change_no_gradient(config: Config, dataset: Dataset) -> None:
    """With three processes and batches of 32, a share of 10 gets one filler, one of 11 none."""
    shares = [next(build_source(config, dataset, rank=rank, size=3).train_batches(0, 0)) for rank in range(3)]
    batch = first_batch(config, dataset)
    expect(
        sum(share.weight() for share in shares) == batch.weight(), "the shares of a batch weigh more or less than it"
    )
    one, other = build(config, dataset).eval(), build(config, dataset).eval()
    task = task_module(config)
    task.loss_sum(one, batch).backward()
    for share in shares:
        task.loss_sum(other, share).backward()
    for (name, mine), (_, its) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        equal = torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
        expect(equal, f"{name} gets another gradient if the batch is divided: do the rows of a batch see each other?")


def it_trains_with_two_processes_as_with_one_and_is_found_again(config: Config, dataset: Dataset) -> None:
    section = config.settings.train.model_copy(update={"max_steps": 8, "kernels": "auto"})
    values = replace(config, settings=config.settings.model_copy(update={"train": section})).as_dict()
    with tempfile.TemporaryDirectory(prefix="recmill-check-") as directory:
        runs = {procs: Path(directory) / f"{procs}" for procs in (1, 2)}
        tested = {procs: train(values, run, procs=procs)["test"] for procs, run in runs.items()}
        again = evaluate(runs[2])
    for name, value in tested[1].items():
        if isinstance(value, float):
            for what, other in (("two processes", tested[2][name]), ("`recmill evaluate`", again[name])):
                close = isinstance(other, float) and abs(value - other) <= _TOLERANCE
                expect(close, f"{name} is {value} after training with one process, and {other} with {what}")


ON_ONE_DEVICE: tuple[Check, ...] = (
    it_and_its_task_have_the_functions_of_their_protocols,
    it_declares_the_tables_that_it_builds,
    the_loss_and_every_gradient_are_finite,
    it_can_learn_one_batch_by_heart,
    its_state_can_be_saved_and_loaded,
    fillers_change_no_gradient,
)
CHECKS = (*ON_ONE_DEVICE, it_trains_with_two_processes_as_with_one_and_is_found_again)
