"""Start worker processes; if a job has only one, start it ahead, so that it imports torch while the config is checked.

Such a worker waits for its order on its standard input. It is killed if the command ends without giving it one.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import IO

from recmill.environment import is_launched
from recmill.hardware.cpu import threads_per_process
from recmill.launch.signals import blocked

# Variables that processes read when they start; a user's own values win.
TUNING = {
    # glibc returns large blocks to the system at once, so every step pays their page faults again. Keeping them makes
    # training 1.2 to 1.3 times faster.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    # Threads that wait for each other spin, by default for milliseconds. DLRM with that and with a short spin: 1k and
    # 40k samples/s while another program takes one of two cores; 70k and 66k while both are free.
    "GOMP_SPINCOUNT": "2000",
}
# The workers of one machine exchange data over loopback; a user's own values win here, too.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_LAUNCHER = "RECMILL_STARTED_AHEAD_BY"
_COMMANDS = ("train", "evaluate")
_SEVERAL = re.compile(r"--procs[ =](?!1\b)")

_ahead: subprocess.Popen[bytes] | None = None


def variables(procs: int, is_alone: bool) -> dict[str, str]:
    """Return the environment of a worker, one of `procs` on this machine; `is_alone`: there is no other machine."""
    own = {**TUNING, **(_LOOPBACK if is_alone else {}), "OMP_NUM_THREADS": str(threads_per_process(procs))}
    own["KINETO_LOG_LEVEL"] = "99"  # torch's profiler would print when it starts and stops
    own["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would look for backends in all installed packages
    return own | os.environ


def start(
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    output: IO[bytes] | None = None,
    pass_fds: Iterable[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a worker. Signals must be blocked: it inherits that, and ends it when it can handle them."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "recmill.launch.worker"],  # -P: no modules of the current directory
        env=environment,
        stdin=stdin,
        stdout=output,
        stderr=output,
        pass_fds=[*pass_fds],
        start_new_session=True,  # Ctrl-C reaches the workers through us, once
    )


def needs_worker(arguments: list[str]) -> bool:
    """Return whether this command line is one of a command that starts workers."""
    return next((word for word in arguments if not word.startswith("-")), "") in _COMMANDS


def start_ahead(arguments: list[str]) -> None:
    """Start the worker of a command line that needs one, on this machine alone."""
    global _ahead
    has_several = "RECMILL_NODES" in os.environ or _SEVERAL.search(" ".join(arguments))
    if needs_worker(arguments) and not {"-h", "--help"} & {*arguments} and not has_several and not is_launched():
        with contextlib.suppress(OSError), blocked():  # without it, one is started later, or the error is reported
            _ahead = start(variables(1, is_alone=True) | {_LAUNCHER: str(os.getpid())}, stdin=subprocess.PIPE)


def take_ahead(own: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
    """Give the worker that was started ahead its `own` variables, and return it; None if there is none."""
    global _ahead
    worker, _ahead = _ahead, None
    if worker is None or worker.poll() is not None:
        return None
    assert worker.stdin is not None
    try:
        with worker.stdin:
            worker.stdin.write(json.dumps(dict(own)).encode() + b"\n")
    except OSError:  # it has just ended
        return None
    return worker


def end_ahead() -> None:
    """End the worker that was started ahead, if there is one: the job needs another environment."""
    global _ahead
    if _ahead is not None:
        _ahead.kill()
        _ahead.communicate()
        _ahead = None


def launcher_of_ahead() -> int | None:
    """Return the process that has started this one ahead, if that is so."""
    launcher = os.environ.pop(_LAUNCHER, None)
    return int(launcher) if launcher else None


def wait_for_order() -> dict[str, str]:
    """Return the variables that the launcher gives to this process; end it if there are none."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    own: dict[str, str] = json.loads(line)
    return own
