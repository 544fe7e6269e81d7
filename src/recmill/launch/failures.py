"""Why a job failed: the reports of its workers, and the one error that the user sees."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recmill.errors import KINDS, ResourceError, UserError
from recmill.launch.signals import stop_error
from recmill.launch.watchdog import Hang, read_hangs

_MAX_RANKS_SHOWN = 4
_MAX_FRAMES_SHOWN = 4
_RESUME = "Run the same command to resume."
# What may be wrong if this signal killed a worker; another attempt may succeed.
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
    """A worker failed with an internal error."""


class LostWorkerError(ResourceError):
    """A worker was killed from outside, or hung: another attempt may well succeed."""


@dataclass(frozen=True)
class Failure:
    """Why a worker failed, as it writes it to error-RANK.json."""

    rank: int
    at: float  # seconds since 1970
    kind: str  # a class name of recmill.errors, "KeyboardInterrupt", or "" for an internal error
    message: str
    traceback: str


def first_error(job: Path, exit_codes: Mapping[int, int], num_workers: int, signals: Sequence[str]) -> BaseException:
    """Return the error that best explains why a job failed.

    `exit_codes`: those of the workers that failed, by rank. `signals`: those that the launcher received. The order is:
    a second signal, the first error that a user can fix, a hang, a killed worker, an internal error.
    """
    if len(signals) > 1:
        return stop_error(signals[0], f"Ended at once by a second signal, {signals[1]}.")
    reports = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("error-*.json")]
    reports.sort(key=lambda report: report.at)
    for report in reports:
        if report.kind == "KeyboardInterrupt":
            return KeyboardInterrupt()
        if report.kind in KINDS:
            return _in_worker(KINDS[report.kind](report.message), report.rank, report.traceback)
    reported = {report.rank for report in reports}
    if hangs := read_hangs(job):
        answered = reported | exit_codes.keys() | {hang.rank for hang in hangs}
        return _hang_error(hangs, [rank for rank in range(num_workers) if rank not in answered])
    for rank, code in exit_codes.items():
        if code < 0 and rank not in reported:
            return _killed_error(rank, signal.Signals(-code).name, signals)
    if reports:
        first = reports[0]
        error = WorkerError(f"Process {first.rank} of the job failed: {first.message}")
        return _in_worker(error, first.rank, first.traceback)
    rank, code = next(iter(exit_codes.items()))
    output = (job / f"out-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    lost = LostWorkerError(
        f"Process {rank} of the job exited with code {code} and no error report. A library does that, for example, if "
        f"it gets no memory or no thread: compare the limits (ulimit -a). {_RESUME}"
    )
    return _in_worker(lost, rank, output)


def _in_worker(error: UserError, rank: int, traceback: str = "") -> UserError:
    """Add the worker's rank and traceback to the error."""
    error.rank = rank
    if traceback:
        error.add_note(traceback)
    return error


def _killed_error(rank: int, name: str, signals: Sequence[str]) -> UserError:
    if name in signals:
        return stop_error(name, f"{name} reached process {rank} of the job before it could save anything.")
    fact = f"Process {rank} of the job was killed by {name}."
    if name == "SIGILL":
        return _in_worker(ResourceError(f"{fact} {_MISSING_INSTRUCTION}"), rank)
    return _in_worker(LostWorkerError(f"{fact}{_HINTS.get(name, '')} {_RESUME}"), rank)


def _hang_error(hangs: Sequence[Hang], silent: Sequence[int]) -> LostWorkerError:
    """Describe every rank: the stack that it reported, or that it did not answer."""
    lines = [f"\n  rank {rank} does not answer: it was stopped, or is stuck outside Python" for rank in silent]
    for hang in hangs:
        frames = "".join(f"\n    {frame}" for frame in hang.frames[-_MAX_FRAMES_SHOWN:])
        lines.append(f"\n  {hang}, in{frames}")
    more = f"\n  and {len(lines) - _MAX_RANKS_SHOWN} more" if len(lines) > _MAX_RANKS_SHOWN else ""
    return LostWorkerError(
        f"The job hangs:{''.join(lines[:_MAX_RANKS_SHOWN])}{more}\n"
        f"The stacks of all threads are in hang-rank-*.txt of the run directory. {_RESUME}"
    )
