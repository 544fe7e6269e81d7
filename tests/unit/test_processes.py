"""The worker that is started before the command line is imported."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import recmill
from recmill.launch import processes

CONFIG = """
data.path = "data"
model = {name = "sasrec", embedding_dim = 4, num_layers = 1, num_heads = 1, max_length = 5}
train = {global_batch_size = 16, max_steps = 1}
eval.protocols = ["full"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    recmill.prepare("synthetic-histories", folder / "data", users=20, items=30, interactions=200)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def run(folder: Path, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "is_started"),
    [
        ("train config.toml --run r", {}, True),
        ("--debug evaluate r", {}, True),
        ("train config.toml --run r --procs 1", {}, True),
        ("train config.toml --run r --procs=2", {}, False),
        ("train config.toml --procs 10 --run r", {}, False),
        ("train --help", {}, False),
        ("recommend r --users 0", {}, False),
        ("", {}, False),
        ("train config.toml --run r", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ("train config.toml --run r", {"RANK": "x", "WORLD_SIZE": "1"}, False),
        ("train config.toml --run r", {"RECMILL_NODES": "2"}, False),
    ],
)
def test_only_commands_that_need_one_process_on_one_machine_start_it_ahead(
    arguments: str, variables: dict[str, str], is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processes.start_ahead(arguments.split())
    worker = processes._ahead
    assert (worker is not None) == is_started
    processes.end_ahead()
    assert processes.take_ahead({}) is None
    assert worker is None or worker.returncode == -signal.SIGKILL


def test_a_run_uses_the_worker_that_was_started_ahead(folder: Path) -> None:
    code = (
        "import recmill\n"
        "from recmill.launch import processes\n"
        "processes.start_ahead(['train'])\n"
        "print(processes._ahead.pid)\n"
        "recmill.train('config.toml', 'used')\n"
    )
    done = run(folder, code)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "used/trace/0/rank-0.json").read_text())["pid"] == int(done.stdout)


def test_a_run_whose_worker_was_killed_before_it_began_starts_another(folder: Path) -> None:
    code = (
        "import recmill\n"
        "from recmill.launch import processes\n"
        "processes.start_ahead(['train'])\n"
        "processes._ahead.kill()\n"
        "processes._ahead.wait()\n"
        "recmill.train('config.toml', 'another')\n"
    )
    done = run(folder, code)
    assert done.returncode == 0, done.stderr
    assert (folder / "another/results.json").is_file()


def test_an_import_that_fails_ahead_is_reported_by_the_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('this torch is broken')\n")
    code = "import sys; sys.argv = ['recmill', 'train', 'config.toml', '--run', 'broken']\n"
    code += "from recmill.__main__ import main; main()"
    done = run(folder, code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "Process 0 of the job failed: ImportError: this torch is broken" in done.stderr
    assert done.stderr.count("broken") == 2, done.stderr  # here, and in the name of the run


def test_a_signal_reaches_a_worker_that_is_being_started_even_if_another_thread_takes_it(folder: Path) -> None:
    """Signals are blocked then, but only in the main thread. An audit hook sends one just before the worker starts."""
    code = (
        "import os, signal, sys, threading, time\n"
        "import recmill\n"
        "from recmill.launch.signals import FORWARDED\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def send(event, arguments):\n"
        "    if event == 'subprocess.Popen' and 'recmill.launch.worker' in arguments[1]:\n"
        "        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= {*FORWARDED}\n"
        "        os.kill(os.getpid(), signal.SIGUSR2)\n"
        "        for _ in range(100_000): pass  # the handler runs in this thread\n"
        "sys.addaudithook(send)\n"
        "try:\n"
        "    recmill.train('config.toml', 'signalled')\n"
        "except recmill.errors.Preempted as error:\n"
        "    print(error)\n"
    )
    done = run(folder, code)
    assert done.stdout == "Training ended at step 0 by SIGUSR2 on rank 0. Run the same command to resume.\n", (
        done.stderr
    )


def test_a_worker_that_waits_ends_when_the_command_is_killed() -> None:
    code = (
        "from recmill.launch import processes\n"
        "processes.start_ahead(['train'])\n"
        "print(processes._ahead.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        handle = os.pidfd_open(int(command.stdout.readline()))
        command.kill()
    ended, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ended
