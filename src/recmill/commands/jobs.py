"""`recmill status`, `logs` and `cancel`: the state and output of a run and its jobs, and how to stop them."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recmill.config.options import given_path
from recmill.config.suggested import resuming_command
from recmill.errors import ConfigError
from recmill.jobs.records import read_job_end, read_jobs, request_cancel, write_job_end
from recmill.jobs.schedulers import SCHEDULERS, JobState, job_state, pods_command, stop_job
from recmill.observe.run_dir import RunDirectory

_POLL_SECONDS = 1.0
_RESUMABLE = ("lost", "preempted", "interrupted")  # by the same command
_ENDED = ("done", "failed", *_RESUMABLE)
_KILLED = "ended by cancel --now. Launch it again to resume from the last checkpoint."
_LOST = "its processes ended without reporting why, as when a machine fails. Launch it again to resume."


@dataclass(frozen=True)
class RunStatus:
    """`state`: queued, running, done, preempted, interrupted, failed, lost, or "new" before the first step.

    `resume`: the command that resumes the run, if it can be resumed and has no job.
    """

    state: str
    step: int
    reason: str
    job: str
    launcher: str
    job_state: str
    submitted_at: str
    resume: str = ""


def status(run: str | Path) -> RunStatus:
    """Return the state of a run, from its own files and from the scheduler of its newest job."""
    directory = _directory(run)
    jobs = directory.path / "jobs"
    record = next(reversed(read_jobs(jobs)), None)
    found = job_state(record) if record else None
    own = directory.read_status()  # after its scheduler was asked: a job that has ended has written its last state
    end = read_job_end(jobs, record.number) if record else {}
    is_gone = directory.has_lost_its_process()
    state, reason = _combined(str(own.get("state", "new")), str(own.get("reason", "")), found, end, is_gone)
    step = int(own.get("step", 0))
    if record is None or found is None:
        resume = resuming_command(Path(run)) if state in _RESUMABLE else ""
        return RunStatus(state, step, reason, "", "", "", "", resume)
    return RunStatus(state, step, reason, record.id, record.launcher, found.state, record.submitted_at)


def _combined(
    own: str, own_reason: str, found: JobState | None, end: dict[str, object], is_gone: bool
) -> tuple[str, str]:
    """Return the state and its reason. `own` is the state in status.json, `end` the contents of ID.end.json."""
    if found is None:
        return ("lost", _LOST) if own == "running" and is_gone else (own, own_reason)
    if found.state == "queued":
        return "queued", found.reason
    if found.state == "running":
        return "running", ""
    if found.state == "unknown":
        return own, f"the state of its job is not known: {found.reason}"
    if end:
        return str(end["state"]), str(end.get("reason") or "")
    if own in ("running", "new"):
        return "lost", _LOST
    return own, own_reason


def logs(run: str | Path, *, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the output of the newest job, or the log of a rank; with `follow`, until the run ends."""
    directory = _directory(run)
    record = next(reversed(read_jobs(directory.path / "jobs")), None)
    if record and record.launcher == "kubernetes" and rank is None:
        with subprocess.Popen(pods_command(record, follow), stdout=subprocess.PIPE, text=True) as kubectl:
            assert kubectl.stdout is not None
            yield from kubectl.stdout
        return
    file = directory.path / ("log.txt" if not rank else f"log.rank-{rank}.txt")
    if record and rank is None and (output := directory.path / "jobs" / f"{record.number}.out").exists():
        file = output
    if not file.exists() and not follow:
        raise ConfigError(
            f"{file} does not exist: nothing was logged yet. Check recmill status, or wait for it with --follow."
        )
    position = 0
    while True:
        has_ended = not follow or status(run).state in _ENDED
        if file.exists():
            with file.open(encoding="utf-8", errors="replace") as opened:
                opened.seek(position)
                yield opened.read()
                position = opened.tell()
        if has_ended:
            return
        time.sleep(_POLL_SECONDS)


def cancel(run: str | Path, *, now: bool = False) -> list[str]:
    """Stop the run's queued and running jobs, and return their ids. Running jobs save first, unless `now`."""
    jobs = _directory(run).path / "jobs"
    stopped = []
    for record in reversed(read_jobs(jobs)):  # the jobs of a chain that wait come first
        if job_state(record).state in ("queued", "running", "unknown"):
            request_cancel(jobs, record.number)
            stop_job(record, now)
            if now and record.launcher not in SCHEDULERS:  # the script could not report
                write_job_end(jobs, record.number, {"code": 137, "state": "failed", "reason": _KILLED})
            stopped.append(record.id)
    return stopped


def _directory(run: str | Path) -> RunDirectory:
    directory = RunDirectory(given_path(run, "RUN"))
    if not directory.status_file.is_file() and not (directory.path / "jobs").is_dir():
        raise ConfigError(f"{run} is not a run directory: it has neither status.json nor jobs/. Choose another one.")
    return directory
