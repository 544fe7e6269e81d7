"""Other processes, as /proc shows them: their children, their start times, signals and ports for them, and waiting."""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Return the child processes in the order in which they were started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return sorted({int(child) for text in lists for child in text.split()}, key=lambda child: (born(child), child))
    return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [grandchild for child in found for grandchild in descendants(child)]


def born(pid: int) -> int:
    """Return the start time in clock ticks since boot; 0: the process has ended."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(facts[18])


def wait_until(condition: Callable[[], object], seconds: float = 180.0) -> None:
    """Wait until the condition holds; a busy machine may need all of the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    """Return a port of loopback that no process gets by chance until it is used: it is below those that Linux gives."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest_given // 2, lowest_given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_until_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(born, pids)))
