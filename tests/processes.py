"""Other processes, as /proc shows them: their children, their start times, signals to them, and waiting for them."""

import contextlib
import os
import signal
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


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds; a busy machine may need all of the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(born, pids)))
