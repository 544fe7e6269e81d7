"""Detect a process that no longer makes progress, write down where it is, and end it. No torch.

Long work calls `Heartbeat.beat`; a thread of each process watches the time since the last beat.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill.files.atomic import write_json

_POLL_SECONDS = 0.5
_LINGER_SECONDS = 10.0  # a rank that leaves at once would make the others report its absence instead of their stacks
_NUM_FRAMES = 4


@dataclass(frozen=True)
class Hang:
    """The state of a process that made no progress for `seconds`. `frames` are its main thread's, innermost last."""

    rank: int
    step: int
    phase: str
    seconds: float
    frames: list[str]

    def __str__(self) -> str:
        return f"rank {self.rank} made no progress for {self.seconds:g} s, {self.phase}, after step {self.step:,}"

    def innermost_frames(self) -> str:
        return "".join(f"\n    {frame}" for frame in self.frames[-_NUM_FRAMES:])


@dataclass(frozen=True)
class _Beat:
    count: int
    phase: str
    step: int


class Heartbeat:
    """The last sign of progress of this process. No lock: each beat is one assignment."""

    def __init__(self) -> None:
        self.last: _Beat | None = None

    def beat(self, phase: str, step: int | None = None) -> None:
        """Note that this process made progress; without a `step` it is still at the one before."""
        before = self.last or _Beat(0, "", 0)
        self.last = _Beat(before.count + 1, phase, before.step if step is None else step)


@dataclass(frozen=True)
class Watch:
    """What to watch: after `seconds` without a beat, stacks are written to `run` and the launcher's `job` directory."""

    rank: int
    seconds: float
    run: Path
    job: Path | None


@contextmanager
def watching(heartbeat: Heartbeat, watch: Watch, on_hang: Callable[[Hang], None]) -> Iterator[None]:
    """Within the block, from the first beat on: if beats stop, call `on_hang` and end the process."""
    end = threading.Event()
    thread = threading.Thread(target=_watch, args=(heartbeat, watch, on_hang, end), daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(heartbeat: Heartbeat, watch: Watch, on_hang: Callable[[Hang], None], end: threading.Event) -> None:
    poll = min(_POLL_SECONDS, watch.seconds / 4)
    seen = heartbeat.last
    quiet = 0.0
    polled_at = time.monotonic()
    while not end.wait(poll):
        now = time.monotonic()
        passed = min(now - polled_at, 2 * poll)  # a process that was itself stopped has not hung
        polled_at = now
        quiet = quiet + passed if seen is heartbeat.last else 0.0
        seen = heartbeat.last
        if seen is None:
            continue
        # If the main thread never releases Python's lock, this thread cannot run; faulthandler needs no lock.
        faulthandler.dump_traceback_later(2 * watch.seconds, exit=True, file=sys.__stderr__ or 2)
        if quiet >= watch.seconds or (watch.job is not None and any(watch.job.glob("hang-*.json"))):
            hang = Hang(watch.rank, seen.step, seen.phase, round(quiet, 1), _main_thread_frames())
            _report(hang, watch, on_hang)
            time.sleep(_LINGER_SECONDS)
            os._exit(1)


def _main_thread_frames() -> list[str]:
    ident = threading.main_thread().ident
    assert ident is not None
    stack = traceback.extract_stack(sys._current_frames().get(ident))
    return [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack]


def _report(hang: Hang, watch: Watch, on_hang: Callable[[Hang], None]) -> None:
    if watch.job is not None:
        write_json(watch.job / f"hang-{hang.rank}.json", asdict(hang))
    with (watch.run / f"hang-rank-{hang.rank}.txt").open("w", encoding="utf-8") as file:
        file.write(f"{hang}\n\nmain thread:\n" + "\n".join(hang.frames) + "\n\nall threads:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    on_hang(hang)


def read_hangs(job: Path) -> list[Hang]:
    """Return what the workers of a job reported, the one furthest behind first."""
    hangs = [Hang(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("hang-*.json")]
    return sorted(hangs, key=lambda hang: (hang.step, hang.rank))
