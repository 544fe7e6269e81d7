"""Optimizers and schedules of sharded runs against torch's own, on an unsharded network in one process."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import recmill
from recmill.commands.assemble import build_source, model_module, task_module
from recmill.config import load_config
from recmill.config.sections import DenseOptim
from recmill.data.opening import open_dataset
from recmill.training import optim

from ..checkpoints import newest, tensors_of
from ..group import evaluate, exit_code, train
from .runs import close_to, losses, metric_lines
from .test_world_sizes import give_tables_memory

Config = dict[str, Any]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def reference(values: dict[str, Any], steps: int, dense: Make, tables: Make, *schedule: float) -> list[float]:
    """Losses of plain torch; `schedule`: a factor of both learning rates for each step."""
    config = load_config(values)
    dataset = open_dataset(config.settings.data.path)
    module, task = model_module(config), task_module(config)
    torch.manual_seed(config.settings.train.seed)
    network = module.build(config.model, dataset.description, torch.device("meta"))
    specs = module.tables(config.model, dataset.description)
    give_tables_memory(network, specs, config.settings.train.seed)
    names = {table.name for table in specs}
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in network.named_parameters():
        parts[name.split(".")[-2] in names].append(parameter)
    optimizers = [dense(parts[False]), tables(parts[True])]
    base = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    out = []
    for step, batch in zip(
        range(steps), build_source(config, dataset, rank=0, size=1).train_batches(0, 0), strict=False
    ):
        loss = task.loss_sum(network, batch) / batch.weight()
        network.zero_grad()
        loss.backward()
        if config.settings.optim.dense.clip_grad_norm:
            before = torch.nn.utils.clip_grad_norm_(parts[False], config.settings.optim.dense.clip_grad_norm)
            assert before > config.settings.optim.dense.clip_grad_norm
        for optimizer, rate in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = rate * (schedule[step] if schedule else 1)
            optimizer.step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("name", get_args(DenseOptim.model_fields["name"].annotation))
def test_the_planner_knows_the_state_of_dense_optimizers(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4)
    optimizer = optim._DENSE[name]([weight], lr=0.1)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.dim()]
    assert optim.DENSE_STATE[name] == len(state)


def test_a_schedule_reaches_dense_layers_and_fused_tables(dlrm: dict[str, Any], tmp_path: Path) -> None:
    """Warmup 2, decay from 3 over 4 steps: factors by hand; without them the losses differ."""
    dlrm["optim"] = {
        "dense": {"name": "sgd", "lr": 0.2},
        "tables": {"name": "adagrad", "lr": 0.1},
        "schedule": {"name": "oneflow", "warmup_steps": 2, "decay_start_step": 3, "decay_steps": 4},
    }
    dlrm["train"]["max_steps"] = 8
    factors = [0, 0.5, 1, 1, 0.5625, 0.25, 0.0625, 0]
    train(dlrm, tmp_path / "run", procs=2, overrides=["sharding.default=row_wise", "train.max_steps=4"])
    train(dlrm, tmp_path / "run")  # resumes in one process
    expected = reference(
        dlrm, 8, lambda p: torch.optim.SGD(p, lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8), *factors
    )
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    constant = reference(
        dlrm, 8, lambda p: torch.optim.SGD(p, lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)
    )
    assert losses(tmp_path / "run") != pytest.approx(constant, rel=1e-3)
    lines = [line for line in metric_lines(tmp_path / "run") if line["split"] == "train"]
    assert [line["lr"] for line in lines] == pytest.approx([0.2 * factor for factor in factors])
    assert [line["lr_tables"] for line in lines] == pytest.approx([0.1 * factor for factor in factors])
    assert "samples/s  lr 0.1, tables 0.05" in (tmp_path / "run" / "log.txt").read_text()


class RowwiseAdagrad(torch.optim.Optimizer):
    """One sum of squares per row, of the mean over its columns, written down once more."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter), 1))
            sums += parameter.grad.square().mean(1, keepdim=True)
            parameter -= self.param_groups[0]["lr"] * parameter.grad / (sums.sqrt() + 1e-8)


class SparseAdam(torch.optim.SparseAdam):
    """torch's, of the rows that have a gradient."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad.to_sparse(1)
        super().step()


class Ftrl(torch.optim.Optimizer):
    """OneFlow's FTRL with its defaults, of the rows that have a gradient, written down once more."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rate = self.param_groups[0]["lr"]
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            squares = state.setdefault("squares", torch.full_like(weight, 0.1))
            z = state.setdefault("z", torch.zeros_like(weight))
            more = squares + weight.grad**2
            z += weight.grad - (more.sqrt() - squares.sqrt()) / rate * weight
            has_gradient = weight.grad.any(dim=1)
            weight[has_gradient] = (-z * rate / more.sqrt())[has_gradient]
            state["squares"] = more


OPTIMIZERS: dict[str, tuple[Config, Make, Make]] = {
    "clipped sgd, adagrad": (
        {
            "dense": {"name": "sgd", "lr": 0.5, "weight_decay": 0.1, "clip_grad_norm": 0.03},
            "tables": {"name": "adagrad"},
        },
        lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1, fused=False),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8),
    ),
    "adamw, sgd": (
        {
            "dense": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 0.02},
            "tables": {"name": "sgd", "lr": 1.0},
        },
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=0.02, fused=False),
        lambda p: torch.optim.SGD(p, lr=1.0),
    ),
    "adagrad, rowwise_adagrad": (
        {"dense": {"name": "adagrad", "lr": 0.02}, "tables": {"name": "rowwise_adagrad", "lr": 0.1}},
        lambda p: torch.optim.Adagrad(p, lr=0.02, fused=False),
        lambda p: RowwiseAdagrad(p, lr=0.1),
    ),
    "sgd, adam": (
        {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "adam", "lr": 0.01}},
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: SparseAdam(p, lr=0.01),
    ),
    "sgd, ftrl": (
        {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "ftrl", "lr": 0.05}},
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: Ftrl(p, lr=0.05),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_torch_s_own_also_after_resuming(name: str, dlrm: Config, tmp_path: Path) -> None:
    dlrm["optim"], dense, tables = OPTIMIZERS[name]
    dlrm["train"]["max_steps"] = 7
    dlrm["eval"]["every_steps"] = 100
    train(dlrm, tmp_path / "run", procs=2, overrides=["sharding.default=row_wise", "train.max_steps=4"])
    train(dlrm, tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(reference(dlrm, 7, dense, tables), rel=2e-5)


@pytest.mark.parametrize(
    ("procs", "optimizer", "sections"),
    [
        (2, "rowwise_adagrad", {"sharding": {"default": "row_wise"}}),
        (2, "adagrad", {"sharding": {"default": "column_wise"}}),
        (1, "adagrad", {"tables": {"store": "cached_ssd", "cache_memory_budget_mb": 8}}),
        (1, "adagrad", {"train": {"kernels": "torch"}}),
    ],
)
def test_tables_of_any_width_equal_plain_torch(
    procs: int, optimizer: str, sections: Config, dcnv2: Config, tmp_path: Path
) -> None:
    """10, as in BARS, and 3: FBGEMM asks for multiples of 4, which its CUDA kernels need."""
    dcnv2["model"] |= {"embedding_dim": 10, "bottom_mlp": [10], "embedding_dims": {"C1": 3}}
    dcnv2["train"]["max_steps"] = 5
    dcnv2["optim"] = {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": optimizer, "lr": 0.02}}
    for name, section in sections.items():
        dcnv2[name] = dcnv2.get(name, {}) | section
    make: dict[str, Make] = {
        "rowwise_adagrad": lambda p: RowwiseAdagrad(p, lr=0.02),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=1e-8),
    }
    train(dcnv2, tmp_path / "run", procs=procs)
    expected = reference(dcnv2, 5, lambda p: torch.optim.SGD(p, lr=0.1), make[optimizer])
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    assert {
        value.shape[1]
        for key, value in tensors_of(newest(tmp_path / "run")).items()
        if ".table_" in key and value.dim() == 2
    } <= {10, 3}


REGULARIZED = {"batch_norm": True, "dropout": 0.25, "table_init_std": 0.1}


@pytest.mark.parametrize(
    ("tables", "model"),
    [
        ({"name": "adam", "lr": 0.01}, {}),
        ({"name": "ftrl", "lr": 0.05, "weight_decay": 0.1}, {}),
        ({"name": "adagrad", "lr": 0.05, "l2": 0.1}, REGULARIZED),
    ],
)
def test_a_killed_run_resumes_with_the_same_bits_and_three_processes_have_its_losses(
    tables: Config, model: Config, dlrm: Config, tmp_path: Path
) -> None:
    dlrm["optim"] = {"dense": {"name": "sgd", "lr": 0.1}, "tables": tables}
    dlrm["model"] |= model
    dlrm |= {"checkpoint": {"every_steps": 3}, "eval": dlrm["eval"] | {"every_steps": 100}}
    dlrm["train"]["max_steps"] = 8
    train(dlrm, tmp_path / "unbroken")
    assert exit_code(recmill.train, dlrm, tmp_path / "killed", fail="train.step@step=5:kill") == -signal.SIGKILL
    train(dlrm, tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "unbroken")
    expected, found = (tensors_of(newest(tmp_path / run)) for run in ("unbroken", "killed"))
    assert expected.keys() == found.keys()
    steps = {int(value) for key, value in found.items() if key.endswith(".steps")}
    assert steps == ({8} if tables["name"] == "adam" else set())
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    for procs in (2, 3):
        run = tmp_path / f"{procs}"
        results = train(dlrm, run, procs=procs, overrides=["sharding.default=row_wise"])
        assert losses(run) == pytest.approx(losses(tmp_path / "unbroken"), rel=2e-5)
    if model:  # rows have no neighbours in an evaluation, so that any batch gives the same metrics
        assert any(key.endswith("running_mean") for key in found)
        assert evaluate(run, procs=2) == close_to(results["test"], rel=1e-6)


def test_a_plateau_cuts_both_rates_also_after_a_kill_and_with_two_processes(dlrm: Config, tmp_path: Path) -> None:
    """Rates of 1e-30 change nothing, so only the first validation is an improvement: at step 1, of every step.

    A patience of 2 cuts after the validations of steps 3 and 5; the third cut, at step 7, ends at end_lr.
    """
    dlrm["optim"] = {
        "dense": {"name": "sgd", "lr": 1e-30},
        "tables": {"name": "sgd", "lr": 1e-30},
        "schedule": {"name": "plateau", "patience": 2, "gamma": 0.1, "end_lr": 5e-33},
    }
    dlrm |= {"checkpoint": {"every_steps": 3}, "eval": dlrm["eval"] | {"every_steps": 1}}
    dlrm["train"]["max_steps"] = 9
    assert exit_code(recmill.train, dlrm, tmp_path / "killed", fail="train.step@step=5:kill") == -signal.SIGKILL
    train(dlrm, tmp_path / "killed")
    train(dlrm, tmp_path / "two", procs=2)
    for run in ("killed", "two"):
        lines = [line for line in metric_lines(tmp_path / run) if line["split"] == "train"]
        expected = [1e-30] * 3 + [1e-31] * 2 + [1e-32] * 2 + [5e-33] * 2
        assert [line["lr"] for line in lines] == pytest.approx(expected)
        assert [line["lr_tables"] for line in lines] == pytest.approx(expected)
