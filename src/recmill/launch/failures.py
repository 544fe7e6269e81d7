"""Why a job failed: the reports of its workers, and the one error that the user sees."""

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recmill import registry
from recmill.errors import KINDS, LostPeerError, ResourceError, UserError, as_user_error
from recmill.files.atomic import write_json
from recmill.launch.signals import shown, stop_error
from recmill.launch.watchdog import Hang, read_hangs

_MAX_RANKS_SHOWN = 4
_MAX_FRAMES_SHOWN = 4
_RESUME = "Run the same command to resume."
# What this signal means, and what to try; another attempt may succeed.
_HINTS = {
    "SIGKILL": "The system may have run out of memory: use fewer processes, smaller tables or a smaller batch, or "
    "look at the system log.",
    "SIGSEGV": "Native code accessed memory that is not its own. Try train.kernels=torch, and check that the installed "
    "libraries match: recmill doctor.",
    "SIGBUS": "A mapped file was truncated or cannot be read, or /dev/shm is full. Check the disk, and that nobody "
    "changes the dataset; recmill train --verify reads every byte of it.",
    "SIGABRT": "A library gave up; its last lines of output say why. Check that the installed libraries match: "
    "recmill doctor.",
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


def report_failure(folder: Path, rank: int, error: BaseException) -> int:
    """Write why this rank failed, before the ranks that depend on it fail too. Return its exit code."""
    known = as_user_error(error)
    kind = type(known or error).__name__ if known or isinstance(error, KeyboardInterrupt) else ""
    message = str(known) if known else f"{registry.place_in_plugin(error)}{type(error).__name__}: {error}"
    failure = Failure(rank, time.time(), kind, message, traceback.format_exc())
    with contextlib.suppress(FileNotFoundError):  # a job without launcher
        write_json(folder / f"error-{rank}.json", asdict(failure))
    return known.exit_code if known else 1


def collected_error(folder: Path) -> BaseException | None:
    """Return the first error that the ranks of another launcher have reported, if any has."""
    return first_error(folder, [], 0, []) if any(folder.glob("error-*.json")) else None


def first_error(
    job: Path, failed: Sequence[Mapping[int, int]], num_workers: int, signals: Sequence[str], first_rank: int = 0
) -> BaseException:
    """Return the error that best explains why a job failed.

    `failed`: exit codes by rank, of the workers that were found to have failed at the same time, the earliest first.
    `signals`: those that the launcher received. The order is: a second signal, the first error that a user can fix, a
    hang, killed workers, an internal error, a lost connection.
    """
    if len(signals) > 1:
        return stop_error(signals[0], f"Ended at once by a second signal, {shown(signals[1])}.")
    reports = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in job.glob("error-*.json")]
    reports.sort(key=lambda report: report.at)
    for report in reports:
        if report.kind == "KeyboardInterrupt":
            return KeyboardInterrupt()
        if report.kind in KINDS:
            return _in_worker(KINDS[report.kind](report.message), report.rank, report.traceback)
    reported = {report.rank for report in reports}
    if hangs := read_hangs(job):
        answered = reported.union(*failed) | {hang.rank for hang in hangs}
        own = {*range(first_rank, first_rank + num_workers)}
        return _hang_error(hangs, own - answered, {rank for hang in hangs for rank in hang.silent} - own)
    silent = [{rank: code for rank, code in codes.items() if rank not in reported} for codes in failed]
    for codes in silent:
        if numbers := [-code for code in codes.values() if code < 0]:
            ranks = [rank for rank, code in codes.items() if code == -numbers[0]]
            return _killed_error(ranks, signal.Signals(numbers[0]).name, signals)
    if causes := [report for report in reports if report.kind != LostPeerError.__name__]:
        error = WorkerError(f"Process {causes[0].rank} of the job failed: {causes[0].message}")
        return _in_worker(error, causes[0].rank, causes[0].traceback)
    others = {rank: code for codes in silent for rank, code in codes.items()}
    if not others:
        return LostWorkerError(reports[0].message)
    rank, code = next(iter(others.items()))
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


def _killed_error(ranks: Sequence[int], name: str, signals: Sequence[str]) -> UserError:
    """Describe the workers that one signal killed at the same time, as far as the launcher can tell."""
    who = f"Process {ranks[0]}" if len(ranks) == 1 else f"Processes {', '.join(map(str, ranks[:_MAX_RANKS_SHOWN]))}"
    if len(ranks) > _MAX_RANKS_SHOWN:
        who += f" and {len(ranks) - _MAX_RANKS_SHOWN} more"
    if name in signals:
        return stop_error(name, f"{shown(name)} reached {who.lower()} of the job before it could save anything.")
    fact = f"{who} of the job {'was' if len(ranks) == 1 else 'were'} killed by {name}."
    if name == "SIGILL":
        error = ResourceError(f"{fact} {_MISSING_INSTRUCTION}")
    else:
        hint = f"{_HINTS[name]} Then run the same command to resume." if name in _HINTS else _RESUME
        error = LostWorkerError(f"{fact} {hint}")
    error.rank = ranks[0] if len(ranks) == 1 else None
    return error


def _hang_error(hangs: Sequence[Hang], silent: set[int], unreached: set[int]) -> LostWorkerError:
    """Describe every rank: the stack that it reported, or that it did not answer, here or on another machine."""
    lines = [f"\n  rank {rank} does not answer: it was stopped, or is stuck outside Python" for rank in sorted(silent)]
    why = "its machine cannot be reached, or it was stopped"
    lines += [f"\n  rank {rank} does not answer: {why}" for rank in sorted(unreached)]
    for hang in hangs:
        frames = "".join(f"\n    {frame}" for frame in hang.frames[-_MAX_FRAMES_SHOWN:])
        lines.append(f"\n  {hang}, in{frames}")
    more = f"\n  and {len(lines) - _MAX_RANKS_SHOWN} more" if len(lines) > _MAX_RANKS_SHOWN else ""
    return LostWorkerError(
        f"The job hangs:{''.join(lines[:_MAX_RANKS_SHOWN])}{more}\n"
        f"The stacks of all threads are in hang-rank-*.txt of the run directory. {_RESUME}"
    )
