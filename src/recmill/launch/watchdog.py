"""Notices that a process of a run no longer gets anywhere, tells where it is, and which process the others wait for.

The loops `beat` as they go; a thread of each process watches. No torch.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

SAVING = "saving"  # the name of a thread that the main one may wait for
_POLL_SECONDS = 0.5
_LINGER_SECONDS = 10.0  # so that others tell their own story, not of a partner that left
# The innermost frames of a process that waits for others; inside backward there may be a wait that Python cannot see.
_WAITING = ("/torch/distributed/", "/torchrec/distributed/", "/recmill/world.py")
_MAYBE_WAITING = "/torch/autograd/"
_INNERMOST = 2


@dataclass(frozen=True)
class Hang:
    """What a process tells of itself: `frames` of its main thread, "FILE:LINE FUNCTION: CODE", the innermost last."""

    rank: int
    step: int
    phase: str
    seconds: float
    frames: list[str]

    @property
    def waits(self) -> int:
        """0: at work of its own; 1: in backward, perhaps waiting; 2: waiting for other processes."""
        innermost = self.frames[-_INNERMOST:]
        if any(sign in frame for frame in innermost for sign in _WAITING):
            return 2
        return int(any(_MAYBE_WAITING in frame for frame in innermost))

    def told(self) -> str:
        return f"rank {self.rank} made no progress for {self.seconds:g} s, {self.phase}, after step {self.step:,}"


class _Beats:
    """The last sign of life. Written without a lock: each write is one assignment."""

    def __init__(self) -> None:
        self.last: tuple[int, str, int] | None = None  # count, phase, step


_beats = _Beats()


def beat(phase: str, step: int | None = None) -> None:
    """This process got somewhere. Without a step: still at the one before."""
    count, _, before = _beats.last or (0, "", 0)
    _beats.last = (count + 1, phase, before if step is None else step)


@contextmanager
def watching(rank: int, seconds: float, run: Path, job: Path | None, on_hang: Callable[[Hang], None]) -> Iterator[None]:
    """From the first beat on: after `seconds` without one `on_hang` is called, and the process ends.

    `run`: where stacks are kept; `job`: where processes of our own launcher tell it, and one another.
    """
    _beats.last = None
    end = threading.Event()
    thread = threading.Thread(target=_watch, args=(rank, seconds, run, job, on_hang, end), daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(
    rank: int, seconds: float, run: Path, job: Path | None, on_hang: Callable[[Hang], None], end: threading.Event
) -> None:
    poll = min(_POLL_SECONDS, seconds / 4)
    seen, quiet, polled_at = _beats.last, 0.0, time.monotonic()
    while not end.wait(poll):
        now = time.monotonic()
        passed, polled_at = min(now - polled_at, 2 * poll), now  # a process that was itself stopped has not hung
        is_new, seen = seen != _beats.last, _beats.last
        quiet = 0.0 if is_new or seen is None else quiet + passed
        if seen is None:
            continue
        # If the main thread never gives Python's lock back, this thread cannot run; that one needs no lock.
        faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__ or 2)
        is_other_hung = job is not None and any(job.glob("hang-*.json"))
        if quiet >= seconds or is_other_hung:
            _, phase, step = seen
            hang = Hang(rank, step, phase, round(quiet, 1), _main_frames())
            _tell(hang, run, job, on_hang)
            time.sleep(_LINGER_SECONDS)
            os._exit(1)


def _main_frames() -> list[str]:
    """Of the main thread, or of the one that it waits for: a save."""
    frames = _frames(threading.main_thread())
    saving = next((thread for thread in threading.enumerate() if thread.name == SAVING), None)
    return _frames(saving) if saving and any("/threading.py" in frame for frame in frames[-_INNERMOST:]) else frames


def _frames(thread: threading.Thread) -> list[str]:
    assert thread.ident is not None
    stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
    return [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack]


def _tell(hang: Hang, run: Path, job: Path | None, on_hang: Callable[[Hang], None]) -> None:
    if job is not None:
        partial = job / f".hang-{hang.rank}"
        partial.write_text(json.dumps(asdict(hang)), encoding="utf-8")
        os.replace(partial, job / f"hang-{hang.rank}.json")
    with (run / f"hang-rank-{hang.rank}.txt").open("w", encoding="utf-8") as file:
        file.write(f"{hang.told()}\n\nmain thread:\n" + "\n".join(hang.frames) + "\n\nall threads:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    on_hang(hang)


def read_hangs(job: Path) -> list[Hang]:
    return [Hang(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(job.glob("hang-*.json"))]


def culprit(hangs: Sequence[Hang], silent: Sequence[int]) -> int:
    """The rank that the others wait for. `silent`: ranks that told nothing though they live.

    At work of its own; else silent (stopped, or it never gives Python's lock back); else the one furthest behind.
    """
    likeliest = min(hangs, key=lambda hang: (hang.waits, hang.step, hang.rank))
    return silent[0] if silent and likeliest.waits else likeliest.rank
