"""Interrupted, killed, continued with other processes: nothing lost, nothing changed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recmill import train
from recmill.environment import own_node
from recmill.errors import CheckpointError, ConfigError, DataError, ResourceError, UserError
from recmill.launch import local
from recmill.launch.signals import stop_with_parent

from .. import group
from ..checkpoints import flip_a_bit
from ..processes import children, wait_until, wait_until_gone
from .runs import assert_same_run, close_to, loss_by_step, losses, metric_lines


def test_a_run_continued_with_other_numbers_of_processes_equals_an_unbroken_one(
    bert4rec: dict[str, Any], tmp_path: Path
) -> None:
    """Of DLRM: test_crashes.py and test_durability.py."""
    config = bert4rec
    config["train"] |= {"num_epochs": 2, "log_every_steps": 3}  # 4 steps: in the middle between two reports
    unbroken = group.train(config, tmp_path / "unbroken")
    group.train(config, tmp_path / "broken", procs=2, overrides=["train.max_steps=4"])
    assert len(losses(tmp_path / "broken")) == 2  # at step 3, and at the end
    resumed = group.train(config, tmp_path / "broken", procs=3)
    expected = loss_by_step(tmp_path / "unbroken")
    found = loss_by_step(tmp_path / "broken")
    assert found.pop(4) != expected.get(4)  # the end of the first part, which the unbroken run does not report
    assert found == pytest.approx(expected, rel=2e-5)
    assert resumed["test"] == close_to(unbroken["test"])


def test_workers_stay_on_loopback_unless_the_user_chose_an_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **options: environments.append(env))
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for chosen in ("", "eth7"):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if chosen:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        local._start(tmp_path, 1, own_node(), 0, {}, [])
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [[environment[name] for name in names] for environment in environments] == [["lo", "lo"], ["eth7", "lo"]]


def start(config: dict[str, Any], folder: Path, procs: int, fail: str = "") -> "subprocess.Popen[str]":
    """`fail`: see recmill.failpoints."""
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "recmill", "train", str(file), "--run", str(folder / "run"), "--procs", str(procs)]
    environment = os.environ | {"RECMILL_FAIL": fail}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=stop_with_parent,  # a test that fails leaves no run behind
    )


def wait_for_step(run: Path, step: int) -> None:
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= step, seconds=180)


def endless(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "train": {**config["train"], "num_epochs": 100_000}, "checkpoint": {"every_steps": 10}}


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_one_signal_finishes_the_step_saves_and_says_so(dlrm: dict[str, Any], tmp_path: Path, name: str) -> None:
    """SIGUSR1 reaches one of two workers only: all stop for it, at one step."""
    process = start(endless(dlrm), tmp_path, procs=1 if name == "SIGTERM" else 2)
    wait_for_step(tmp_path / "run", 3)
    os.kill(children(process.pid)[1] if name == "SIGUSR1" else process.pid, signal.Signals[name])
    output, _ = process.communicate(timeout=180)
    assert process.returncode == (130 if name == "SIGINT" else 75), output
    by = "" if name == "SIGINT" else f" by {name} on rank [01]"
    kind = "interrupted" if name == "SIGINT" else "preempted"
    assert re.search(rf"recmill: {kind}: Training ended at step [\d,]+{by}\. Run the same command to resume", output), (
        output
    )
    assert name != "SIGINT" or "SIGINT" not in output
    assert output.lower().count("ended at step") == 1, output
    assert "Traceback" not in output
    at = status(tmp_path / "run")
    stopped_at = at["step"]
    assert at["state"] == ("interrupted" if name == "SIGINT" else "preempted")
    assert at["reason"] == name
    assert at["rank"] in ([1] if name == "SIGUSR1" else [0, 1])
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped_at:08d}" / "MANIFEST.json").is_file()
    if name == "SIGINT":  # continued for two more steps, it is the run that never stopped
        steps = [f"train.max_steps={stopped_at + 2}"]
        group.train(tmp_path / "run" / "config.toml", tmp_path / "run", overrides=steps)
        group.train(tmp_path / "run" / "config.toml", tmp_path / "unbroken", overrides=steps)
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "unbroken"), rel=2e-5)


def test_a_killed_worker_is_named_and_the_run_resumes_later(dlrm: dict[str, Any], tmp_path: Path) -> None:
    process = start(endless(dlrm), tmp_path, procs=2, fail="train.step@step=17@rank=1:kill")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == ResourceError.exit_code, output
    assert "killed by SIGKILL" in output
    at = status(tmp_path / "run")
    assert (at["state"], at["rank"], at["restarts"]) == ("failed", 1, 0)
    assert "killed by SIGKILL" in at["reason"]
    results = group.train(tmp_path / "run" / "config.toml", tmp_path / "run", overrides=["train.max_steps=30"])
    group.train(tmp_path / "run" / "config.toml", tmp_path / "unbroken", overrides=["train.max_steps=30"])
    assert 0 < results["test"]["logloss"] < 1
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


def test_workers_whose_launcher_is_killed_save_and_leave(
    dlrm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.setenv("TMPDIR", str(jobs))
    process = start(endless(dlrm), tmp_path, procs=2)
    wait_for_step(tmp_path / "run", 3)
    workers = children(process.pid)
    process.kill()
    process.communicate(timeout=180)
    wait_until_gone(workers)
    assert status(tmp_path / "run")["state"] == "preempted"
    assert list(jobs.glob("recmill-*")) == []


def test_a_run_killed_while_it_describes_itself_can_be_started_again(dlrm: dict[str, Any], tmp_path: Path) -> None:
    """Its config is written, the rest is not."""
    code = """if True:
        import json, os, signal, sys
        from recmill.commands import train
        train.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        train.train(json.loads(sys.argv[1]), sys.argv[2])
    """
    command = [sys.executable, "-c", code, json.dumps(dlrm), str(tmp_path / "run")]
    launched = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}  # all in this one process
    assert subprocess.run(command, env=launched, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "config.toml").is_file()
    assert not (tmp_path / "run" / "env.json").exists()
    assert group.train(dlrm, tmp_path / "run", overrides=["train.max_steps=1"])["test"]


def test_a_run_in_use_says_by_whom_and_is_not_damaged(dlrm: dict[str, Any], tmp_path: Path) -> None:
    process = start(endless(dlrm), tmp_path, procs=1)
    wait_for_step(tmp_path / "run", 3)
    with pytest.raises(ResourceError, match=r"is in use by process \d+ on .* since"):
        train(tmp_path / "run" / "config.toml", tmp_path / "run", procs=2)
    assert status(tmp_path / "run")["state"] == "running"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert status(tmp_path / "run")["state"] == "interrupted"


def test_a_run_whose_directory_is_removed_ends(dlrm: dict[str, Any], tmp_path: Path) -> None:
    process = start(endless(dlrm), tmp_path, procs=1)
    wait_for_step(tmp_path / "run", 3)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == ResourceError.exit_code, output
    assert f"{tmp_path / 'run'} or its file .lock was removed or replaced while this run was using it" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_the_first_failing_rank_s_own_error_is_what_the_user_sees(
    dlrm: dict[str, Any], clicks: Path, tmp_path: Path
) -> None:
    """A bad id that only rank 1 reads; rank 0 then sees nothing but a closed connection."""
    import shutil

    import numpy as np

    copy = Path(shutil.copytree(clicks, tmp_path / "clicks"))
    ids = np.load(copy / "day_0_sparse.npy", mmap_mode="r+")
    ids[200, 1] = 50
    ids.flush()
    dlrm["data"] = {"path": str(copy), "order": "file"}
    with pytest.raises(DataError) as caught:
        train(dlrm, tmp_path / "run", procs=2, verify=False)
    text = str(caught.value)
    assert f"{copy / 'day_0_sparse.npy'}: row 200, column C2: id 50 is not in 0..49" in text
    assert status(tmp_path / "run") == pytest.approx(
        status(tmp_path / "run") | {"state": "failed", "reason": text, "rank": 1}
    )


def test_a_finished_run_is_kept_and_guarded(dlrm: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = group.train(dlrm, run, overrides=["train.max_steps=2"])
    before = len(metric_lines(run))
    assert group.train(dlrm, run, overrides=["train.max_steps=2"]) == first  # nothing to do
    assert len(metric_lines(run)) == before == 4  # two losses, val, test
    with pytest.raises(ConfigError, match=r"train.seed: 1 -> 2"):
        group.train(dlrm, run, overrides=["train.seed=2"])
    with pytest.raises(ConfigError, match=rf"optim.dense.lr: .* -> 0.5\nTo train .*: --init-from {run} as well"):
        group.train(dlrm, run, overrides=["optim.dense.lr=0.5"])
    with pytest.raises(
        ConfigError, match=rf"^{run} is a run of dlrm on .*, not of logistic on .*\. Choose another --run\.$"
    ):
        group.train({**dlrm, "model": {"name": "logistic"}}, run)
    with pytest.raises(ConfigError, match=r"is already at step 2, beyond the 1 of train.num_epochs") as caught:
        train(dlrm, run, procs=2, overrides=["train.max_steps=1"])
    assert "check_run" in [frame.name for frame in caught.traceback], "before any process is started"
    assert group.train(dlrm, run, overrides=["train.max_steps=2"]) == first  # unchanged
    group.train(dlrm, run, overrides=["train.max_steps=3"])  # longer
    assert len(losses(run)) == 3
    with pytest.raises(DataError, match=rf"Name your dataset: --set data.path={dlrm['data']['path']};"):
        group.train({**dlrm, "data": {"path": "data/own"}}, run, overrides=["train.max_steps=4"])
    other = tmp_path / "other"
    shutil.copytree(dlrm["data"]["path"], other)
    with (other / "dataset.json").open("a") as file:
        file.write(" ")  # the same arrays under another digest
    with pytest.raises(CheckpointError, match="was trained on other data") as refused:
        train(dlrm, run, procs=2, overrides=["train.max_steps=4", f"data.path={other}"])
    assert "check_run" in [frame.name for frame in refused.traceback], "before any process is started"
    flip_a_bit(run / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match="its content changed since it was saved"):
        group.train(dlrm, run, overrides=["train.max_steps=4"])


def test_data_that_is_not_there_is_named_with_a_dataset_beside_it_for_such_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped configs have such a data.path, for everybody to replace."""
    for name, files in {"mine": ["dataset.json"], "plays": ["dataset.json", "users.parquet"], "cut": []}.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "data" / name / file).touch()
    monkeypatch.chdir(tmp_path)
    for config, mine in (("own/dlrm", "data/mine"), ("own/sasrec", "data/plays")):
        expected = f"data/own: no such directory, .* config. Name your dataset: --set data.path={mine}; or prepare it: "
        with pytest.raises(DataError, match=expected):
            train(config, "runs/x")
    (tmp_path / "data/ours").mkdir()
    (tmp_path / "data/ours/dataset.json").touch()
    for data, meant in (("data/ouors", "data/ours"), ("none/own", "DIR")):
        with pytest.raises(DataError, match=f"--set data.path={meant};"):
            train("own/dlrm", "runs/x", overrides=[f"data.path={data}"])


def test_a_loss_that_is_not_finite_is_never_saved(dlrm: dict[str, Any], tmp_path: Path) -> None:
    dlrm["optim"] = {"dense": {"name": "sgd", "lr": 1e18}, "tables": {"name": "sgd", "lr": 1e18}}
    dlrm["train"]["log_every_steps"] = 1000
    dlrm["checkpoint"]["every_steps"] = 2
    expected = (
        r"no longer a finite number from step 2 on, first on rank \d.* after step 2: (parameter|the gradient of) \w+"
    )
    with pytest.raises(UserError, match=expected):
        group.train(dlrm, tmp_path / "run", procs=2)
    assert list((tmp_path / "run").glob("checkpoints/step-*")) == []
    assert status(tmp_path / "run")["state"] == "failed"


def test_a_lost_terminal_does_not_end_a_run(dlrm: dict[str, Any], tmp_path: Path) -> None:
    """As with `recmill train ... 2>&1 | head -1`."""
    process = start({**dlrm, "eval": {"every_steps": 1}}, tmp_path, procs=1)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=180) == 0
    assert status(tmp_path / "run")["state"] == "done"


def test_an_internal_error_of_a_worker_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(local.WorkerError, match=r"Process \d of the job failed: TypeError") as caught:
        local.run_job("doctor", {"device": "cpu", "surprise": 1}, procs=2)
    assert "Traceback" in caught.value.__notes__[0]


def test_too_few_open_files_are_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would try for an hour to open a socket."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (20, 20))
    with pytest.raises(ResourceError, match=r"A process may have 20 files open, and --procs 2 needs 64\. Raise the"):
        local.run_job("doctor", {"device": "cpu"}, procs=2)


def test_the_directory_of_a_job_that_was_killed_with_its_launcher_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "recmill-launched-left").mkdir()
    (tmp_path / "recmill-launched-left" / "job.json").write_text("{}")
    with local._job_directory() as first, local._job_directory() as second:  # whose launchers still run
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_workers_could_not_read_is_named_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "")
    with pytest.raises(ConfigError, match="TORCHELASTIC_RESTART_COUNT = '' is not a number"):
        local.run_job("doctor", {"device": "cpu"}, procs=2)


def test_far_more_processes_than_cores_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"--procs 100000 on \d+ cores: at most \d+ .* Set .* RECMILL_MAX_PROCS"):
        local.run_job("doctor", {"device": "cpu"}, procs=100_000)


def test_a_run_with_closed_standard_files_succeeds(dlrm: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm), encoding="utf-8")
    command = f"exec {sys.executable} -m recmill train run.toml --run run --procs 2 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=180, check=False).returncode == 0
    assert status(tmp_path / "run")["state"] == "done"
