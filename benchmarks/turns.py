"""Contenders that are all started, then stand still (SIGSTOP) but for turns: what the machine does meets all alike.

Each notes when its steps ended: ours in metrics.jsonl, the others by `Notes`.
"""

import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_FIRST_STEPS = 5  # before the first turn
_RECORD = struct.Struct("ddd")


class Notes:
    """What a contender writes: when a step ended, of how many samples and, where that differs, items."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # a number, so that it can be copied

    def step(self, samples: int, items: int = 0) -> None:
        os.write(self._file, _RECORD.pack(time.time(), samples, items))


@dataclass(frozen=True)
class Work:
    """Of some steps; or per second."""

    samples: float
    items: float = 0.0


def noted_times(path: Path) -> list[float]:
    """When each step so far ended."""
    return [at for at, _, _ in _records(path)]


def noted_work(path: Path, steps: slice) -> Work:
    records = _records(path)[steps]
    return Work(sum(samples for _, samples, _ in records), sum(items for _, _, items in records))


def _records(path: Path) -> list[tuple[float, ...]]:
    whole = path.read_bytes() if path.is_file() else b""
    return list(_RECORD.iter_unpack(whole[: len(whole) // _RECORD.size * _RECORD.size]))


def our_times(run: Path) -> list[float]:
    """From metrics.jsonl, with `train.log_every_steps = 1`."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    return [json.loads(line)["time"] for line in lines if line.endswith("\n")]


class Contender:
    """Its processes, from the start to `end()`; what they leave in temporary directories stays beside `log`.

    `times`: when each step so far ended. `work`: what some of them did; asked only while it stands still.
    """

    def __init__(
        self,
        name: str,
        commands: list[list[str]],
        environments: list[dict[str, str]],
        log: Path,
        times: Callable[[], list[float]],
        work: Callable[[slice], Work],
    ) -> None:
        self.name, self._log, self._times, self._work = name, log, times, work
        with log.open("wb") as output:
            self._processes = [
                subprocess.Popen(command, env={**environment, "TMPDIR": str(log.parent)}, stdout=output, stderr=output)
                for command, environment in zip(commands, environments, strict=True)
            ]

    def start(self) -> None:
        """Its first steps; then it stands still."""
        while len(self._times()) < _FIRST_STEPS:
            self._check()
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> Work:
        """Per second, of whole steps, at least two; the one that the last turn cut in two is left out."""
        before = len(self._times())
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        while len(self._times()) < before + 3:
            self._check()
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)
        times = self._times()
        work, took = self._work(slice(before + 1, len(times))), times[-1] - times[before]
        return Work(work.samples / took, work.items / took)

    def peak_mb(self) -> int:
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        return round(sum(int(text.split("VmHWM:")[1].split()[0]) for text in statuses) / 1024)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def signal(self, number: int) -> None:
        for pid in self._pids():
            os.kill(pid, number)

    def _check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            sys.exit(f"{self.name} failed:\n{self._log.read_text(errors='replace')[-3000:]}")

    def _pids(self) -> list[int]:
        """Ours starts workers, and loaders may."""
        pids = [process.pid for process in self._processes if process.poll() is None]
        for pid in pids:
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pids


Rates = dict[str, list[Work]]  # by contender and round


def run_all(contenders: Iterable[Contender], rounds: int, seconds: float) -> tuple[Rates, dict[str, int]]:
    """Rates, and each one's peak memory in MB. Whatever happens, none is left running."""
    started: list[Contender] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("terminated"))
    try:
        for contender in contenders:
            started.append(contender)
            contender.start()
            print(f"{contender.name} is ready", flush=True)
        rates: Rates = {contender.name: [] for contender in started}
        for number in range(rounds):
            for contender in started:
                rates[contender.name].append(contender.turn(seconds))
            print(
                f"round {number + 1:2} ", *(f"{name} {of[-1].samples:,.1f}" for name, of in rates.items()), flush=True
            )
        return rates, {contender.name: contender.peak_mb() for contender in started}
    finally:
        for contender in started:
            contender.end()


def median_ratio(ours: list[float], others: list[float]) -> float:
    """Of neighbours in time, because the machine changes."""
    return round(statistics.median(a / b for a, b in zip(ours, others, strict=True)), 3)
