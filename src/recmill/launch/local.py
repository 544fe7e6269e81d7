"""Start the processes of a job on this machine, on loopback only, and bring back its result or its first error.

Each worker runs `python -m recmill.launch.worker`: a fresh interpreter, because thread counts and the allocator
can only be set before a process starts.
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
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from recmill.errors import KINDS, ConfigError, ResourceError, UserError
from recmill.hardware.cpu import threads_per_process
from recmill.launch.signals import ONE_REQUEST_SECONDS, SIGNALS, error_for, handled
from recmill.launch.watchdog import Hang, culprit, read_hangs

_POLL_SECONDS = 0.05
_GATHER_SECONDS = 1.0  # after the first failure, how long the other ranks may tell their own story
_GATHER_HANGS_SECONDS = 3.0  # the same after the first process that says it hangs
_SECOND_SIGNAL_SECONDS = 2.0  # how long workers have to end at once
_END_SECONDS = 10.0
_NUM_LINES = 4  # of a stack, in a message

log = logging.getLogger(__name__)
# What can only be set before a process starts; a user's own values win.
TUNING = {
    # glibc gives large blocks back at once, so every step pays their page faults again: keeping them measured 1.2-1.3x.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    # Threads that wait for each other spin, by default for milliseconds: with one of two cores taken by another
    # program that measured 1k samples/s (DLRM), a short spin 40k; with both cores free 70k and 66k.
    "GOMP_SPINCOUNT": "2000",
}


# What a signal that killed a worker hints at; another attempt may succeed.
_HINTS = {
    "SIGKILL": " The system may have run out of memory.",
    "SIGSEGV": " Native code accessed memory that is not its own. If it happens again, try train.kernels=torch.",
    "SIGBUS": " A mapped file was truncated or cannot be read, or /dev/shm is full.",
}
_MISSING_INSTRUCTION = (
    "The CPU, or the hypervisor it runs under, lacks an instruction that it lists, and would lack it again. Set the "
    "environment variable ONEDNN_MAX_CPU_ISA=AVX2, or train.kernels=torch, or train.precision=float32. "
    "See also: recmill doctor."
)


class WorkerError(UserError):
    """A worker ended in a way that no user can cause: its traceback is the story."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class LostWorkerError(ResourceError):
    """A worker was killed from outside, or hung: another attempt may well succeed."""


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


def num_restarts() -> int:
    """Of this process's job, by our launcher or torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("RECMILL_ATTEMPT", "0")))


def job_directory() -> Path | None:
    """Where a worker of our launcher tells it things."""
    return Path(os.environ["RECMILL_JOB"]) if "RECMILL_JOB" in os.environ else None


def leave(code: int) -> NoReturn:
    """End a launched process here and now: tearing the libraries down may abort it after all work is done.

    (Seen with gloo: 'terminate called without an active exception'.)
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(
    command: str,
    arguments: dict[str, Any],
    procs: int,
    max_restarts: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Run `recmill.commands.<command>.work(world, **arguments)` in `procs` processes and return rank 0's result.

    A job that lost a worker, or met a defect of ours, is started again up to `max_restarts` times. Workers get
    the variables of `environment`, unless this process has them already.
    """
    if procs < 1:
        raise ConfigError(f"--procs {procs}: at least one process is needed.")
    signals = _Signals()
    with handled(SIGNALS, signals.forward):
        attempt = 0
        while True:
            try:
                order = {"command": command, "arguments": arguments}
                return _run_once(order, procs, attempt, environment, signals)
            except UserError as error:
                error.restarts = attempt
                may_restart = isinstance(error, LostWorkerError | WorkerError) and not signals.names
                if not may_restart or attempt == max_restarts:
                    raise
                attempt += 1
                log.warning("restart %d of %d after: %s", attempt, max_restarts, error)


def _run_once(
    order: dict[str, Any], procs: int, attempt: int, environment: Mapping[str, str], signals: "_Signals"
) -> Any:
    job = Path(tempfile.mkdtemp(prefix="recmill-job-"))
    try:
        (job / "job.json").write_text(json.dumps(order), encoding="utf-8")
        try:
            # A signal that comes now waits until all workers are there; they wait with theirs until they can act on it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                if signals.names:
                    raise error_for(signals.names[0], f"{signals.names[0]} came before the job had started.")
                signals.workers = []
                _start(job, procs, attempt, environment, signals.workers)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            is_well = _wait(job, signals)
        finally:
            codes = _end(signals.workers)
        if not is_well:
            raise _first_error(job, codes, signals)
        return json.loads((job / "result.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _start(
    job: Path, procs: int, attempt: int, environment: Mapping[str, str], workers: list[subprocess.Popen[bytes]]
) -> None:
    common = {**TUNING, "OMP_NUM_THREADS": str(threads_per_process(procs)), **environment, **os.environ}
    common |= {"WORLD_SIZE": str(procs), "LOCAL_WORLD_SIZE": str(procs), "RECMILL_JOB": str(job)}
    common |= {"RECMILL_LAUNCHER": str(os.getpid()), "RECMILL_ATTEMPT": str(attempt)}
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
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "recmill.launch.worker",
                        ],  # -P: no modules of the current directory
                        env=common | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=[listener.fileno()] if rank == 0 else [],
                        start_new_session=True,  # Ctrl-C reaches the workers through us, once
                    )
                )


class _Signals:
    """What reached the launcher goes on to the workers. The first asks them to stop, the second to end at once."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []
        self._first_at = self._second_at = float("inf")

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Signals that come together are one request, as they are to the workers."""
        now = time.monotonic()
        if not self.names:
            self._first_at = now
        if len(self.names) < 2 and not 0 < now - self._first_at <= ONE_REQUEST_SECONDS:
            self.names.append(signal.Signals(number).name)
            self._second_at = now if len(self.names) == 2 else self._second_at
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(number)

    @property
    def is_time_up(self) -> bool:
        return time.monotonic() > self._second_at + _SECOND_SIGNAL_SECONDS


def _wait(job: Path, signals: _Signals) -> bool:
    """Until all workers ended well; False soon after one did not, or hangs, or they do not end at once as asked."""
    while not signals.is_time_up:
        codes = [worker.poll() for worker in signals.workers]
        if any(codes):
            time.sleep(_GATHER_SECONDS)
            return False
        if None not in codes:
            return True
        if read_hangs(job):
            deadline = time.monotonic() + _GATHER_HANGS_SECONDS
            while time.monotonic() < deadline and len(read_hangs(job)) < len(codes):
                time.sleep(_POLL_SECONDS)
            return False
        time.sleep(_POLL_SECONDS)
    return False


def _end(workers: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Kill those that are left: their partners are gone, they can only wait. Exit codes of those that had failed."""
    codes = {rank: code for rank, worker in enumerate(workers) if (code := worker.poll())}
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_END_SECONDS)
    return codes


def _first_error(job: Path, failed: dict[int, int], signals: _Signals) -> BaseException:
    """Asked for twice; what a user can mend, told first; a rank that hangs, or was killed; then our own defects."""
    if len(signals.names) > 1:
        return error_for(signals.names[0], f"Ended at once by a second signal, {signals.names[1]}.")
    reports = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("error-*.json")]
    reports.sort(key=lambda report: report.at)
    told = {report.rank for report in reports}
    for report in reports:
        if report.kind == "KeyboardInterrupt":
            return KeyboardInterrupt()
        if report.kind in KINDS:
            known = KINDS[report.kind](report.message)
            known.rank, known.__notes__ = report.rank, [report.traceback]
            return known
    if hangs := read_hangs(job):
        return _hang_error(hangs, [rank for rank in range(len(signals.workers)) if rank not in told | failed.keys()])
    for rank, code in failed.items():
        if code < 0 and rank not in told:
            name = signal.Signals(-code).name
            if name in signals.names:
                return error_for(name, f"{name} reached process {rank} of the job before it could save anything.")
            fact = f"Process {rank} of the job was killed by {name}."
            if name == "SIGILL":
                fault = ResourceError(f"{fact} {_MISSING_INSTRUCTION}")
                fault.rank = rank
                return fault
            return _lost(rank, f"{fact}{_HINTS.get(name, '')}")
    if reports:
        error = WorkerError(f"Process {reports[0].rank} of the job failed: {reports[0].message}", reports[0].traceback)
        error.rank = reports[0].rank
        return error
    rank, code = next(iter(failed.items()))
    output = (job / f"out-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    error = WorkerError(f"Process {rank} of the job ended with code {code} without a word.", output)
    error.rank = rank
    return error


def _hang_error(hangs: list[Hang], living: list[int]) -> LostWorkerError:
    """`living`: the ranks that had not ended."""
    by_rank = {hang.rank: hang for hang in hangs}
    rank = culprit(hangs, [rank for rank in living if rank not in by_rank])
    if (hang := by_rank.get(rank)) is None:
        others = "; ".join(hang.told() for hang in hangs)
        fact = f"Process {rank} of the job does not answer: it was stopped, or is stuck outside Python ({others})."
    else:
        lines = "".join(f"\n  {line}" for line in hang.frames[-_NUM_LINES:])
        fact = f"Process {rank} of the job hung: {hang.told()}. It was at{lines}\n"
    return _lost(rank, f"{fact} All stacks are in hang-rank-*.txt of the run directory.")


def _lost(rank: int, fact: str) -> LostWorkerError:
    error = LostWorkerError(f"{fact} Run the same command to go on.")
    error.rank = rank
    return error
