"""Run contenders in turns: all are started, then paused (SIGSTOP) except during their turns, so noise hits all alike.

Each contender records when its steps ended: ours in metrics.jsonl, the others with `Notes`.
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

_RECORD = struct.Struct("ddd")


class Notes:
    """Record when a step ended, and its number of samples and, if they are counted separately, of items."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # an integer, so that `Notes` can be copied

    def step(self, samples: int, items: int = 0) -> None:
        os.write(self._file, _RECORD.pack(time.time(), samples, items))


@dataclass(frozen=True)
class Work:
    """The work of some steps, or the work per second."""

    samples: float
    items: float = 0.0


def noted_times(path: Path) -> list[float]:
    """Return the time at which each step so far ended."""
    return [at for at, _, _ in _records(path)]


def noted_work(path: Path, steps: slice) -> Work:
    records = _records(path)[steps]
    return Work(sum(samples for _, samples, _ in records), sum(items for _, _, items in records))


def _records(path: Path) -> list[tuple[float, ...]]:
    whole = path.read_bytes() if path.is_file() else b""
    return list(_RECORD.iter_unpack(whole[: len(whole) // _RECORD.size * _RECORD.size]))


def our_times(run: Path) -> list[float]:
    """Return the same from metrics.jsonl of a run with `train.log_every_steps = 1`."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    return [json.loads(line)["time"] for line in lines if line.endswith("\n")]


class Contender:
    """The processes of a contender, from their start to `end()`. Their temporary directories are beside `log`.

    `times` returns when each step so far ended, `work` the work of some of them; it is called only during a pause.
    """

    def __init__(
        self,
        name: str,
        commands: list[list[str]],
        environments: list[dict[str, str]],
        log: Path,
        times: Callable[[], list[float]],
        work: Callable[[slice], Work],
        first_steps: int = 5,  # before the first turn
    ) -> None:
        self.name, self._log, self._times, self._work = name, log, times, work
        self._first_steps = first_steps
        with log.open("wb") as output:
            self._processes = [
                subprocess.Popen(command, env={**environment, "TMPDIR": str(log.parent)}, stdout=output, stderr=output)
                for command, environment in zip(commands, environments, strict=True)
            ]

    def start(self) -> None:
        """Wait for the first steps, then pause the processes."""
        while len(self._times()) < self._first_steps:
            self._check()
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> Work:
        """Resume for `seconds` and return the work per second of at least two complete steps.

        The step that the pause before interrupted does not count.
        """
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
        """Return the ids of the processes and of their children: workers of our launcher, and of loaders."""
        pids = [process.pid for process in self._processes if process.poll() is None]
        for pid in pids:
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pids


Rates = dict[str, list[Work]]  # by contender and round


def run_all(contenders: Iterable[Contender], rounds: int, seconds: float) -> tuple[Rates, dict[str, int]]:
    """Return the rates and the peak memory (MB) of each contender. No process is left running, whatever happens."""
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


def run_anew(rounds: Iterable[Iterable[Contender]], seconds: float) -> tuple[Rates, dict[str, int]]:
    """Return the rates and the GPU memory (MB) of contenders that run alone, one after the other.

    Collectives of a paused process would keep its GPU busy during the turns of others.
    """
    rates: Rates = {}
    memory: dict[str, int] = {}
    for contenders in rounds:
        for contender in contenders:
            try:
                contender.start()
                rates.setdefault(contender.name, []).append(contender.turn(seconds))
                memory[contender.name] = gpu_memory_mb()
            finally:
                contender.end()
            print(f"{contender.name} {rates[contender.name][-1].samples:,.1f}", flush=True)
    return rates, memory


def gpu_memory_mb() -> int:
    """Return the memory in use on all GPUs. torch keeps what it has allocated, so this is a running program's peak."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))


def median_ratio(ours: list[float], others: list[float]) -> float:
    """Return the median ratio of neighbouring turns, because the speed of the machine changes."""
    return round(statistics.median(a / b for a, b in zip(ours, others, strict=True)), 3)
