"""Run a command in a child process that outlives neither its time limit nor this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Between us and the command, because a compiler has children of its own: their process group is killed when nobody
# holds the other end of standard input any more, however this process ended.
_GUARD = """
import os, signal, subprocess, sys, threading
def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_parent, daemon=True).start()
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
    signal.signal(ignored, signal.SIG_DFL)
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def run_child(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Return the exit code and output of a command; raise TimeoutExpired after `seconds`.

    The command and its children are killed then, and when this process ends or the call is interrupted.
    """
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, *command]
    until_we_end, held = os.pipe()
    try:
        with subprocess.Popen(
            guard,
            stdin=until_we_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as child:
            try:
                output, errors = child.communicate(timeout=max(seconds, 0.0))
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the group is still ours
                raise
        return subprocess.CompletedProcess(list(command), child.returncode, output, errors)
    finally:
        os.close(until_we_end)
        os.close(held)


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line that a failed command wrote to stderr, or how it ended."""
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
