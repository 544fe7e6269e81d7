"""Commands as a user types them, through the installed program."""

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from recmill import evaluate, recommend, train
from recmill.errors import ConfigError

from ..conftest import RunCli
from ..distributed.runs import close_to, losses


def write_config(tmp_path: Path, config: dict[str, Any]) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return file


def assert_one_clear_error(done: "subprocess.CompletedProcess[str]", exit_code: int, *facts: str) -> None:
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    for fact in facts:
        assert fact in done.stderr


def test_a_run_directory_is_enough_to_repeat_and_evaluate_the_run(
    run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    done = run_cli(
        "train", write_config(tmp_path, dlrm), "--run", "runs/a", "--procs", "2", "--set", "optim.dense.lr=0.02"
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr  # like torch's of gradients whose strides are not DDP's
    run = tmp_path / "runs" / "a"
    results = json.loads((run / "results.json").read_text())
    assert set(results) == {"val", "test", "timing"}
    assert results["timing"]["verdict"] in done.stdout
    assert set(results["test"]) == {
        "auroc",
        "logloss",
        "normalised_entropy",
        "calibration",
        "rows",
        "step",
        "checkpoint",
    }
    assert (results["test"]["step"], results["test"]["checkpoint"]) == (13, "checkpoints/step-00000013")
    assert "\nstep 13: checkpoints/step-00000013\n" in done.stdout
    assert f"{results['test']['auroc']:.4f}" in done.stdout
    assert "best reachable" in done.stdout
    environment = json.loads((run / "env.json").read_text())
    assert environment["world_size"] == 2
    assert environment["packages"]["torchrec"] == "1.8.0"
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert "step 13" in (run / "log.txt").read_text()
    assert (run / "log.rank-1.txt").is_file()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000010", "step-00000013"]
    # The resolved config alone, from another directory, gives the same run.
    assert "lr = 0.02" in (run / "config.toml").read_text()
    (tmp_path / "elsewhere").mkdir()
    again = run_cli("train", run / "config.toml", "--run", "again", cwd=tmp_path / "elsewhere")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "elsewhere" / "again") == pytest.approx(losses(run), rel=2e-5)
    # evaluate finds the same numbers in the checkpoint
    shown = run_cli("evaluate", "runs/a", "--split", "test", "--json")
    assert json.loads(shown.stdout) == close_to(results["test"], rel=1e-6)


def test_python_does_what_the_commands_do(run_cli: RunCli, bert4rec: dict[str, Any], tmp_path: Path) -> None:
    results = train(bert4rec, tmp_path / "run", overrides=["train.num_epochs=2"])
    values = evaluate(tmp_path / "run", split="val")
    assert {name: values[name] for name in results["val"]} == close_to(results["val"], rel=1e-6)
    assert {name for name in values if name not in results["val"]} == {
        f"popularity/{name}" for name in results["val"] if name not in ("users", "step", "checkpoint")
    }
    items = recommend(tmp_path / "run", [12, "7", 99], k=4)
    assert len({item["item"] for item in items} - {"12", "7", "99"}) == 4
    assert items == sorted(items, key=lambda item: -item["score"])
    assert items[0]["title"] == f"Item {items[0]['item']}"
    printed = run_cli("recommend", tmp_path / "run", "--history", "12,7, 99", "--k", "4", "--json")
    assert [item["item"] for item in json.loads(printed.stdout)] == [item["item"] for item in items]
    unknown = run_cli("recommend", tmp_path / "run", "--history", "12,9999")
    assert_one_clear_error(unknown, 3, "'9999'", "items.parquet")
    assert_one_clear_error(
        run_cli("recommend", tmp_path / "run", "--history", "12", "--k", "200"), 2, "--k 200: 199 items"
    )


def test_under_torchrun_training_uses_the_processes_that_torchrun_started(dlrm: dict[str, Any], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "recmill"]
    command = [*torchrun, "train", str(write_config(tmp_path, dlrm)), "--run-dir"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "a" / "env.json").read_text())["world_size"] == 2
    assert done.stdout.count("best reachable") == 1  # only rank 0 prints
    train(dlrm, tmp_path / "b")
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=2e-5)


def test_asking_for_processes_inside_a_launched_one_is_an_error(
    run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    done = run_cli("train", write_config(tmp_path, dlrm), "--run", "r", "--procs", "2", env=environment)
    assert_one_clear_error(done, 2, "--procs 2", "another launcher started", "unset RANK and WORLD_SIZE")
    wrong = os.environ | {"RANK": "abc", "WORLD_SIZE": "2"}
    done = run_cli("train", write_config(tmp_path, dlrm), "--run", "r", env=wrong)
    assert_one_clear_error(done, 2, "RANK = 'abc' is not a number")


def test_a_directory_with_somebody_s_config_is_not_taken_for_a_run(
    run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    mine = tmp_path / "config.toml"
    shutil.copy(write_config(tmp_path, dlrm), mine)
    before = mine.read_bytes()
    assert_one_clear_error(run_cli("train", mine, "--run", tmp_path), 2, "is not a run directory: it holds config.toml")
    assert mine.read_bytes() == before


@pytest.mark.parametrize("file", ["status.json", "results.json", "config.toml"])
def test_damaged_files_of_a_run_are_named(file: str, run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(write_config(tmp_path, dlrm), run / "config.toml")
    (run / "status.json").write_text('{"state": "done"}')
    (run / "results.json").write_text("{}")
    (run / file).write_text("\0")
    done = run_cli("results", run)
    assert_one_clear_error(done, 2 if file == "config.toml" else 4, str(run / file))


def test_a_split_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--split: should be 'val' or 'test', got 'tset'"):
        evaluate(tmp_path, split="tset")  # type: ignore[call-overload]


def test_doctor_finds_that_training_would_work_here(run_cli: RunCli) -> None:
    done = run_cli("doctor")
    assert done.returncode == 0, done.stdout
    facts = ("torchrec", "fbgemm-gpu-cpu", "2 processes exchanged values", "float16 on CPU", "Training would work.")
    assert all(fact in done.stdout for fact in facts), done.stdout


def test_a_model_on_the_wrong_kind_of_data_is_a_config_error(
    run_cli: RunCli, dlrm: dict[str, Any], histories: Path, tmp_path: Path
) -> None:
    done = run_cli("train", write_config(tmp_path, dlrm), "--run", "r", "--set", f"data.path={histories}")
    assert_one_clear_error(done, 2, "model 'dlrm' learns from clicks", "holds histories")


@pytest.mark.parametrize("is_found_by_a_worker", [False, True])
def test_bad_data_is_one_clear_error(
    is_found_by_a_worker: bool, run_cli: RunCli, dlrm: dict[str, Any], clicks: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(clicks, tmp_path / "copy"))
    if is_found_by_a_worker:
        values = np.load(copy / "day_0_dense.npy", mmap_mode="r+")
        values[42, 1] = -np.inf
        values.flush()
        flags = ["--no-verify"]  # as if the dataset had been made with this value
        fact = f"{copy / 'day_0_dense.npy'}: row 42, column I2: -inf is not a finite number"
    else:
        os.truncate(copy / "day_0_sparse.npy", 8127)
        flags, fact = [], "day_0_sparse.npy: 8,127 bytes, expected 8,128"
    config = write_config(tmp_path, {**dlrm, "data": {"path": str(copy)}})
    assert_one_clear_error(run_cli("train", config, "--run", "r", *flags), 3, fact)
    assert not (tmp_path / "r" / "results.json").exists()


def without_root_s_privilege() -> None:
    """Drop root's right to read and write anywhere, so that file permissions hold for the command."""
    drop_from_bounding_set, may_override_permissions, may_read = 24, 1, 2
    for right in (may_override_permissions, may_read):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, right)


@pytest.mark.parametrize("what", ["dataset", "input"])
def test_no_permission_to_read_is_a_resource_error(what: str, run_cli: RunCli, clicks: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(clicks, tmp_path / "copy"))
    raw = tmp_path / "raw.parquet"
    raw.touch()
    columns = ("--user-column", "u", "--item-column", "i")
    command, file = {
        "dataset": (("audit", copy), copy / "day_1_dense.npy"),
        "input": (("prepare", "histories", "--input", raw, *columns, "--output", "d"), raw),
    }[what]
    file.chmod(0)
    done = run_cli(*command, preexec_fn=without_root_s_privilege)
    assert_one_clear_error(done, 5, f"{file}: Permission denied. You may not read it")


@pytest.mark.parametrize("where", ["prepare", "new run", "old run"])
def test_no_permission_to_write_is_a_resource_error(
    where: str, run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    config = write_config(tmp_path, dlrm)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    command: tuple[str | Path, ...] = ("train", config, "--run", locked / "r")
    if where == "old run":
        command = ("train", config, "--run", locked)
    elif where == "prepare":
        command = ("prepare", "random-histories", "--output", locked / "d")
    done = run_cli(*command, preexec_fn=without_root_s_privilege)
    assert_one_clear_error(done, 5, str(locked), "Permission denied", "Choose a directory that you may write to")
    assert list(locked.iterdir()) == []


def test_a_path_through_a_file_is_a_resource_error(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_clear_error(run_cli("prepare", "random-histories", "--output", "file/d"), 5, "a file")


def test_an_unknown_name_on_the_command_line_is_answered_with_the_nearest(run_cli: RunCli) -> None:
    assert_one_clear_error(run_cli("prepare", "synthetic-click", "--output", "d"), 2, "'synthetic-clicks'")
    assert_one_clear_error(run_cli("trian"), 2, "trian")
    assert_one_clear_error(
        run_cli("prepare", "random-clicks", "--output", "d", "--tables", "a,b"), 2, "integers separated by commas"
    )


def test_runs_without_a_checkpoint_or_config_are_checkpoint_errors(
    run_cli: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    assert_one_clear_error(run_cli("evaluate", "nowhere"), 4, "nowhere: no such directory. ")
    (tmp_path / "empty").mkdir()
    shutil.copy(write_config(tmp_path, dlrm), tmp_path / "empty" / "config.toml")
    assert_one_clear_error(run_cli("evaluate", "empty", "--procs", "2"), 4, "no complete checkpoint yet")


def test_what_was_meant_is_named_for_runs_datasets_configs_and_files(
    run_here: RunCli, dlrm: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    shutil.copy(write_config(tmp_path, dlrm), tmp_path / "runs" / "first" / "config.toml")
    (tmp_path / "data" / "clicks").mkdir(parents=True)
    (tmp_path / "log.csv").write_text("user_id,item_id,click\n1,2,0\n2,3,1\n1,3,1\n")
    prepare = ("prepare", "histories", "--output", "d", "--item-column", "item_id")
    for arguments, code, meant in (
        (("evaluate", "runs/frist"), 4, "'runs/first'"),
        (("results", "runs"), 4, "name one, like runs/first"),
        (("checkpoint", "list", "rnus/first"), 4, "'runs/first'"),
        (("audit", "data/click"), 3, "'data/clicks'"),
        (("plan", "own/dlrm", "--set", "data.path=data/click"), 2, "'data/clicks'"),
        (("train", "own/dlmr", "--run", "r"), 2, "'own/dlrm'"),
        (("schema", "--input", "logs.csv", "--label", "click"), 3, "'log.csv'"),
        (("schema", "--input", "log.csv", "--label", "clicked"), 3, "'click'"),
        ((*prepare, "--input", "log.csv", "--user-column", "userid"), 3, "'user_id'"),
        ((*prepare, "--input", "log.cvs", "--user-column", "user_id"), 3, "'log.csv'"),
    ):
        assert_one_clear_error(run_here(*arguments), code, meant if "like" in meant else f"Did you mean {meant}?")
    (tmp_path / "data" / "clicks" / "dataset.json").touch()
    command = "recmill train own/dlrm --set data.path=data/clicks --run runs/clicks."
    assert_one_clear_error(run_here("predict", "data/clicks", "--input", "log.csv", "--output", "s.csv"), 4, command)
    assert_one_clear_error(run_here("train", "data/clicks", "--run", "r"), 2, command)


def test_debug_shows_where_an_error_came_from(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("evaluate", "nowhere", "--debug")
    assert "Traceback" in done.stderr
    assert "nowhere: no such directory" in done.stderr
