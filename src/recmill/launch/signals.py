"""Signals that stop a run: the first one after the current step, with a checkpoint, a second one at once."""

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from recmill.environment import deadline
from recmill.errors import Interrupted, Preempted

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by the launcher, to its workers
# A worker may get a scheduler's signal and the launcher's copy of it: within this time they count as one request.
ONE_REQUEST_SECONDS = 1.0
TIME_LIMIT = "the time limit"  # instead of the name of a signal
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, order=True)
class ReceivedSignal:
    """A signal that stops a run. Ordered by time: a group of processes stops for the earliest one."""

    received_at: float  # seconds since 1970
    rank: int
    name: str

    @property
    def state(self) -> Literal["preempted", "interrupted"]:
        return "interrupted" if self.name == "SIGINT" else "preempted"


class StopRequest:
    """Whether a stop was requested: by the first signal, or by the job's time limit.

    A second signal ends the process at once. `deadline`: when the time limit is near, in seconds since 1970.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.signal: str | None = None
        self._received_at = 0.0
        self._deadline = math.inf if deadline is None else deadline

    @property
    def is_set(self) -> bool:
        if self.signal is None and time.time() >= self._deadline:
            self.signal, self._received_at = TIME_LIMIT, time.time()
        return self.signal is not None

    def received_by(self, rank: int) -> ReceivedSignal | None:
        return ReceivedSignal(self._received_at, rank, self.signal) if self.signal else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first one, raise KeyboardInterrupt for the second."""
        if self.signal is None:
            self.signal = signal.Signals(number).name
            self._received_at = time.time()
        elif time.time() - self._received_at > ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt


@contextmanager
def stop_on(names: Sequence[str]) -> Iterator[StopRequest]:
    """Within the block, SIGINT, the named signals and RECMILL_DEADLINE request a stop of the run."""
    request = StopRequest(deadline())
    with handled([signal.SIGINT, *(signal.Signals[name] for name in names)], request.handle):
        yield request


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install `handler` for these signals within the block, if this is the main thread: others cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def blocked() -> Iterator[None]:
    """Block forwarded signals. Child processes inherit the block, and must unblock them themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent dies: SIGTERM, so that it saves and leaves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def shown(name: str) -> str:
    """Return the name of a signal as users know it."""
    return "Ctrl-C" if name == "SIGINT" else name


def stop_error(name: str, fact: str) -> Preempted | Interrupted:
    """Return the error that ends a run which the signal `name` stopped."""
    error = (Interrupted if name == "SIGINT" else Preempted)(f"{fact} Run the same command to resume.")
    error.signal = name
    return error
