"""Detect that this process no longer makes progress, write its stacks to files, and end it.

Long work calls `Heartbeat.beat`; a thread watches the time since the last beat.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recmill.files.atomic import write_json

_POLL_SECONDS = 0.5
_COLLECTIVES = ("/torch/distributed/", "/recmill/world.py")  # in the stack of a process that waits for others
_ANSWER_SECONDS = 5.0  # how much later another machine may notice the same hang
_MAX_RANKS_SHOWN = 4
_STORE = "/recmill/tables/stores/"  # in the stack of a process that waits for a row file
_LINGER_SECONDS = 10.0  # if a rank left at once, the others would report its absence instead of their stacks


@dataclass(frozen=True)
class Hang:
    """A process that made no progress for `seconds`. `frames`: the stack of its main thread, innermost last.

    `is_waiting`: it was in a collective, so that another rank may be the one that hangs. `silent`: the ranks that do
    not answer, because they were stopped or their machine cannot be reached.
    """

    rank: int
    step: int
    phase: str
    seconds: float
    frames: list[str]
    is_waiting: bool = False
    silent: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        did = "waited for the other ranks" if self.is_waiting else "made no progress"
        return f"rank {self.rank} {did} for {self.seconds:g} s, {self.phase}, after step {self.step:,}"

    @property
    def with_silent_ranks(self) -> str:
        return f"{self}" + "".join(f"; rank {rank} does not answer" for rank in self.silent[:_MAX_RANKS_SHOWN])


@dataclass(frozen=True)
class _Beat:
    phase: str
    step: int


class Heartbeat:
    """The last sign of progress of this process. Each beat is one assignment, so no lock is needed."""

    def __init__(self) -> None:
        self.last: _Beat | None = None

    def beat(self, phase: str, step: int | None = None) -> None:
        """Note that this process made progress; without `step`, at the same step as before."""
        if step is None:
            step = self.last.step if self.last else 0
        self.last = _Beat(phase, step)


@dataclass(frozen=True)
class Watch:
    """After `seconds` without a beat, stacks are written to the run directory and to our launcher's `job` directory.

    `silent_ranks` waits for answers of other ranks and returns those that give none.
    """

    rank: int
    seconds: float
    run: Path
    job: Path | None
    silent_ranks: Callable[[float], list[int]] = lambda _: []


@contextmanager
def watching(heartbeat: Heartbeat, watch: Watch, on_hang: Callable[[Hang], None]) -> Iterator[None]:
    """Within the block, after the first beat: if beats stop, call `on_hang` and end the process."""
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
        passed = min(now - polled_at, 2 * poll)  # at most two polls count: this process may have been stopped
        polled_at = now
        quiet = quiet + passed if seen is heartbeat.last else 0.0
        seen = heartbeat.last
        if seen is None:
            continue
        # Re-armed at each poll. If the main thread never releases Python's lock, only faulthandler can still act.
        faulthandler.dump_traceback_later(2 * watch.seconds, exit=True, file=sys.__stderr__ or 2)
        if quiet >= watch.seconds or (watch.job is not None and any(watch.job.glob("hang-*.json"))):
            on_hang(_report(watch, seen, quiet))
            time.sleep(_LINGER_SECONDS)
            os._exit(1)


def _report(watch: Watch, last: _Beat, quiet_seconds: float) -> Hang:
    """Write the stacks of this process to the directories of `watch`."""
    ident = threading.main_thread().ident
    assert ident is not None
    stack = traceback.extract_stack(sys._current_frames().get(ident))
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack]
    is_waiting = any(part in frame.filename for frame in stack for part in _COLLECTIVES)
    phase = last.phase
    if any(_STORE in frame.filename for frame in stack):
        phase += ", waiting for the disk of cached_ssd (tables.path)"
    # A rank that learned of the hang from another one does not wait: the launcher gathers reports for a short time.
    silent = watch.silent_ranks(_ANSWER_SECONDS if quiet_seconds >= watch.seconds else 0.0)
    hang = Hang(watch.rank, last.step, phase, round(quiet_seconds, 1), frames, is_waiting, silent)
    if watch.job is not None and watch.job.is_dir():  # its launcher may be gone
        write_json(watch.job / f"hang-{hang.rank}.json", asdict(hang))
    path = watch.run / f"hang-rank-{hang.rank}.txt"
    with contextlib.suppress(OSError), path.open("w", encoding="utf-8") as file:  # the directory may be gone, or full
        file.write(f"{hang.with_silent_ranks}\n\nmain thread:\n" + "\n".join(hang.frames) + "\n\nall threads:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    return hang


def read_hangs(job: Path) -> list[Hang]:
    """Return the hangs that the workers of a job reported: those that only wait come last, otherwise by step."""
    hangs = [Hang(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("hang-*.json")]
    return sorted(hangs, key=lambda hang: (hang.is_waiting, hang.step, hang.rank))
