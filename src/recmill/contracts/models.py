"""The contract of a model: checks on tiny data, in this process, and a short training with one and two processes."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from recmill.commands.assemble import build_source, check_tables_attribute, model_module, task_module
from recmill.commands.evaluate import evaluate
from recmill.commands.train import train
from recmill.config import Config
from recmill.contracts import expect
from recmill.protocols import Batch, ModelModule, SequenceModelModule, TaskModule
from recmill.schema import Dataset

Check = Callable[[Config, Dataset], None]
_STEPS = 200  # steps in which a model must overfit one batch
_TOLERANCE = 1e-3  # between metrics with one and two processes, which add in a different order


def build(config: Config, dataset: Dataset, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    network = model_module(config).build(config.model, dataset.description, torch.device("cpu"))
    check_tables_attribute(network)
    return network


def first_batch(config: Config, dataset: Dataset) -> Batch:
    return next(build_source(config, dataset, rank=0, size=1).train_batches(0, 0))


def it_and_its_task_have_the_functions_of_their_protocols(config: Config, dataset: Dataset) -> None:
    """A model module has TASK, KIND, Config, tables() and build(); one for histories also window_rules()."""
    module = model_module(config)
    protocol = SequenceModelModule if module.KIND == "histories" else ModelModule
    expect(isinstance(module, protocol), f"the module lacks a function of {protocol.__name__}")
    expect(isinstance(task_module(config), TaskModule), f"task '{module.TASK}' lacks a function of TaskModule")
    expect(dataset.description.kind == module.KIND, f"KIND is {module.KIND}, the data is {dataset.description.kind}")


def it_declares_the_tables_that_it_builds(config: Config, dataset: Dataset) -> None:
    """tables() lists the tables of the network's attribute `tables`, with the same rows and widths."""
    tables = model_module(config).tables(config.model, dataset.description)
    declared = sorted((table.rows, table.dim) for table in tables)
    state = build(config, dataset).state_dict()
    built = sorted(tuple(value.shape) for key, value in state.items() if key.startswith("tables."))
    expect(
        built == declared,
        f"tables() declares the sizes {declared}, and the network's attribute `tables` has {built}",
    )


def the_output_of_its_tables_is_read_by_name(config: Config, dataset: Dataset) -> None:
    """Vectors are taken by the name of their feature, because sharding may change their order."""
    network, batch = build(config, dataset).eval(), first_batch(config, dataset)
    with torch.no_grad():
        expected = network(*batch.inputs())
        network.tables.register_forward_hook(_reversed)  # type: ignore[union-attr]
        equal = torch.allclose(network(*batch.inputs()), expected, rtol=1e-4, atol=1e-5)
    remedy = "read it by name, as `in_order` of recmill.nn.click_network does"
    expect(equal, f"the score changes with the order of the features in the output of `tables`: {remedy}")


def _reversed(tables: nn.Module, arguments: Any, output: Any) -> Any:
    """Return the output of tables with its features in the opposite order."""
    if isinstance(output, KeyedTensor):
        keys = output.keys()[::-1]
        return KeyedTensor(keys, output.length_per_key()[::-1], torch.cat([output[key] for key in keys], dim=1))
    return dict(reversed(output.items())) if isinstance(output, dict) else output


def the_loss_and_every_gradient_are_finite(config: Config, dataset: Dataset) -> None:
    """Every parameter takes part in the loss, and no value overflows."""
    network, batch = build(config, dataset), first_batch(config, dataset)
    loss = task_module(config).loss_sum(network, batch) / batch.weight()
    loss.backward()
    expect(math.isfinite(loss.item()), f"the loss of the first batch is {loss.item()}")
    for name, parameter in network.named_parameters():
        expect(parameter.grad is not None, f"{name} has no gradient: the loss does not depend on it")
        expect(bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite")  # type: ignore[arg-type]


def it_can_overfit_one_batch(config: Config, dataset: Dataset) -> None:
    """The loss of one batch falls to a tenth in 200 steps of Adam: the network can learn."""
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
    """state_dict() holds everything that the output depends on, so that a run can be resumed."""
    batch = first_batch(config, dataset)
    one, other = build(config, dataset).eval(), build(config, dataset, seed=2).eval()
    other.load_state_dict(one.state_dict())
    equal = torch.equal(one(*batch.inputs()), other(*batch.inputs()))
    expect(equal, "with the same state_dict(), two networks give different outputs: it lacks a part of the state")


def padding_rows_change_no_gradient(config: Config, dataset: Dataset) -> None:
    """The score of a row does not depend on the other rows of its batch, which padding fills up."""
    # A batch of 32 is divided among three processes: the share of 10 rows gets a padding row of weight 0.
    shares = [next(build_source(config, dataset, rank=rank, size=3).train_batches(0, 0)) for rank in range(3)]
    batch = first_batch(config, dataset)
    expect(
        sum(share.weight() for share in shares) == batch.weight(),
        "the weights of the shares of a batch do not add up to the weight of the batch",
    )
    one, other = build(config, dataset).eval(), build(config, dataset).eval()
    task = task_module(config)
    task.loss_sum(one, batch).backward()
    for share in shares:
        task.loss_sum(other, share).backward()
    for (name, mine), (_, its) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        equal = torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
        expect(equal, f"the gradient of {name} changes if the batch is divided: does a row depend on other rows?")


def random_numbers_of_torch_do_not_change_the_loss(config: Config, dataset: Dataset) -> None:
    """Dropout is that of recmill.nn.dropout: torch's own draws other numbers in each process."""
    network, batch = build(config, dataset), first_batch(config, dataset)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(task_module(config).loss_sum(network, batch).item())
    kind = nn.modules.dropout._DropoutNd
    found = [f"`{name}` is torch.nn.{type(m).__name__}" for name, m in network.named_modules() if isinstance(m, kind)]
    fact = ", ".join(found) or "the loss of a batch changes with torch.manual_seed"
    expect(math.isclose(*losses, rel_tol=1e-5), f"{fact}: use RowDropout of recmill.nn.dropout")


def two_processes_and_evaluate_give_the_metrics_of_one_process(config: Config, dataset: Dataset) -> None:
    """The number of processes does not change what is learned, and `evaluate` repeats the test."""
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
                shown = f"{other:.5g}" if isinstance(other, float) else other
                expect(close, f"{name} is {value:.5g} after training with one process, and {shown} with {what}")


ON_ONE_DEVICE: tuple[Check, ...] = (
    it_and_its_task_have_the_functions_of_their_protocols,
    it_declares_the_tables_that_it_builds,
    the_output_of_its_tables_is_read_by_name,
    the_loss_and_every_gradient_are_finite,
    it_can_overfit_one_batch,
    its_state_can_be_saved_and_loaded,
    padding_rows_change_no_gradient,
    random_numbers_of_torch_do_not_change_the_loss,
)
CHECKS = (*ON_ONE_DEVICE, two_processes_and_evaluate_give_the_metrics_of_one_process)
