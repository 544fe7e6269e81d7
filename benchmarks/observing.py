"""What recording costs: one run of the quickstart's DLRM in which every second step is not recorded.

The steps themselves are compared by their medians; the time of the thread that writes the recordings is added.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import recmill
from recmill.observe import recorder as module
from recmill.observe.recorder import Recorder


class EverySecondStep(Recorder):
    """Records the steps with an even number only, and notes how long each step took."""

    latest: "EverySecondStep"

    def __init__(self) -> None:
        super().__init__()
        EverySecondStep.latest = self
        self.taken: list[float] = []
        self._is_on = True
        self._before = time.perf_counter()

    def lap(self, part: int) -> None:
        if self._is_on:
            super().lap(part)

    def exchanged(self, start: int, end: int) -> None:
        if self._is_on:
            super().exchanged(start, end)

    def end_step(self) -> None:
        if self._is_on:
            super().end_step()
        now = time.perf_counter()
        self.taken.append(now - self._before)
        self._is_on = not self._is_on
        self._last = self._began = module._now()
        self._before = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    writing: list[float] = []
    write = module._Writer._write

    def timed_write(writer: Any) -> None:
        started = time.thread_time()
        write(writer)
        writing.append(time.thread_time() - started)

    module._Writer._write = timed_write  # type: ignore[method-assign,assignment]
    module.Recorder = EverySecondStep  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recmill.prepare("synthetic-clicks", folder / "clicks", rows=500_000)
        config = recmill.config.load_config("quickstart/dlrm").as_dict()
        config["data"]["path"] = str(folder / "clicks")
        config["train"] |= {"num_epochs": 100, "max_steps": steps, "log_every_steps": 1000}
        config["eval"] |= {"every_steps": steps}
        config["checkpoint"] |= {"every_steps": steps}
        recmill.train(config, folder / "run")
        bytes_written = sum(file.stat().st_size for file in (folder / "run" / "trace").rglob("*") if file.is_file())
    taken = EverySecondStep.latest.taken[20:]
    on, off = statistics.median(taken[::2]), statistics.median(taken[1::2])
    writer = sum(writing) / sum(taken)
    facts = {
        "steps": len(taken),
        "recorded_ms": round(1e3 * on, 4),
        "unrecorded_ms": round(1e3 * off, 4),
        "ratio": round(on / off + writer, 5),
        "writer_percent": round(100 * writer, 3),
        "bytes_per_recorded_step": round(bytes_written / (steps / 2)),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
