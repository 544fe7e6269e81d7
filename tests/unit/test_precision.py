"""Mixed precision. Products in bfloat16 and float16 run in child processes, though they may be slow on this CPU."""

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recmill.checkpoints.format import Position
from recmill.commands.assemble import build_sharded, build_source, model_module, task_module
from recmill.commands.train import work
from recmill.config import load_config
from recmill.config.sections import TrainSection
from recmill.data.opening import open_dataset
from recmill.errors import UserError
from recmill.hardware.precision import Dtype, Finding
from recmill.launch.signals import StopRequest
from recmill.launch.watchdog import Heartbeat
from recmill.protocols import Batch
from recmill.tables.first_values import fill_tables
from recmill.tables.torchrec_internals import table_shards
from recmill.training import precision
from recmill.training.optim import build_optimizer
from recmill.training.parts import Parts
from recmill.training.precision import LossScale, usable_dtype
from recmill.training.step import Step
from recmill.world import World, joined_world

from ..group import in_group
from ..mixed_precision import MixedPrecision

Config = dict[str, Any]
ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def losses_here(config: Config, run: Path, **train: Any) -> list[float]:
    """Trained in this process, where parts can be replaced."""
    values = config | {"train": config["train"] | train}
    run.mkdir(exist_ok=True)
    with joined_world("cpu") as world:
        work(world, load_config(values).as_dict(), {"run": str(run)}, StopRequest())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def scale_after(run: Path, step: int) -> float:
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    return state["position"]["loss_scale"]


FASTER = Finding("bfloat16", 1.84)
SLOWER = Finding("bfloat16", 0.6)
NEEDS_LESS = Finding("bfloat16", 1.5, "AVX512_CORE_BF16", "is killed by SIGILL")
BROKEN = Finding("bfloat16", problem="fails (could not create a primitive)")


@pytest.mark.parametrize(
    ("finding", "setting", "dtype", "line"),
    [
        (FASTER, "", torch.bfloat16, "train.precision = 'bfloat16': measured 1.84 times float32's speed on this CPU"),
        (SLOWER, "", torch.float32, "is off, training in float32: measured 0.60 of float32's speed on this CPU"),
        (
            NEEDS_LESS,
            "AVX512_CORE_BF16",
            torch.bfloat16,
            "'bfloat16': measured 1.50 times float32's speed on this CPU with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, "
            "without which a product is killed by SIGILL",
        ),
        (NEEDS_LESS, "", torch.float32, "is off, training in .* To use it: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (BROKEN, "", torch.float32, r"is off, training in float32: a product fails \(could not create a primitive\)"),
    ],
)
def test_what_was_measured_decides_and_one_line_says_so(
    finding: Finding,
    setting: str,
    dtype: torch.dtype,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(precision, "probe", lambda dtype, threads: finding)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", setting)
    with caplog.at_level(logging.INFO, "recmill"):
        assert usable_dtype(TrainSection(precision="bfloat16"), ALONE) == dtype
    (record,) = caplog.records
    assert re.search(line, record.message)


def test_float32_is_not_probed_and_tf32_is_for_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "probe", None)
    with caplog.at_level(logging.INFO, "recmill"):
        assert usable_dtype(TrainSection(tf32=True), ALONE) == torch.float32
    assert caplog.messages == ["train.tf32 is off: only GPUs have it"]


def dtypes_if_one_rank_cannot(off: int) -> list[str] | None:
    precision._verdict = lambda precision, world: (world.rank != off, f"says rank {world.rank}")
    with joined_world("cpu") as world:
        return world.gather(str(usable_dtype(TrainSection(precision="bfloat16"), world)))


@pytest.mark.parametrize(("off", "dtype"), [(0, "torch.float32"), (1, "torch.float32"), (2, "torch.bfloat16")])
def test_all_ranks_use_the_same_dtype(off: int, dtype: str) -> None:
    assert in_group(2, dtypes_if_one_rank_cannot, off) == [dtype, dtype]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "projection", "bert4rec"])
def test_every_model_learns_in_mixed_precision_nearly_what_float32_learns(
    model: str, name: Dtype, mixed: MixedPrecision, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """bfloat16 has 8 significant bits, float16 11. A CPU that cannot multiply them trains in float32."""
    config = request.getfixturevalue(model)
    expected = losses_here(config, tmp_path / "float32", max_steps=6)
    found = mixed.run(name, losses_here, config, tmp_path / name, max_steps=6, precision=name)
    assert (found == expected) is (mixed.dtype(name) == torch.float32)
    assert found == pytest.approx(expected, rel={"bfloat16": 2e-3, "float16": 2e-4}[name])


class Trainer:
    """A sharded model in this process, its step and its batches."""

    def __init__(self, values: Config, world: World, **train: Any) -> None:
        config = load_config(values | {"train": values["train"] | train})
        dataset = open_dataset(config.settings.data.path)
        self.model = build_sharded(config, dataset, world)
        self.optimizer = build_optimizer(self.model, config.settings.optim)
        tables = model_module(config).tables(config.model, dataset.description)
        fill_tables(self.model, tables, config.settings.train.seed)
        source = build_source(config, dataset, world.rank, world.size)
        parts = Parts(self.model, task_module(config), source, world, prefetch=0, heartbeat=Heartbeat())
        self.step = Step(parts, self.optimizer, config.settings.train, config.settings.optim.dense, Position())
        self.batches: Iterator[Batch] = source.train_batches(0, 0)

    def train(self, factor: float = 1 / 125) -> None:
        self.step(next(self.batches), factor)

    def state(self) -> list[Tensor]:
        """Return dense weights, this process's shards of tables, and the state of all optimizers."""
        found = list(self.model.parameters()) + [shard.values for _, shard in table_shards(self.model)]
        for _, part in self.optimizer.optimizers:
            for values in part.state.values():
                for value in values.values():
                    shards = value.local_shards() if hasattr(value, "local_shards") else None
                    found += [shard.tensor for shard in shards] if shards is not None else [value]
        return [torch.as_tensor(value).detach().clone() for value in found]


TABLES = [
    {"name": "rowwise_adagrad", "mode": "auto"},
    {"name": "sgd", "mode": "auto"},
    {"name": "adam", "mode": "ddp"},
]


@pytest.mark.parametrize("tables", TABLES, ids=lambda tables: tables["name"])
def test_scaling_by_a_power_of_two_changes_no_bit(
    tables: dict[str, str], dlrm: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where nothing overflows: what is scaled must be unscaled, before clipping, in tables as well."""
    monkeypatch.setattr(precision, "_verdict", lambda precision, world: (True, ""))
    dlrm |= {"sharding": {"mode": tables["mode"]}}
    dlrm |= {"optim": {"tables": {"name": tables["name"]}, "dense": {"name": "sgd", "lr": 0.5, "clip_grad_norm": 0.05}}}
    with joined_world("cpu") as world:
        plain, scaled = Trainer(dlrm, world), Trainer(dlrm, world, precision="float16", loss_scale=1024.0)
        scaled.step._dtype = torch.float32
        before = plain.state()
        for _ in range(3):
            plain.train()
            scaled.train()
        assert any(not torch.equal(a, b) for a, b in zip(before, plain.state(), strict=False))
        for ours, theirs in zip(plain.state(), scaled.state(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("model", ["dlrm", "bert4rec"])
@pytest.mark.parametrize("tables", TABLES, ids=lambda tables: tables["name"])
def test_a_step_whose_gradients_overflow_changes_nothing_at_all(
    tables: dict[str, str], model: str, mixed: MixedPrecision, request: pytest.FixtureRequest
) -> None:
    """The first one (nothing was ever updated) and a later one; the steps after them are as if they had not been."""
    config = request.getfixturevalue(model)
    config |= {"sharding": {"mode": tables["mode"]}, "optim": {"tables": {"name": tables["name"]}}}
    mixed.run("float16", overflow if mixed.works("float16") else check_nothing_is_scaled, config)


def check_nothing_is_scaled(config: Config) -> None:
    with joined_world("cpu") as world:
        trainer = Trainer(config, world, precision="float16")
        trainer.train()
        assert trainer.step.recorded_in(Position()) == Position()


def overflow(config: Config) -> None:
    with joined_world("cpu") as world:
        trainer = Trainer(config, world, precision="float16")
        undisturbed = Trainer(config, world, precision="float16")
        batches = [next(trainer.batches) for _ in range(2)]
        undisturbed.batches, trainer.batches = iter(batches), iter([batches[0], *batches, batches[0]])
        start = trainer.state()
        trainer.train(factor=1e30)
        for before, after in zip(start, trainer.state(), strict=True):
            assert torch.equal(before, after)
        trainer.train()
        trainer.train()
        undisturbed.step._scale.value /= 2  # type: ignore[union-attr]
        undisturbed.train()
        undisturbed.train()
        last = trainer.state()
        for ours, theirs in zip(last, undisturbed.state(), strict=True):
            assert torch.equal(ours, theirs)
        trainer.train(factor=1e30)
        for before, after in zip(last, trainer.state(), strict=True):
            assert torch.equal(before, after)
        assert trainer.step.recorded_in(Position()).loss_scale == 2.0**14


def weight_with(gradient: float) -> list[nn.Parameter]:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, gradient])
    return [weight]


def test_a_dynamic_scale_doubles_after_2000_good_steps_and_halves_after_a_bad_one() -> None:
    scale = LossScale(nn.Linear(1, 1), 0.0, Position())
    for _ in range(1999):
        assert scale.finish_backward(weight_with(1.0), ALONE)
    assert scale.value == 65536.0
    assert scale.finish_backward(weight_with(1.0), ALONE)
    assert scale.value == 131072.0
    for bad in (torch.inf, -torch.inf, torch.nan):
        assert not scale.finish_backward(weight_with(bad), ALONE)
    assert scale.value == 131072.0 / 8
    for _ in range(1500):
        assert scale.finish_backward(weight_with(1.0), ALONE)
    resumed = LossScale(nn.Linear(1, 1), 0.0, scale.recorded_in(Position()))
    for _ in range(500):
        assert resumed.finish_backward(weight_with(1.0), ALONE)
    assert resumed.value == 131072.0 / 4
    assert resumed.recorded_in(Position(step=7)) == Position(step=7, loss_scale=32768.0, steps_at_scale=0)


def test_a_static_scale_stays_and_an_overflow_with_it_is_an_error() -> None:
    scale = LossScale(nn.Linear(1, 1), 100.0, Position(loss_scale=3.0))
    (weight,) = weight_with(50.0)
    for _ in range(2001):
        weight.grad = torch.tensor([50.0, 1.0])
        scale.finish_backward([weight], ALONE)
    assert scale.value == 100.0
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.5, 0.01])
    with pytest.raises(UserError, match=r"overflowed on 1 of 1 rank\(s\) with train.loss_scale = 100\. .* or 0"):
        scale.finish_backward(weight_with(torch.inf), ALONE)


def losses_from_scale(first_scale: float, config: Config, run: Path, **train: Any) -> list[float]:
    precision._FIRST_SCALE = first_scale
    return losses_here(config, run, **train)


def test_a_float16_run_resumed_between_overflows_equals_an_unbroken_one(
    dlrm: Config, mixed: MixedPrecision, tmp_path: Path
) -> None:
    """Saved after every step, also after skipped ones."""
    dlrm["checkpoint"] = {"every_steps": 1, "keep": 20}
    dlrm["train"] |= {"precision": "float16"}
    unbroken = mixed.run("float16", losses_from_scale, 2.0**24, dlrm, tmp_path / "unbroken")
    mixed.run("float16", losses_from_scale, 2.0**24, dlrm, tmp_path / "broken", max_steps=2)
    assert mixed.run("float16", losses_from_scale, 1.0, dlrm, tmp_path / "broken") == unbroken
    scales = [scale_after(tmp_path / "unbroken", step) for step in range(1, 14)]
    if not mixed.works("float16"):
        assert set(scales) == {0.0}
        assert unbroken == losses_here(dlrm, tmp_path / "float32", precision="float32")
        return
    assert scales[:3] == [2.0**23, 2.0**22, 2.0**21]  # skipped, three times at least
    assert scales[8] == scales[9] == scales[10]  # but no longer
    log = (tmp_path / "unbroken" / "log.txt").read_text(encoding="utf-8")
    assert log.count("overflowed: step skipped, loss scale now") == 24 - math.log2(scales[-1])
    assert scale_after(tmp_path / "broken", 13) == scales[-1]


def test_tf32_is_set_as_the_config_says(dlrm: Config, tmp_path: Path) -> None:
    for wanted in (True, False):
        losses_here(dlrm, tmp_path / str(wanted), tf32=wanted, max_steps=1)
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
