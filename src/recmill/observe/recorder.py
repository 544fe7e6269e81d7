"""Record where the time of a rank goes: the parts of every step, spans on all threads, and counters of the process.

Recording is always on. Numbers go to a queue, and a thread writes them to the run directory every few seconds; the
format is described in docs/architecture.md. Recording never ends a run: what cannot be written is left out.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from recmill.failpoints import reach
from recmill.files.atomic import write_json
from recmill.observe.counters import counters

log = logging.getLogger(__name__)

T = TypeVar("T")

PARTS = ("input", "sync", "exchange", "forward", "backward", "update", "save", "validate", "other")
INPUT, SYNC, EXCHANGE, FORWARD, BACKWARD, UPDATE, SAVE, VALIDATE, OTHER = range(len(PARTS))
PAUSES = (SAVE, VALIDATE)  # not counted as a part of the step that they follow
SPANS = (*PARTS, "step", "start-up", "prepare batch", "write checkpoint", "test", "profile")
TRACKS = ("training", "prefetch", "saving")
SPAN = np.dtype([("start", "<i8"), ("duration", "<i8"), ("step", "<i4"), ("name", "u1"), ("track", "u1")])
STEP = np.dtype([("start", "<i8"), ("step", "<u4"), ("steps", "<u4"), ("parts", "<f4", (len(PARTS),))])

WARM_UP_STEPS = 10  # the first ones compile and allocate: the verdict leaves them out
_COUNTER_SECONDS = 2.0
_GROWING = {"cpu_s", "minor_faults", "major_faults", "switches", "involuntary_switches", "read_bytes", "write_bytes"}
_GROWING |= {"cpu_pressure_s", "io_pressure_s", "memory_pressure_s", "throttled_s"}
_WAIT, _END = -1, -2  # marks that are no part
_STEP_SPAN = SPANS.index("step")
_COUNT_NS = 500_000_000  # how long marks may wait until they are counted
_MARKS = 100_000
_LATENCIES = 10_000  # steps of which a report gives percentiles
_STUCK_SECONDS = 30.0  # a run does not wait longer for a disk that hangs
_QUEUED = 500_000  # the newest records are kept if the disk does not take them
# After N records of a kind, only every second one is written, after N more every fourth, and so on: 10 million steps
# make 14 MB of steps and 12 MB of spans, and 30 days of counters 20 MB.
_STEP_RECORDS = 1 << 15
_STEPS_WITH_SPANS = 1000
_COUNTER_LINES = 5000

_now = time.perf_counter_ns


class Thinning:
    """Which of many events to keep: all of the first `count`, every second one of the following, and so on."""

    def __init__(self, count: int) -> None:
        self.stride = 1
        self._count = count
        self._kept = 0
        self._skip = 0

    def keeps(self) -> bool:
        """Return whether to keep the next event."""
        if self._skip:
            self._skip -= 1
            return False
        self._kept += 1
        if self._kept == self._count:
            self._kept = 0
            self.stride *= 2
        self._skip = self.stride - 1
        return True


class Recorder:
    """The clock of one rank. Only `span` and `around_next` may be called by other threads than the training's."""

    def __init__(self) -> None:
        self.sums = [0] * len(PARTS)  # nanoseconds since the first step; pauses: in the complete run
        self.steps = 0  # that `sums` counts
        self._seen = 0
        self.directory: Path | None = None  # while files are written there
        self.counted: dict[str, float] = {}  # counters of this process from `begin` to `finish`, and the "seconds"
        self.clock = clock_pair()
        self._started = self._last = self._began = self.clock[1]
        self._parts = [0] * len(PARTS)
        self._exchanged = 0
        self._durations: deque[int] = deque(maxlen=_LATENCIES)  # of the steps since the last report
        self._is_reported = False  # the step under way
        self._thread = threading.get_ident()
        self._marks: list[tuple[int, int, int]] = []  # a part, its end, 0; or _WAIT, start, end; or _END, time, spans?
        self._step = self._counted_step = 0  # under way; next one that count() sees the end of
        self._spans: deque[tuple[int, int, int, int, int]] = deque(maxlen=_QUEUED)
        self._records: deque[tuple[int, int, int, tuple[int, ...]]] = deque(maxlen=_QUEUED)
        self._with_spans = Thinning(_STEPS_WITH_SPANS)
        self._has_spans = self._counted_has_spans = False  # until the first step
        self._record_every = Thinning(_STEP_RECORDS)
        self._block: tuple[int, int, list[int]] | None = None  # start, steps and parts of the next record

    def begin(self, step: int) -> None:
        """Start the clock: the next lap begins now."""
        self._counters = counters()
        self._step = self._counted_step = step
        self._first = self._last = self._began = self._counted_at = _now()
        self._has_spans = self._counted_has_spans = self._with_spans.keeps()
        self._spans.append((self._started, self._began - self._started, step, SPANS.index("start-up"), 0))

    # Code that runs once in a step finds the caches cold, and is four times as slow as in a loop. So a step only leaves
    # marks, and count() adds up those of many steps.

    def lap(self, part: int) -> None:
        """Count the time since the last lap as `part`, without the exchanges in it."""
        self._marks.append((part, _now(), 0))

    def exchanged(self, start: int, end: int) -> None:
        """Count a wait for other ranks, if the training thread waited; the lap in which it is tells what it was."""
        if threading.get_ident() == self._thread:
            self._marks.append((_WAIT, start, end))
            if len(self._marks) > _MARKS:  # a long validation
                self.count()

    def end_step(self) -> None:
        """Count the rest of the step as "other", and begin the next one."""
        now = _now()
        self._step += 1
        self._has_spans = self._with_spans.keeps()
        self._marks.append((_END, now, self._has_spans))
        if now - self._counted_at > _COUNT_NS:
            self.count()

    def count(self) -> None:
        """Add up the marks since the last call; only the thread that left them may call this."""
        marks, self._marks = self._marks, []
        for kind, at, more in marks:
            if kind == _END:
                self._count_step(at)
                self._counted_has_spans = bool(more)
            elif kind == _WAIT:
                self._exchanged += more - at
                if self._counted_has_spans and not self._parts[UPDATE]:  # not those of a validation after the step
                    self._spans.append((at, more - at, self._counted_step, EXCHANGE, 0))
            else:
                self._count_lap(kind, at)
        self._counted_at = _now()

    def _count_lap(self, part: int, now: int) -> None:
        spent = now - self._last
        if self._counted_has_spans or part in PAUSES:
            self._spans.append((self._last, spent, self._counted_step, part, 0))
        self._last = now
        if self._exchanged:
            if FORWARD <= part <= UPDATE:
                self._parts[EXCHANGE] += self._exchanged
                spent -= self._exchanged
            self._exchanged = 0
        self._parts[part] += spent

    def _count_step(self, now: int) -> None:
        parts = self._parts
        parts[OTHER] += now - self._last
        self._last = now
        self._exchanged = 0
        self._seen += 1
        if not self._is_reported:
            self._durations.append(now - self._began - parts[SAVE] - parts[VALIDATE])
        self._is_reported = False
        is_counted = self._seen > WARM_UP_STEPS
        self.steps += is_counted
        for part in range(len(PARTS)) if is_counted else PAUSES:
            self.sums[part] += parts[part]
        if self._counted_has_spans:
            self._spans.append((self._began, now - self._began, self._counted_step, _STEP_SPAN, 0))
        start, steps, block = self._began, 0, parts
        if self._block:
            start, steps, block = self._block
            block = [a + b for a, b in zip(block, parts, strict=True)]
        self._counted_step += 1
        if self._record_every.keeps():
            self._records.append((start, self._counted_step, steps + 1, tuple(block)))
            self._block = None
        else:
            self._block = start, steps + 1, block
        self._parts = [0] * len(PARTS)
        self._began = now

    def finish(self) -> None:
        """Count what was done after the last step, and what the counters counted since the first."""
        self.count()
        now = counters()
        grown = {name: now[name] - before for name, before in self._counters.items() if name in _GROWING & now.keys()}
        self.counted = {"seconds": (_now() - self._first) / 1e9, "peak_rss": now["peak_rss"], **grown}
        for part in PAUSES:
            self.sums[part] += self._parts[part]
        self._parts = [0] * len(PARTS)

    def latency(self) -> dict[str, float]:
        """Return how long the steps since the last call took, with that under way: median and 95 % quantile, in ms."""
        self.count()
        durations = sorted([*self._durations, _now() - self._began - self._parts[SAVE]])
        self._durations.clear()
        self._is_reported = True
        p50, p95 = (durations[min(int(q * len(durations)), len(durations) - 1)] / 1e6 for q in (0.5, 0.95))
        return {"step_ms_p50": p50, "step_ms_p95": p95}

    @contextlib.contextmanager
    def span(self, name: str, track: str = "training") -> Iterator[None]:
        """Record the time within the block."""
        start = _now()
        try:
            yield
        finally:
            self._spans.append((start, _now() - start, self._step, SPANS.index(name), TRACKS.index(track)))

    def around_next(self, items: Iterator[T], name: str, track: str) -> Iterator[T]:
        """Yield the items, and record how long each of them took to make."""
        number, on = SPANS.index(name), TRACKS.index(track)
        while True:
            start = _now()
            try:
                item = next(items)
            except StopIteration:
                return
            if self._has_spans:
                self._spans.append((start, _now() - start, -1, number, on))
            yield item

    @contextlib.contextmanager
    def writing(self, directory: Path | None, facts: dict[str, Any]) -> Iterator[None]:
        """Within the block, write what is recorded to `directory`, which exists, with `facts`; None: to no file."""
        if directory is None:
            yield
            return
        self.directory = directory
        writer = _Writer(self, directory, facts)
        writer.start()
        try:
            yield
        finally:
            self.count()
            writer.stop()

    def drain(self) -> tuple[np.ndarray, np.ndarray]:
        """Take the spans and steps that were counted so far."""
        spans, records = ([queue.popleft() for _ in range(len(queue))] for queue in (self._spans, self._records))
        steps = np.array(records, STEP)
        steps["parts"] /= 1e9  # seconds
        return np.array(spans, SPAN), steps


class _Writer(threading.Thread):
    """Writes what a recorder holds and what the counters say, every few seconds."""

    def __init__(self, recorder: Recorder, directory: Path, facts: dict[str, Any]) -> None:
        super().__init__(name="observe", daemon=True)
        self._recorder = recorder
        self._files = rank_files(directory, facts["rank"])
        self._is_over = threading.Event()
        self._facts = {"host": socket.gethostname(), "pid": os.getpid(), **facts, "spans": SPANS, "tracks": TRACKS}
        self._facts |= {"parts": PARTS, "clock": [recorder.clock]}
        self._thinning = Thinning(_COUNTER_LINES)
        self._is_broken = False

    def run(self) -> None:
        self._safely(self._begin)
        while not self._is_over.wait(_COUNTER_SECONDS) and not self._is_broken:
            self._safely(self._write)

    def stop(self) -> None:
        self._is_over.set()
        self.join(_STUCK_SECONDS)
        if self.is_alive():
            folder = self._files["spans"].parent
            log.warning("%s: its disk does not answer: the end of this run is not recorded.", folder)
            return
        self._safely(self._write)
        self._safely(self._end)

    def _safely(self, write: Any) -> None:
        if self._is_broken:
            return
        try:
            write()
        except OSError as error:
            self._is_broken = True
            where = error.filename or self._files["spans"].parent
            log.warning("%s: cannot be written (%s): this run is not recorded any further.", where, error.strerror)

    def _begin(self) -> None:
        write_json(self._files["facts"], self._facts)
        self._write()

    def _write(self) -> None:
        reach("observe.write")
        spans, steps = self._recorder.drain()
        for name, values in (("spans", spans), ("steps", steps)):
            if len(values):
                with self._files[name].open("ab") as file:
                    file.write(values.tobytes())
        if self._thinning.keeps():
            with self._files["counters"].open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps(dict(zip(("unix_ns", "clock_ns"), clock_pair(), strict=True)) | counters()) + "\n"
                )

    def _end(self) -> None:
        self._facts["clock"].append(clock_pair())
        write_json(self._files["facts"], self._facts)


def clock_pair() -> list[int]:
    """Return the time since 1970 and that of the clock of spans, both in ns."""
    return [unix_ns(), _now()]


def unix_ns() -> int:
    return time.time_ns()


def rank_files(directory: Path, rank: int) -> dict[str, Path]:
    """Return the files of one rank."""
    names = {"facts": "json", "spans": "spans", "steps": "steps", "counters": "counters.jsonl"}
    return {name: directory / f"rank-{rank}.{suffix}" for name, suffix in names.items()}
