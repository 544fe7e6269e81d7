"""The steps of a GPU, taken on CPU: TorchRec's pipeline runs there too, and must be the plain loop's equal."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from recmill import train
from recmill.checkpoints.format import Position
from recmill.errors import Interrupted
from recmill.training import loop
from recmill.training.meter import Meter
from recmill.training.precision import LossScale
from recmill.world import joined_world

from ..group import in_group
from ..mixed_precision import MixedPrecision
from .runs import assert_same_run, losses

Config = dict[str, Any]


def take_steps(config: Config, run: Path, is_overlapped: bool, stop_at: int) -> None:
    """In each rank. `stop_at`: Ctrl-C reaches the last one alone, in that step."""
    sent_ahead, taken = [], []
    pipelined, add = PipelinedForward.__call__, Meter.add
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def counted(self: Any, *ids: Any) -> Any:
        sent_ahead.append(self.name)
        return pipelined(self, *ids)

    def interrupted(self: Any, *values: Any) -> None:
        add(self, *values)
        taken.append(values)
        if len(taken) == stop_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGINT)

    PipelinedForward.__call__ = counted
    Meter.add = interrupted  # type: ignore[method-assign, assignment]
    if is_overlapped:
        loop.can_overlap = lambda model, device: True
        loop._sums_ahead = lambda device: 1
    with contextlib.suppress(Interrupted):
        train(config, run)
    run.with_name(f"{run.name}-{rank}.json").write_text(json.dumps(sent_ahead), encoding="utf-8")


def train_with(
    config: Config, folder: Path, procs: int, stop_at: int = 0, group: Callable[..., Any] = in_group, **ways: str
) -> dict[str, list[int]]:
    """By run, how often each rank's tables took a batch whose ids had been sent ahead."""
    for run, way in ways.items():
        group(procs, take_steps, config, folder / run, way == "overlapped", stop_at)
    ranks = range(procs)
    return {run: [len(json.loads((folder / f"{run}-{rank}.json").read_text())) for rank in ranks] for run in ways}


@pytest.mark.parametrize("procs", [1, 2])
def test_overlapped_steps_equal_plain_ones(procs: int, dlrm: Config, tmp_path: Path) -> None:
    """13 steps, validated after 5, 10 and 13; the last batch has one row; rates change; dense gradients are clipped."""
    dlrm["sharding"] = {"tables": {"C1": "data_parallel", "C3": "row_wise"}}
    dlrm["optim"] = {
        "dense": {"name": "sgd", "lr": 0.2, "clip_grad_norm": 0.1},
        "schedule": {"name": "oneflow", "warmup_steps": 3, "decay_start_step": 5, "decay_steps": 10},
    }
    found = train_with(dlrm, tmp_path, procs, a="plain", b="overlapped")
    assert found == {"a": [0] * procs, "b": [13] * procs}
    assert len(losses(tmp_path / "a")) == 13
    assert_same_run(tmp_path / "b", tmp_path / "a")


def test_overlapped_float16_steps_equal_plain_ones(dlrm: Config, tmp_path: Path, mixed: MixedPrecision) -> None:
    """Or float32 ones, on a CPU that cannot multiply float16 at all."""
    dlrm["train"] |= {"precision": "float16", "max_steps": 6}
    assert train_with(dlrm, tmp_path, 2, group=mixed.group("float16"), a="plain", b="overlapped") == {
        "a": [0, 0],
        "b": [6, 6],
    }
    assert_same_run(tmp_path / "b", tmp_path / "a")
    assert ("is off" in (tmp_path / "a" / "log.txt").read_text()) is not mixed.works("float16")


def test_an_overlapped_run_stops_in_between_and_is_continued_as_if_never_stopped(dlrm: Config, tmp_path: Path) -> None:
    """Stopped in step 3, it takes one more. Two batches are under way then: one process takes them plainly."""
    assert train_with(dlrm, tmp_path, 2, stop_at=3, run="overlapped") == {"run": [4, 4]}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    train_with(dlrm, tmp_path, 1, run="plain", unbroken="plain")
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


def agree() -> Any:
    found: list[Any] = []
    with joined_world("cpu") as world:
        scale = LossScale(nn.Linear(1, 1), 0.0, Position())
        weight = nn.Parameter(torch.zeros(1))
        for bad_rank in (None, 0, 1):
            weight.grad = torch.tensor([torch.inf if world.rank == bad_rank else 3.0])
            found.append((scale.finish_backward([weight], world), scale.value))
        return world.gather(found)


def test_an_overflow_on_one_rank_is_an_overflow_on_all() -> None:
    expected = [(True, 65536.0), (False, 32768.0), (False, 16384.0)]
    assert in_group(2, agree) == [expected, expected]
