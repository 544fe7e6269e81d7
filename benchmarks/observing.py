"""What recording costs: one run of the quickstart's DLRM that records only one step of each pair, chosen at random.

The time of a pair's recorded step minus that of the other one: its median, and a 95 % interval of that median. Added to
it: what the recorder does every half second (doubled, since half of the steps are recorded), and the CPU time of the
thread that writes the recordings. The last line is JSON. Two minutes on two quiet cores.
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import recmill
from recmill.observe import recorder as module
from recmill.observe.recorder import BACKWARD, FORWARD, INPUT, OTHER, SYNC, UPDATE, Recorder

_WARM_UP_PAIRS = 20
_GOAL_PERCENT, _GOAL_MB = 0.5, 50.0


class OneOfTwoSteps(Recorder):
    """Records one step of each pair, and notes how long each step took: seconds, and CPU seconds of this thread."""

    latest: "OneOfTwoSteps"

    def __init__(self) -> None:
        super().__init__()
        OneOfTwoSteps.latest = self
        self.counting = 0.0  # seconds
        self.taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self._order = random.Random(0)
        self._is_on = self._is_first = True
        self._before = _times()

    def lap(self, part: int) -> None:
        if self._is_on:
            super().lap(part)

    def exchanged(self, start: int, end: int) -> None:
        if self._is_on:
            super().exchanged(start, end)

    def count(self) -> None:
        before = _times()
        super().count()
        after = _times()
        self.counting += after[0] - before[0]
        self._before = self._before[0] + after[0] - before[0], self._before[1] + after[1] - before[1]

    def end_step(self) -> None:
        if self._is_on:
            super().end_step()
        now = _times()
        self.taken[self._is_on].append((now[0] - self._before[0], now[1] - self._before[1]))
        self._is_first = not self._is_first
        self._is_on = self._order.random() < 0.5 if self._is_first else not self._is_on
        self._before = _times()


def _times() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval: the order statistics of the sign test."""
    values = sorted(values)
    count = len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(int(count / 2 - reach), 0), min(math.ceil(count / 2 + reach), count - 1)
    return statistics.median(values), values[low], values[high]


def _percent(pairs: int, which: int) -> dict[str, float]:
    """Return what recording adds to a step, in percent; `which`: 0 seconds, 1 CPU seconds."""
    taken = OneOfTwoSteps.latest.taken
    on, off = ([times[which] for times in taken[is_on][_WARM_UP_PAIRS:pairs]] for is_on in (True, False))
    unrecorded = statistics.median(off)
    median, low, high = _median_with_interval([a - b for a, b in zip(on, off, strict=True)])
    added = {"percent": median, "from": low, "to": high}
    return {name: round(100 * value / unrecorded, 3) for name, value in added.items()}


def _held_mb(steps: int) -> float:
    """Return the MB of memory that a recorder and its writer hold at most, in steps of 5 ms."""
    tracemalloc.start()
    recorder = Recorder()
    recorder.begin(0)
    for step in range(steps):
        for part in (INPUT, SYNC, OTHER, FORWARD, BACKWARD, UPDATE, OTHER):
            recorder.lap(part)
        recorder.end_step()
        if step % 100 == 99:  # every half second
            recorder.count()
        if step % 400 == 399:  # the writer does it every 2 s
            recorder.drain()
    held = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12_000)
    steps = parser.parse_args().steps
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    writing: list[float] = []
    write = module._Writer._write

    def timed_write(writer: Any) -> None:
        started = time.thread_time()
        write(writer)
        writing.append(time.thread_time() - started)

    module._Writer._write = timed_write  # type: ignore[method-assign,assignment]
    module.Recorder = OneOfTwoSteps  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recmill.prepare("synthetic-clicks", folder / "clicks", rows=200_000)
        config = recmill.config.load_config("quickstart/dlrm").as_dict()
        config["data"]["path"] = str(folder / "clicks")
        config["train"] |= {"num_epochs": 1000, "max_steps": steps, "log_every_steps": 1000}
        config["eval"] |= {"every_steps": steps}
        config["checkpoint"] |= {"every_steps": steps}
        recmill.train(config, folder / "run")
        bytes_written = sum(file.stat().st_size for file in (folder / "run" / "trace").rglob("*") if file.is_file())
    taken = OneOfTwoSteps.latest.taken
    pairs = min(map(len, taken.values()))
    seconds, cpu_seconds = _percent(pairs, 0), _percent(pairs, 1)
    unrecorded = statistics.median(times[0] for times in taken[False])
    total = sum(times[0] for both in taken.values() for times in both)
    writer, counting = 100 * sum(writing) / total, 100 * 2 * OneOfTwoSteps.latest.counting / total
    facts = {
        "pairs": pairs,
        "step_ms": round(1e3 * unrecorded, 3),
        "added_percent": seconds,
        "added_cpu_percent": cpu_seconds,
        "counting_percent": round(counting, 3),
        "writer_percent": round(writer, 3),
        "total_percent": round(seconds["percent"] + counting + writer, 3),
        "memory_mb": round(_held_mb(10_000), 2),
        "bytes_per_recorded_step": round(bytes_written / (steps / 2)),
        "goals": {"total_percent": _GOAL_PERCENT, "memory_mb": _GOAL_MB},
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
