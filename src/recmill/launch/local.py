"""Start the processes of a job on this machine, on loopback only, and bring back its result or its first error.

Each worker runs `python -m recmill.worker`: a fresh interpreter, because thread counts and the allocator can only
be set before a process starts.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from recmill.errors import KINDS, ConfigError, ResourceError, UserError

_POLL_SECONDS = 0.05
_GATHER_SECONDS = 1.0  # after the first failure, how long the other ranks may tell their own story
_END_SECONDS = 10.0
# What can only be set before a process starts; a user's own values win.
TUNING = {
    # glibc gives large blocks back at once, so every step pays their page faults again: keeping them measured 1.2-1.3x.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    # Threads that wait for each other spin, by default for milliseconds: with one of two cores taken by another
    # program that measured 1k samples/s (DLRM), a short spin 40k; with both cores free 70k and 66k.
    "GOMP_SPINCOUNT": "2000",
}


class WorkerError(UserError):
    """A worker ended in a way that no user can cause: its traceback is the story."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass(frozen=True)
class Failure:
    """How a worker says why it ended; written to error-RANK.json before it leaves the group."""

    rank: int
    at: float
    kind: str  # a class name of recmill.errors, or "" for a crash
    message: str
    traceback: str


def is_launched() -> bool:
    """True inside a process that torchrun, or this launcher, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched_with(procs: int) -> bool:
    """True if the processes are there already; then nobody may ask for others."""
    if is_launched() and procs > 1:
        raise ConfigError(
            f"--procs {procs} inside a process that a launcher started (RANK and WORLD_SIZE are set). "
            "Leave --procs out under torchrun; otherwise unset RANK and WORLD_SIZE."
        )
    return is_launched()


def own_rank() -> int:
    """0 in a process that nobody launched. Under torchrun every process talks to the same terminal."""
    return int(os.environ["RANK"]) if is_launched() else 0


def leave(code: int) -> NoReturn:
    """End a launched process here and now: tearing the libraries down may abort it after all work is done.

    (Seen with gloo: 'terminate called without an active exception'.)
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(command: str, arguments: dict[str, Any], procs: int) -> Any:
    """Run `recmill.commands.<command>.work(world, **arguments)` in `procs` processes; rank 0's result comes back."""
    if procs < 1:
        raise ConfigError(f"--procs {procs}: at least one process is needed.")
    job = Path(tempfile.mkdtemp(prefix="recmill-job-"))
    try:
        (job / "job.json").write_text(json.dumps({"command": command, "arguments": arguments}), encoding="utf-8")
        workers: list[subprocess.Popen[bytes]] = []
        with _forwarded_signals(workers):
            _start(job, procs, workers)
            failed = _wait(workers)
        if failed:
            _end(workers)
            raise _first_error(job, failed)
        return json.loads((job / "result.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _start(job: Path, procs: int, workers: list[subprocess.Popen[bytes]]) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // procs)
    common = {**TUNING, "OMP_NUM_THREADS": str(threads), **os.environ}
    common |= {"WORLD_SIZE": str(procs), "LOCAL_WORLD_SIZE": str(procs), "RECMILL_JOB": str(job)}
    common["RECMILL_LAUNCHER"] = str(os.getpid())
    common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    # The rendezvous socket is bound here and handed to rank 0: no free-port race, and nobody outside can reach it.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        os.set_inheritable(listener.fileno(), True)
        common["MASTER_PORT"] = str(listener.getsockname()[1])
        for rank in range(procs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                own["RECMILL_STORE_FD"] = str(listener.fileno())
            with (job / f"out-{rank}.txt").open("wb") as quiet:
                output = None if rank == 0 else quiet  # the main rank speaks
                workers.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "recmill.worker"],  # -P: no modules of the current directory
                        env=common | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=[listener.fileno()] if rank == 0 else [],
                        start_new_session=True,  # Ctrl-C reaches the workers through us, once
                    )
                )


@contextlib.contextmanager
def _forwarded_signals(workers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Exit codes of the failed ranks at the time of the first failure; empty when all ended well."""
    while True:
        codes = {rank: worker.poll() for rank, worker in enumerate(workers)}
        if any(code for code in codes.values()):
            time.sleep(_GATHER_SECONDS)
            return {rank: code for rank, worker in enumerate(workers) if (code := worker.poll())}
        if all(code == 0 for code in codes.values()):
            return {}
        time.sleep(_POLL_SECONDS)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()  # its partners are gone: it can only wait for them
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_END_SECONDS)


def _first_error(job: Path, failed: dict[int, int]) -> BaseException:
    """What a user can mend, told first, explains the rest; then a rank killed from outside; then our own defects."""
    reports = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("error-*.json")]
    reports.sort(key=lambda report: report.at)
    told = {report.rank for report in reports}
    for report in reports:
        if report.kind == "KeyboardInterrupt":
            return KeyboardInterrupt()
        if report.kind in KINDS:
            error = KINDS[report.kind](report.message)
            error.__notes__ = [report.traceback]
            return error
    for rank, code in failed.items():
        if code < 0 and rank not in told:
            hint = " The system may have run out of memory." if -code == signal.SIGKILL else ""
            fact = f"Process {rank} of the job was killed by {signal.Signals(-code).name}.{hint}"
            return ResourceError(f"{fact} Run the same command to go on.")
    if reports:
        return WorkerError(f"Process {reports[0].rank} of the job failed: {reports[0].message}", reports[0].traceback)
    rank, code = next(iter(failed.items()))
    output = (job / f"out-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    return WorkerError(f"Process {rank} of the job ended with code {code} without a word.", output)
