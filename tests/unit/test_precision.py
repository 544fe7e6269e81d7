"""Mixed precision. On CPU autocast works, slowly: what decides that it is off is what these tests replace."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recmill.batch import CtrBatch, RankingBatch, SequenceBatch
from recmill.checkpoints.format import Position
from recmill.commands.assemble import build_sharded, build_source, model_module, task_module
from recmill.commands.train import work
from recmill.config import load_config
from recmill.errors import UserError
from recmill.schema import open_dataset
from recmill.tables.first_values import fill_tables
from recmill.tables.torchrec_internals import table_shards
from recmill.training import precision
from recmill.training.optim import build_optimizer
from recmill.training.precision import LossScale
from recmill.training.step import Step
from recmill.world import World, joined_world

Config = dict[str, Any]
ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def losses_here(config: Config, run: Path, **train: Any) -> list[float]:
    """Trained in this process, where parts can be replaced."""
    values = config | {"train": config["train"] | train}
    run.mkdir(exist_ok=True)
    with joined_world("cpu") as world:
        work(world, load_config(values).as_dict(), str(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def scale_after(run: Path, step: int) -> float:
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    return state["position"]["loss_scale"]


@pytest.fixture
def slow_but_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_why_off", lambda precision, device: None)


@pytest.mark.parametrize(("name", "feature"), [("bfloat16", "amx_bf16"), ("float16", "avx512_fp16")])
def test_the_cpu_is_asked_and_a_slow_one_trains_in_float32_and_says_why(
    name: str,
    feature: str,
    dlrm: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "recmill")
    expected = losses_here(dlrm, tmp_path / "plain", max_steps=2)
    features: dict[str, Any] = {"cpu_name": "Old Faithful", "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(features))
    assert losses_here(dlrm, tmp_path / "slow", max_steps=2, precision=name, tf32=True) == expected
    text = caplog.text
    caplog.clear()
    assert f"train.precision = '{name}' is off, training in float32: this CPU (Old Faithful) has none of" in text
    assert feature in text
    assert "train.tf32 is off: GPUs alone have it" in text
    features[feature] = True
    found = losses_here(dlrm, tmp_path / "fast", max_steps=2, precision=name)
    assert found != expected
    assert "is off" not in caplog.text


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "projection", "bert4rec"])
def test_every_model_learns_in_mixed_precision_nearly_what_float32_learns(
    model: str, name: str, slow_but_on: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """bfloat16 has 8 significant bits, float16 11."""
    config = request.getfixturevalue(model)
    expected = losses_here(config, tmp_path / "float32", max_steps=6)
    found = losses_here(config, tmp_path / name, max_steps=6, precision=name)
    assert found != expected
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
        self.step = Step(self.model, self.optimizer, task_module(config), config.settings, world, Position())
        self.batches: Iterator[Any] = build_source(config, dataset, world.rank, world.size).train_batches(0, 0)

    def train(self, factor: float = 1 / 125) -> None:
        self.step(next(self.batches), factor)

    def state(self) -> list[Tensor]:
        """Dense weights, this process's pieces of tables, and the state of all optimizers."""
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
    tables: dict[str, str], dlrm: Config, slow_but_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where nothing overflows: what is scaled must be unscaled, before clipping, in tables as well."""
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
    tables: dict[str, str], model: str, slow_but_on: None, request: pytest.FixtureRequest
) -> None:
    """The first one (nothing was ever updated) and a later one; the steps after them are as if they had not been."""
    config = request.getfixturevalue(model)
    config |= {"sharding": {"mode": tables["mode"]}, "optim": {"tables": {"name": tables["name"]}}}
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
        assert trainer.step.noted(Position()).loss_scale == 2.0**14


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
    resumed = LossScale(nn.Linear(1, 1), 0.0, scale.noted(Position()))
    for _ in range(500):
        assert resumed.finish_backward(weight_with(1.0), ALONE)
    assert resumed.value == 131072.0 / 4
    assert resumed.noted(Position(step=7)) == Position(step=7, loss_scale=32768.0, steps_at_scale=0)


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


def test_a_float16_run_resumed_between_overflows_equals_an_unbroken_one(
    dlrm: Config, slow_but_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved after every step, also after those that were left out."""
    dlrm["checkpoint"] = {"every_steps": 1, "keep": 20}
    monkeypatch.setattr(precision, "_FIRST_SCALE", 2.0**24)
    caplog.set_level(logging.INFO, "recmill")
    unbroken = losses_here(dlrm, tmp_path / "unbroken", precision="float16")
    scales = [scale_after(tmp_path / "unbroken", step) for step in range(1, 14)]
    assert scales[:3] == [2.0**23, 2.0**22, 2.0**21]  # left out, three times at least
    assert scales[8] == scales[9] == scales[10]  # but no longer
    assert caplog.text.count("overflowed: step left out, loss scale now") == 24 - math.log2(scales[-1])
    losses_here(dlrm, tmp_path / "broken", precision="float16", max_steps=2)
    monkeypatch.setattr(precision, "_FIRST_SCALE", 1.0)
    assert losses_here(dlrm, tmp_path / "broken", precision="float16") == unbroken
    assert scale_after(tmp_path / "broken", 13) == scales[-1]


def test_batches_move_with_all_their_fields_and_stay_as_they_are_on_cpu(dlrm: Config, bert4rec: Config) -> None:
    batches: list[CtrBatch | SequenceBatch] = []
    for values in (dlrm, bert4rec):
        config = load_config(values)
        source = build_source(config, open_dataset(config.settings.data.path), 0, 1)
        batches += [next(source.train_batches(0, 0)), next(source.eval_batches("val"))]
    assert [type(batch) for batch in batches] == [CtrBatch, CtrBatch, SequenceBatch, RankingBatch]
    for batch in batches:
        assert batch.to(torch.device("cpu"), non_blocking=True) is batch
        moved = batch.to(torch.device("meta"), non_blocking=True)
        assert type(moved) is type(batch)
        assert {getattr(moved, name).device.type if name != "sparse" else "meta" for name in vars(batch)} == {"meta"}
        if isinstance(moved, CtrBatch):
            assert moved.sparse.values().device.type == moved.sparse.lengths().device.type == "meta"


def test_tf32_is_set_as_the_config_says(dlrm: Config) -> None:
    with joined_world("cpu") as world:
        for wanted in (True, False):
            Trainer(dlrm, world, tf32=wanted)
            assert torch.backends.cuda.matmul.allow_tf32 is wanted
