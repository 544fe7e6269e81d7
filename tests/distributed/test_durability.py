"""Incremental and corrupt checkpoints, full disks and new runs from old ones, with real runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import recmill
from recmill.checkpoints import format as format_module
from recmill.checkpoints.format import RowChange, file_facts
from recmill.checkpoints.incremental import apply_changes
from recmill.commands.checkpoint import inspect_checkpoint, list_checkpoints
from recmill.commands.compare import compare
from recmill.commands.results import run_report
from recmill.errors import CheckpointError, ConfigError, ResourceError, UserError
from recmill.observe.printed_runs import print_comparison

from ..checkpoints import flip_a_bit, newest, newest_in, save_network, tensors_of
from ..conftest import RunCli
from ..group import evaluate, train
from .runs import assert_same_run, metric_lines

Config = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def sharded(dlrm: Config) -> Config:
    """Every kind of table, and a large one of which few rows are used."""
    kinds = {"C1": "data_parallel", "C2": "column_wise", "C3": "row_wise", "C4": "table_wise"}
    optim = {"dense": {"name": "adam"}, "tables": {"name": "adam"}}
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
    state = run / "checkpoints" / "step-00000008" / "state.json"
    saved = state.read_text()
    state.write_text(re.sub(r'"loss_weight": [0-9]', '"loss_weight": 7', saved))
    assert len(state.read_text()) == len(saved)
    with pytest.raises(CheckpointError, match=r"state.json: its content changed since it was saved"):
        inspect_checkpoint(run)
    state.write_text(saved)
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


def test_a_new_run_starts_from_what_fits_of_an_old_one(
    dlrm: Config, clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert run_report(tmp_path / "new").started_from == f"{tmp_path / 'old'}, step 6", "a resumed run knows it as well"
    with pytest.raises(ConfigError, match=r"old was started without --init-from, so it cannot start from \S+/new"):
        train(dlrm, tmp_path / "old", overrides=["train.max_steps=6"], init_from=tmp_path / "new")
    with pytest.raises(UserError, match="nowhere"):
        train(dlrm, tmp_path / "old", overrides=["train.max_steps=6"], init_from=tmp_path / "nowhere")
    again = [*wider[1:], *rates, "train.max_steps=2"]
    train(dlrm, tmp_path / "new", overrides=again, **options)  # finished: nothing to do
    compared = compare(tmp_path / "old", tmp_path / "new")
    assert not [row for row in compared.environment if row.name.startswith("started_from")]
    print_comparison(compared)
    assert f"   started from {tmp_path / 'old'}, step 6\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def finished(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A finished run with checkpoints of steps 0, 2 and 4; the best is the last."""
    config = {
        "data": {"path": str(clicks), "limit_val_batches": 1, "limit_test_batches": 1},
        "model": {"name": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"device": "cpu", "global_batch_size": 125, "log_every_steps": 1, "kernels": "torch", "max_steps": 4},
        "eval": {"global_batch_size": 300, "every_steps": 100, "before_training": True},
        "checkpoint": {"every_steps": 2, "keep": 3, "at_start": True},
    }
    run = tmp_path_factory.mktemp("finished") / "run"
    train(config, run)
    return config, run


@pytest.fixture
def run(finished: tuple[Config, Path], tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished[1], tmp_path / "run"))


def longer(run: Path, **options: Any) -> Any:
    return train(run / "config.toml", run, overrides=["train.max_steps=5"], **options)


def test_a_copy_named_as_a_later_step_is_listed_and_refused_by_every_command(run: Path, run_cli: RunCli) -> None:
    copy = run / "checkpoints" / "step-90000000"
    shutil.copytree(run / "checkpoints" / "step-00000004", copy)
    listed = run_cli("checkpoint", "verify", run)
    assert listed.returncode == 4
    assert re.search(r"90,000,000 .* copy of step 4 .* COPY\n", listed.stdout)
    message = rf"{copy} holds the checkpoint of step 4 \(its state.json says so\): it is a copy"
    for command in (longer, evaluate):
        with pytest.raises(CheckpointError, match=message):
            command(run)
    assert copy.is_dir()


def test_a_checkpoint_without_its_manifest_is_corrupt_and_never_deleted(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "MANIFEST.json").unlink()
    assert [facts["health"] == "complete" for facts in list_checkpoints(run)] == [True, True, False]
    for command in (longer, evaluate):
        with pytest.raises(CheckpointError, match=r"step-00000004/MANIFEST.json: missing.*--fallback"):
            command(run)
    for step in (0, 2):
        shutil.rmtree(run / "checkpoints" / f"step-0000000{step}")
    for command in (longer, evaluate):
        with pytest.raises(CheckpointError, match=r"step-00000004/MANIFEST.json: missing"):
            command(run)
    assert list((run / "checkpoints" / "step-00000004").glob("*.distcp"))


def test_a_run_whose_saved_checkpoints_are_gone_does_not_start_anew(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert [facts.get("kind") for facts in list_checkpoints(run)] == ["full", "full", "missing"]
    for command in (longer, evaluate, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"step 4 was saved, but the newest in .* is of step 2"):
            command(run)
    shutil.rmtree(run / "checkpoints")
    for reader in (longer, evaluate, list_checkpoints, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"a checkpoint of step 4 was saved, but there is none in"):
            reader(run)
    assert json.loads((run / "status.json").read_text())["step"] == 4


def test_the_checkpoint_of_another_run_is_refused(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("seed = 1\n", "seed = 2\n", 1))
    for command in (longer, evaluate):
        with pytest.raises(CheckpointError, match=r"was made with another config than this run's \(seed 1, "):
            command(run)


def test_a_position_that_cannot_be_is_refused(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000004"
    state, manifest = (json.loads((newest / name).read_text()) for name in ("state.json", "MANIFEST.json"))
    state["position"] |= {"epoch": 1, "batch": 3}
    (newest / "state.json").write_text(json.dumps(state))
    manifest["files"]["state.json"] = file_facts(newest / "state.json")
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    message = r"state.json: step 4 is not at batch 3 of epoch 1, as an epoch has 13 batches"
    with pytest.raises(CheckpointError, match=message):
        longer(run)


def test_checkpoints_of_another_user_are_not_taken_for_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not bind root, as whom tests may run."""
    real = {name: getattr(os, name) for name in ("listdir", "scandir")}

    def denied(name: str, path: Any = ".") -> Any:
        if str(path) == str(run / "checkpoints"):
            raise PermissionError(13, "Permission denied", str(path))
        return real[name](path)

    for name in real:
        monkeypatch.setattr(os, name, partial(denied, name))
    for command in (recmill.evaluate, list_checkpoints, partial(recmill.train, run / "config.toml")):
        with pytest.raises(ResourceError, match=rf"{run / 'checkpoints'}: Permission denied"):
            command(run)


def test_a_checkpoint_that_is_pruned_while_it_is_verified_is_not_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks; with them it is pruned later: tests/unit/test_checkpoint_format.py."""
    first = run / "checkpoints" / "step-00000000"
    real = format_module.digest

    def prune_first(*arguments: Any) -> str:
        shutil.rmtree(first, ignore_errors=True)
        return real(*arguments) if arguments[0].exists() else ""

    monkeypatch.setattr(format_module, "digest", prune_first)
    found = [(facts["step"], facts["health"]) for facts in list_checkpoints(run, digests=True)]
    assert found == [(2, "complete"), (4, "complete")]


def test_a_run_that_resumes_where_it_ended_repeats_no_line_of_metrics(run: Path) -> None:
    before = [(line["step"], line["split"]) for line in metric_lines(run)]
    assert before == [(0, "val"), *((step, "train") for step in (1, 2, 3, 4)), (4, "val"), (4, "test")]
    (run / "results.json").unlink()
    train(run / "config.toml", run)
    assert [(line["step"], line["split"]) for line in metric_lines(run)] == before
    for step in (2, 4):
        shutil.rmtree(run / "checkpoints" / f"step-0000000{step}")
    train(run / "config.toml", run, overrides=["train.max_steps=2"], fallback=True)  # from step 0
    found = [(line["step"], line["split"]) for line in metric_lines(run)]
    assert found == [(0, "val"), (1, "train"), (2, "train"), (2, "val"), (2, "test")]


def test_changes_that_the_metadata_does_not_describe_are_refused(tmp_path: Path) -> None:
    save_network(tmp_path, torch.nn.Linear(2, 2), step=1)
    checkpoint = newest_in(tmp_path)
    change = RowChange("model.weight", "ids", "rows", column=0, bits=32)
    checkpoint = replace(checkpoint, state=replace(checkpoint.state, changes=[change]))
    with pytest.raises(CheckpointError, match=r"\.metadata: does not describe ids, which state\.json names"):
        apply_changes(checkpoint, {"model.weight": torch.zeros(2, 2)})


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


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here: run as root, or allow user namespaces")
def test_a_read_only_directory_is_reported_before_the_first_step_with_at_start(dlrm: Config, tmp_path: Path) -> None:
    dlrm["checkpoint"]["at_start"] = True
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm))
    begun = "mkdir -p run/checkpoints && echo '{}' > run/status.json &&"  # else it would be somebody's directory
    done = run_on_a_small_disk(tmp_path, before=f"{begun} mount -t tmpfs -o ro tmpfs run/checkpoints &&")
    message = r"/run/checkpoints: a checkpoint could not be written \(.*: Read-only file system\). Earlier checkpoints "
    assert re.search(message, done.stderr)
    assert "step 1  loss" not in done.stderr


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here: run as root, or allow user namespaces")
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
    assert re.search(r"checkpoint could not be written \(.*\). It needs 2\d\d,\d+ bytes, [\d,]+ were free", done.stderr)
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
