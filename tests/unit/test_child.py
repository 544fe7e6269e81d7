import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recmill.hardware.child import last_line, run_child

from ..processes import born, wait_until, wait_until_gone

# Starts a child of its own, writes both process ids to the file $1, and never ends.
ENDLESS = 'sleep 1000 & echo $$ $! > "$1.new"; mv "$1.new" "$1"; wait'


def pids_in(file: Path) -> list[int]:
    wait_until(file.is_file)
    return [int(number) for number in file.read_text(encoding="utf-8").split()]


def test_a_child_returns_its_exit_code_and_output() -> None:
    done = run_child(["sh", "-c", "echo out; echo first >&2; echo last >&2; exit 7"], 60)
    assert (done.returncode, done.stdout, last_line(done)) == (7, "out\n", "last")


@pytest.mark.parametrize("name", ["SIGILL", "SIGXFSZ"])  # Python itself ignores the second
def test_a_child_that_a_signal_kills_has_the_exit_code_of_that_signal(name: str) -> None:
    done = run_child(["sh", "-c", f"kill -{name.removeprefix('SIG')} $$"], 60)
    assert (done.returncode, last_line(done)) == (-signal.Signals[name], f"killed by {name}")


def test_at_the_time_limit_a_child_and_its_children_are_killed(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(["sh", "-c", ENDLESS, "sh", str(ids)], 3)
    wait_until_gone(pids_in(ids))


def test_when_this_process_is_killed_so_are_a_child_and_its_children(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    code = f"from recmill.hardware.child import run_child; run_child({['sh', '-c', ENDLESS, 'sh', str(ids)]}, 600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    pids = pids_in(ids)
    assert all(map(born, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(pids)
