import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recmill.hardware.child import last_line, run_child

# Starts a child of its own, writes both process ids to the file $1, and never ends.
ENDLESS = 'sleep 1000 & echo $$ $! > "$1.new"; mv "$1.new" "$1"; wait'


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def are_gone(file: Path) -> bool:
    """Return whether the processes whose ids are in the file have ended; a zombie has."""
    for number in file.read_text(encoding="utf-8").split():
        try:
            if "State:\tZ" not in Path(f"/proc/{number}/status").read_text(encoding="utf-8"):
                return False
        except FileNotFoundError:
            pass
    return True


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
    wait_for(lambda: are_gone(ids))


def test_when_this_process_is_killed_so_are_a_child_and_its_children(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    code = f"from recmill.hardware.child import run_child; run_child({['sh', '-c', ENDLESS, 'sh', str(ids)]}, 600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_for(ids.is_file)
    assert not are_gone(ids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: are_gone(ids))
