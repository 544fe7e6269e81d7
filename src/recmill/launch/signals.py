"""Being asked to stop: what signals mean to a run, from the first moment of its processes on. No torch."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from recmill.errors import Interrupted, Preempted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # what the launcher hands on
# A scheduler may signal every process of a job, and the launcher hands on its own: within this it is one request.
ONE_REQUEST_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, order=True)
class Heard:
    """`rank` received `signal` at `at`, in seconds since 1970; a group stops for the earliest."""

    at: float
    rank: int
    signal: str

    @property
    def state(self) -> Literal["preempted", "interrupted"]:
        return "interrupted" if self.signal == "SIGINT" else "preempted"


class StopRequest:
    """The first signal asks for a clean stop after the current step; a second one ends the process."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.at = 0.0

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def heard_by(self, rank: int) -> Heard | None:
        return Heard(self.at, rank, self.signal) if self.signal else None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        if self.signal is None:
            self.signal, self.at = signal.Signals(number).name, time.time()
        elif time.time() - self.at > ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt


_listening: StopRequest | None = None


@contextmanager
def listening(names: Sequence[str]) -> Iterator[StopRequest]:
    """SIGINT and the signals of these names ask for a stop. The process has one request: inner blocks share it."""
    global _listening
    if _listening:
        yield _listening
        return
    request = _listening = StopRequest()
    try:
        with handled([signal.SIGINT, *(signal.Signals[name] for name in names)], request.ask):
            yield request
    finally:
        _listening = None


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """By `handler`, until the block ends; in the main thread, which alone gets signals from Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def stop_with_parent() -> None:
    """If the process that started this one is killed, stop as if asked to: finish the step, save, leave."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def error_for(name: str, text: str) -> Preempted | Interrupted:
    error = (Interrupted if name == "SIGINT" else Preempted)(f"{text} Run the same command to go on.")
    error.signal = name
    return error
