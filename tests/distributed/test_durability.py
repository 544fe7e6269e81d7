"""Incremental and corrupt checkpoints, full disks and new runs from old ones, with real runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from recmill.commands.checkpoint import inspect_checkpoint, list_checkpoints
from recmill.errors import CheckpointError, ConfigError

from ..checkpoints import flip_a_bit, newest, tensors_of
from ..conftest import RunCli
from ..group import evaluate, train
from .runs import assert_same_run, metric_lines

Config = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def sharded(dlrm: Config) -> Config:
    """Every kind of table, and a large one of which few rows are used."""
    kinds = {"C1": "data_parallel", "C2": "column_wise", "C3": "row_wise", "C4": "table_wise"}
    optim = {"dense": {"name": "adam"}, "tables": {"name": "adagrad"}}
    return dlrm | {"sharding": {"tables": kinds}, "optim": optim, "eval": {"every_steps": 100}}


def test_changes_since_a_full_checkpoint_are_the_same_state_bit_for_bit(sharded: Config, tmp_path: Path) -> None:
    """Saved by 2 processes after 2, 4 and 6 steps; full, changes, changes."""
    train(sharded, tmp_path / "full", procs=2, overrides=["train.max_steps=6", "checkpoint.every_steps=2"])
    sharded["checkpoint"] = {"every_steps": 2, "full_every": 3}
    train(sharded, tmp_path / "run", procs=2, overrides=["train.max_steps=6"])
    assert [facts.get("kind") for facts in list_checkpoints(tmp_path / "run")] == [
        "full",
        "changes since step 2",
        "changes since step 2",
    ]
    expected, found = tensors_of(newest(tmp_path / "full")), tensors_of(newest(tmp_path / "run"))
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    sizes = [list_checkpoints(tmp_path / run)[-1]["bytes"] for run in ("run", "full")]
    assert sizes[0] < 0.8 * sizes[1]
    sharded["sharding"] = {}  # resumes with other processes and another sharding
    keys = ["train.max_steps=9", "checkpoint.every_steps=100"]
    train(sharded, tmp_path / "run", procs=1, overrides=keys)
    train(sharded, tmp_path / "unbroken", procs=1, overrides=keys)
    ends = [[line for line in metric_lines(tmp_path / run) if line["step"] == 9] for run in ("run", "unbroken")]
    assert ends[0][0]["loss"] == pytest.approx(ends[1][0]["loss"], rel=2e-5)
    assert ends[0][-1]["auroc"] == pytest.approx(ends[1][-1]["auroc"], rel=2e-5)


def test_rows_of_8_bits_are_within_half_a_step_of_the_exact_ones(dlrm: Config, tmp_path: Path) -> None:
    keys = ["train.max_steps=4", "checkpoint.every_steps=2", "eval.every_steps=100"]
    train(dlrm, tmp_path / "exact", overrides=[*keys, "checkpoint.full_every=2"])
    train(dlrm, tmp_path / "near", overrides=[*keys, "checkpoint.full_every=2", "checkpoint.row_bits=8"])
    exact, near = newest(tmp_path / "exact"), newest(tmp_path / "near")
    assert exact.base
    sizes = [list_checkpoints(tmp_path / run)[-1]["bytes"] for run in ("near", "exact")]
    assert sizes[0] < sizes[1]
    expected, found = tensors_of(exact), tensors_of(near)
    table = "model.tables.embedding_bags.table_C4.weight"
    step = (expected[table].amax(1) - expected[table].amin(1)) / 255
    error = (expected[table] - found[table]).abs().amax(1)
    assert error.max() > 0
    assert bool((error <= 0.51 * step + 1e-7).all())
    states = [key for key in expected if not key.startswith("model.tables.")]
    assert all(torch.equal(expected[key], found[key]) for key in states)  # of these every bit is kept
    with pytest.raises(ConfigError, match=r"checkpoint.row_bits = 8 without checkpoint.full_every does nothing"):
        train(dlrm, tmp_path / "x", overrides=["checkpoint.row_bits=8"])


def test_a_corrupt_checkpoint_is_refused_listed_and_skipped_with_fallback(
    dlrm: Config, run_cli: RunCli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    dlrm["checkpoint"] = {"every_steps": 4, "keep": 3}
    dlrm["eval"]["every_steps"] = 100
    train(dlrm, run, overrides=["train.max_steps=8"])
    shutil.copytree(run, tmp_path / "unbroken")
    listed = run_cli("checkpoint", "list", run)
    assert re.search(r"4 +0 +4 +full .* complete\n8 +0 +8 +full .* best +complete", listed.stdout)
    facts = inspect_checkpoint(run, step=4)
    assert (facts["position"]["step"], facts["origin"]["world_size"]) == (4, 1)
    tables = {tensor["key"]: tensor["size"] for tensor in facts["tensors"] if tensor["table"] == "table_C4"}
    weight, momentum = "model.tables.embedding_bags.table_C4.weight", "table_C4.momentum1"
    assert (tables.pop(weight), [key.endswith(momentum) for key in tables]) == ([2000, 8], [True])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5. There are: 4, 8"):
        inspect_checkpoint(run, step=5)
    shown = run_cli("checkpoint", "inspect", run).stdout
    assert re.search(r"model.tables.embedding_bags.table_C4.weight +table_C4 +2,000 x 8 +float32 +1 +0.064", shown)
    shard = flip_a_bit(run / "checkpoints" / "step-00000008")
    seen = run_cli("checkpoint", "verify", run)
    assert seen.returncode == 4
    assert re.search(r"8 .* CORRUPT", seen.stdout)
    assert f"{shard}: its content changed since it was saved." in seen.stdout
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm | {"train": dlrm["train"] | {"max_steps": 10}}))
    refused = run_cli("train", "run.toml", "--run", run)
    assert refused.returncode == 4
    assert f"{shard}: its content changed since it was saved. " in refused.stderr
    assert evaluate(run, fallback=True)["rows"] > 0
    resumed = run_cli("train", "run.toml", "--run", run, "--fallback")
    assert resumed.returncode == 0, resumed.stderr
    assert "falling back to" in resumed.stderr
    assert "resuming from step 4" in resumed.stderr
    train(dlrm, tmp_path / "unbroken", overrides=["train.max_steps=10"])
    found = [(facts["step"], facts["health"]) for facts in list_checkpoints(run, digests=True)]
    assert found == [(4, "complete"), (8, "complete"), (10, "complete")]
    loss = [{line["step"]: line.get("loss") for line in metric_lines(r)}[10] for r in (run, tmp_path / "unbroken")]
    assert loss[0] == loss[1]


def test_a_new_run_starts_from_what_fits_of_an_old_one(dlrm: Config, clicks: Path, tmp_path: Path) -> None:
    train(dlrm, tmp_path / "old", overrides=["train.max_steps=6"])
    wider = ["train.max_steps=1", "model.top_mlp=[24]", "train.seed=7"]
    with pytest.raises(CheckpointError, match=r"layer top.0.weight: \[16, \d+\] in the checkpoint, \[24, \d+\] here"):
        train(dlrm, tmp_path / "new", overrides=wider, init_from=tmp_path / "old")
    with pytest.raises(ConfigError, match=r"--allow-partial goes with --init-from"):
        train(dlrm, tmp_path / "new", allow_partial=True)
    options: dict[str, Any] = {"init_from": tmp_path / "old", "allow_partial": True}
    rates = ["optim.dense.lr=1e-30", "optim.tables.lr=1e-30"]  # as good as no step
    train(dlrm, tmp_path / "new", procs=2, overrides=[*wider, *rates], **options)
    log = (tmp_path / "new" / "log.txt").read_text()
    assert "not loaded from" in log
    assert "starting from step 6 of another run" in log
    before, after = (tensors_of(newest(tmp_path / run)) for run in ("old", "new"))
    taken = [key for key in before if torch.equal(before[key], after[key])]
    assert "model.tables.embedding_bags.table_C4.weight" in taken
    assert "model.bottom.0.weight" in taken
    assert "model.top.0.weight" not in taken
    train(dlrm, tmp_path / "new", overrides=[*wider[1:], *rates, "train.max_steps=2"], **options)  # its own, now
    assert "resuming from step 1" in (tmp_path / "new" / "log.txt").read_text()


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=1200k tmpfs "$1" && cd "$1" && {before} \\
    "{python}" -m recmill train ../run.toml --run run
code=$?
for file in run/checkpoints/step-*/MANIFEST.json run/checkpoints/.saving*; do echo "$file"; done
"{python}" -m recmill checkpoint verify run
exit $code
"""


def can_mount() -> bool:
    tried = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True, check=False).returncode == 0
    )


def run_on_a_small_disk(folder: Path, before: str = "") -> "subprocess.CompletedProcess[str]":
    (folder / "small").mkdir()
    script = ON_A_SMALL_DISK.format(python=sys.executable, before=before)
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(folder / "small")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 5, done.stderr
    return done


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
def test_a_read_only_directory_is_reported_before_the_first_step_with_at_start(dlrm: Config, tmp_path: Path) -> None:
    dlrm["checkpoint"]["at_start"] = True
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm))
    begun = "mkdir -p run/checkpoints && echo '{}' > run/status.json &&"  # else it would be somebody's directory
    done = run_on_a_small_disk(tmp_path, before=f"{begun} mount -t tmpfs -o ro tmpfs run/checkpoints &&")
    message = r"/run/checkpoints: a checkpoint could not be written \(Read-only file system\). It needs [\d,]+ bytes, "
    assert re.search(message, done.stderr)
    assert "step 1  loss" not in done.stderr


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_is_reported_with_its_numbers_and_the_earlier_checkpoint_stays(
    on_error: str, dlrm: Config, tmp_path: Path
) -> None:
    """A disk of 1.2 MB, in a mount of the test's own; a checkpoint has 0.26 MB and five of them are to be kept."""
    dlrm["model"]["embedding_dim"] = 24
    dlrm["model"]["bottom_mlp"] = [24]
    dlrm["eval"]["every_steps"] = 100
    dlrm["checkpoint"] = {"every_steps": 1, "keep": 9, "on_error": on_error}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm))
    done = run_on_a_small_disk(tmp_path)
    assert re.search(r"checkpoint could not be written \(.*\). It needs 2\d\d,\d+ bytes, [\d,]+ are free", done.stderr)
    assert "step-00000001/MANIFEST.json" in done.stdout
    assert ".saving-" not in done.stdout
    assert "CORRUPT" not in done.stdout
    assert len(re.findall(r" complete\n", done.stdout)) >= 2
    went_on = "step 13  loss" in done.stderr  # to the end, where it must say that its last state is lost
    assert went_on == (on_error == "continue")
    assert ("Training continues, as checkpoint.on_error says" in done.stderr) == (on_error == "continue")


def test_the_same_run_can_save_by_the_clock_at_the_start_and_with_validations(dlrm: Config, tmp_path: Path) -> None:
    dlrm["checkpoint"] = {"every_steps": 1000, "at_start": True, "each_eval": True, "keep": 30}
    dlrm["eval"]["every_steps"] = 6
    dlrm["train"]["check_replicas_every"] = 5
    train(dlrm, tmp_path / "run")
    assert [facts["step"] for facts in list_checkpoints(tmp_path / "run")] == [0, 6, 12, 13]
    dlrm["checkpoint"] = {"every_steps": 1000, "every_minutes": 1e-9, "keep": 30, "background": False}
    train(dlrm, tmp_path / "clock", procs=2)
    assert [facts["step"] for facts in list_checkpoints(tmp_path / "clock")] == list(range(1, 14))
    assert_same_run(tmp_path / "run", tmp_path / "clock")
