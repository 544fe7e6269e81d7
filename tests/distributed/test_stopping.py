"""How a run ends that did not come to its end by itself: at once, before its first step, hung; and starting again."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recmill import train
from recmill.commands.checkpoint import list_checkpoints
from recmill.errors import ResourceError
from recmill.launch.failures import LostWorkerError, first_error
from recmill.launch.signals import stop_with_parent

from .. import group
from ..processes import children, wait_until, wait_until_gone
from .runs import assert_same_run, metric_lines
from .test_resume import endless, start, status, wait_for_step

Config = dict[str, Any]


def signalled_until_it_ends(process: "subprocess.Popen[str]", number: signal.Signals) -> str:
    """Send a second signal and return the output.

    It counts with the first one if the process has received that one less than a second ago, so try again.
    """
    for _ in range(20):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=8)[0]
    raise AssertionError("it does not end")


def test_a_second_signal_ends_it_at_once(dlrm: Config, tmp_path: Path) -> None:
    """Rank 1 never comes to the end of its step, rank 0 waits for it deep in a collective."""
    process = start(endless(dlrm), tmp_path, procs=2, fail="train.step@step=12@rank=1:hang")
    wait_for_step(tmp_path / "run", 14)  # 12 steps and two validations
    wait_until(lambda: status(tmp_path / "run")["step"] == 10)  # saved in the background
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGUSR1)  # together they are one
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the step to end
        process.communicate(timeout=1.2)
    output = signalled_until_it_ends(process, signal.SIGTERM)
    assert process.returncode == 130, output
    assert "Ended at once" in output
    assert "Traceback" not in output
    wait_until_gone(workers)
    at = status(tmp_path / "run")
    assert (at["state"], at["reason"], at["step"]) == ("interrupted", "SIGINT", 10)  # as of the last checkpoint


def test_a_signal_during_a_save_waits_for_it_and_a_second_one_does_not(dlrm: Config, tmp_path: Path) -> None:
    """Rank 1 never comes to the end of its second save; the first one stays."""
    process = start(endless(dlrm), tmp_path, procs=2, fail="ckpt.written@rank=1@hit=2:hang")
    wait_for_step(tmp_path / "run", 24)  # 20 steps, saved after 10 and 20, and four validations
    wait_until(lambda: status(tmp_path / "run")["step"] == 10)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the step to end
        process.communicate(timeout=1.5)
    output = signalled_until_it_ends(process, signal.SIGTERM)
    assert process.returncode == 75, output
    found = [(facts["step"], facts["health"]) for facts in list_checkpoints(tmp_path / "run", digests=True)]
    assert found == [(10, "complete")]
    at = status(tmp_path / "run")
    assert (at["state"], at["reason"], at["step"]) == ("preempted", "SIGTERM", 10)


def test_a_signal_before_the_first_step_lets_an_evaluation_end_and_trains_nothing(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the worker still imports torch."""
    config = endless(dlrm)
    config["eval"]["before_training"] = True
    config["train"]["kernels"] = "torch"  # a signal while kernels are compiled ends the run before any evaluation
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(config, tmp_path, procs=1)
    while not [*tmp_path.glob("recmill-launched-*/out-0.txt")]:
        time.sleep(0.001)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 75, output
    assert "Training ended at step 0 by SIGUSR2" in output
    at = status(tmp_path / "run")
    assert (at["state"], at["reason"], at["step"], at["rank"]) == ("preempted", "SIGUSR2", 0, 0)
    assert [(line["step"], line["split"]) for line in metric_lines(tmp_path / "run")] == [(0, "val")]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_workers_whose_torchrun_is_killed_by_a_signal_save_and_leave(dlrm: Config, tmp_path: Path) -> None:
    """torchrun's agent knows no SIGUSR1, which schedulers send: it dies of it."""
    (tmp_path / "run.toml").write_text(tomli_w.dumps(endless(dlrm)), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "recmill"]
    command = [*torchrun, "train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "out.txt").open("w") as file:
        agent = subprocess.Popen(
            command, stdout=file, stderr=file, text=True, env=environment, preexec_fn=stop_with_parent
        )
    wait_for_step(tmp_path / "run", 3)
    workers = children(agent.pid)
    assert len(workers) == 2
    agent.send_signal(signal.SIGUSR1)
    assert agent.wait(timeout=180) == -signal.SIGUSR1
    wait_until_gone(workers)
    at = status(tmp_path / "run")
    assert (at["state"], at["reason"]) == ("preempted", "SIGTERM"), (tmp_path / "out.txt").read_text()
    assert (tmp_path / "run" / "checkpoints" / f"step-{at['step']:08d}" / "MANIFEST.json").is_file()


def test_a_job_that_lost_a_worker_starts_again_and_equals_an_unbroken_run(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", "train.step@step=7@rank=1@attempt=0:kill")
    with caplog.at_level(logging.WARNING, "recmill"):
        train(dlrm, tmp_path / "run", procs=2, overrides=["train.max_restarts=3"])
    assert "restart 1 of 3 after: Process 1 of the job was killed by SIGKILL" in caplog.text
    assert status(tmp_path / "run")["restarts"] == 1
    monkeypatch.delenv("RECMILL_FAIL")
    group.train(dlrm, tmp_path / "unbroken")
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


def test_an_instruction_that_the_cpu_lacks_is_explained_and_not_tried_again(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", "train.step@step=2@rank=1:sigill")
    with pytest.raises(ResourceError, match=r"^Process 1 of the job was killed by SIGILL\. The CPU, or") as caught:
        train(dlrm, tmp_path / "run", procs=2, overrides=["train.max_restarts=3"])
    message = str(caught.value)
    for remedy in ("ONEDNN_MAX_CPU_ISA=AVX2", "train.kernels=torch", "train.precision=float32", "recmill doctor"):
        assert remedy in message
    assert "same command" not in message
    assert "restart" not in caplog.text
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["rank"]) == ("failed", 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("SIGKILL", "out of memory"), ("SIGSEGV", "Try train.kernels=torch"), ("SIGBUS", "mapped file was truncated")],
)
def test_a_signal_that_killed_a_worker_comes_with_a_hint(name: str, hint: str, tmp_path: Path) -> None:
    error = first_error(tmp_path, [{1: -signal.Signals[name]}], 2, [])
    assert isinstance(error, LostWorkerError)  # which may be tried again
    assert str(error).startswith(f"Process 1 of the job was killed by {name}.")
    assert hint in str(error)


def test_every_rank_of_a_job_that_hangs_is_reported_with_its_step_and_stack(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", "train.step@step=7@rank=1:hang")
    with pytest.raises(ResourceError, match="The job hangs") as caught:
        train(dlrm, tmp_path / "run", procs=2, overrides=["train.hang_seconds=10.0"])
    assert "wait_for_all_ranks" in (tmp_path / "run" / "hang-rank-0.txt").read_text()
    assert "failpoints.py" in (tmp_path / "run" / "hang-rank-1.txt").read_text()
    text = str(caught.value)
    pattern = (
        r"rank 1 made no progress .*, training, after step 7, in\n(.*\n)+  rank 0 waited for the other ranks .* step 7"
    )
    assert re.search(pattern, text)
    assert 'fit: reach("train.step"' in text
    at = status(tmp_path / "run")
    assert (at["state"], at["reason"]) == ("failed", text)


def test_a_stopped_process_is_named_and_nobody_is_left(dlrm: Config, tmp_path: Path) -> None:
    config = endless(dlrm)
    config["train"]["hang_seconds"] = 10.0
    process = start(config, tmp_path, procs=2)
    wait_for_step(tmp_path / "run", 3)
    workers = children(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == ResourceError.exit_code, output
    assert "rank 1 does not answer: it was stopped, or is stuck outside Python" in output
    wait_until_gone(workers)


def test_a_signal_while_the_compiler_hangs_ends_it_at_once_and_the_compiler_too(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pids\nwait\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    process = start(dlrm, tmp_path, procs=2)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]  # after what is trained and started
    assert lines[2].startswith(f"compiling CPU kernels with {compiler}"), lines
    wait_until((tmp_path / "pids").is_file)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)  # before the compiler is given up
    assert process.returncode == 75, output
    assert "SIGTERM was received before training had started. Run the same command to resume." in output
    wait_until_gone([int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()])
