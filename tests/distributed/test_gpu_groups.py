"""Two processes that take each other for GPUs: their group has a backend for CUDA, and their shards say 'cuda:N'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recmill
from recmill.checkpoints import loading, saver
from recmill.commands.checkpoint import list_checkpoints
from recmill.tables.torchrec_internals import is_sharded

from ..group import evaluate, in_group, train
from .runs import close_to, losses

Config = dict[str, Any]


def train_as_on_gpus(config: Config, run: Path, **options: Any) -> None:
    """Train in one rank. gloo stands for NCCL; all tensors are on the CPU, whatever the placements say."""
    state_of = loading.state_of

    def placed_on_gpus(model: Any, optimizer: Any) -> dict[str, Tensor]:
        state = state_of(model, optimizer)
        for value in (value for value in state.values() if is_sharded(value)):
            local = [shard.metadata for shard in value.local_shards()]  # type: ignore[attr-defined]
            for shard in [*local, *value.metadata().shards_metadata]:  # type: ignore[attr-defined]
                shard.placement._device = torch.device("cuda", shard.placement.rank())
        return state

    loading.state_of = saver.state_of = placed_on_gpus
    recmill.train(config, run, **options)


def test_a_run_is_saved_and_resumed_with_shards_on_gpus(
    dlrm: Config, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Full and incremental checkpoints, first copied and written in the background, then written while training waits.

    The reference runs in an ordinary group, with ordinary placements, and is never stopped.
    """
    dlrm["sharding"] = {"tables": {"C1": "data_parallel", "C3": "row_wise", "C4": "column_wise"}}
    dlrm["optim"] = {"tables": {"name": "adagrad"}}
    dlrm["checkpoint"] = {"every_steps": 2, "full_every": 2, "keep": 9}
    train(dlrm, tmp_path / "reference", procs=2, overrides=["train.max_steps=9"])
    request.getfixturevalue("two_backends")
    in_group(2, train_as_on_gpus, dlrm, tmp_path / "run", overrides=["train.max_steps=5"])
    second = ["train.max_steps=9", "checkpoint.background=false"]
    in_group(2, train_as_on_gpus, dlrm, tmp_path / "run", overrides=second)
    found = {facts["step"]: (facts["kind"], facts["health"]) for facts in list_checkpoints(tmp_path / "run")}
    full, changes = ("full", "complete"), "changes since step {}"
    assert found == {
        2: full,
        4: (changes.format(2), "complete"),
        5: full,
        6: full,
        8: (changes.format(6), "complete"),
        9: full,
    }
    assert losses(tmp_path / "run") == losses(tmp_path / "reference")


def test_a_run_with_fused_adam_is_evaluated_on_a_cpu(dlrm: Config, tmp_path: Path) -> None:
    """Tables that CPUs trained as replicas stand for those of GPUs: their checkpoints are the same."""
    dlrm["optim"] = {"tables": {"name": "adam"}}
    run = tmp_path / "run"
    trained = train(dlrm, run, overrides=["train.max_steps=3", "sharding.mode=ddp"])
    text = (run / "config.toml").read_text(encoding="utf-8")
    for old, new in (('mode = "ddp"', ""), ('device = "cpu"', 'device = "auto"')):
        assert old in text
        text = text.replace(old, new)
    (run / "config.toml").write_text(text, encoding="utf-8")
    assert evaluate(run, split="val") == close_to(trained["val"], rel=1e-6)
