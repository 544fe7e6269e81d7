"""Submit a job, ask what became of it, and stop it, with the commands of its scheduler."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recmill.errors import ResourceError
from recmill.jobs.records import Record

SCHEDULERS = ("slurm", "pbs", "kubernetes")
_SECONDS = 60.0  # that a scheduler may take to answer
_STOP_SIGNAL = "USR2"


@dataclass(frozen=True)
class JobState:
    """What the scheduler says; `gone`: it does not know the job any more, or the job has ended."""

    state: Literal["queued", "running", "gone", "unknown"]
    reason: str = ""


def submit(launcher: str, script: Path, name: str, after: str | None = None) -> str:
    """Submit a script and return the job's id. `after`: the job that must end without success before this one."""
    if launcher == "slurm":
        return _ask(["sbatch", "--parsable", str(script)]).partition(";")[0].strip()
    if launcher == "pbs":
        dependency = ["-W", f"depend=afternotok:{after}"] if after else []
        return _ask(["qsub", *dependency, str(script)]).strip().splitlines()[-1]
    _ask(["kubectl", "create", "-f", str(script)])
    return name


def job_state(record: Record) -> JobState:
    """Ask the scheduler about a job."""
    try:
        if record.launcher == "slurm":
            return _slurm_state(record.id)
        if record.launcher == "pbs":
            return _pbs_state(record.id)
        if record.launcher == "kubernetes":
            return _kubernetes_state(record)
    except ResourceError as error:
        return JobState("unknown", str(error))
    return _process_state(record)


def stop_job(record: Record, now: bool) -> None:
    """Let a job save and end, or end it at once if `now` or if it has not started."""
    is_gentle = not now and job_state(record).state == "running"
    if record.launcher == "slurm":
        _ask(["scancel", *([f"--signal={_STOP_SIGNAL}"] if is_gentle else []), record.id])
    elif record.launcher == "pbs":
        _ask(["qsig", "-s", f"SIG{_STOP_SIGNAL}", record.id] if is_gentle else ["qdel", record.id])
    elif record.launcher == "kubernetes":
        _ask(["kubectl", "delete", "job", record.name, *_namespace(record), *(["--grace-period=1"] if now else [])])
    elif job_state(record).state == "running":
        os.kill(int(record.id), signal.SIGTERM)


def _slurm_state(job_id: str) -> JobState:
    # Not JSON, whose shape changes between versions.
    found = _try(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T|%r"])
    if found.returncode == 0 and found.stdout.strip():
        state, _, reason = found.stdout.strip().splitlines()[0].partition("|")
        if state in ("PENDING", "REQUEUED", "SPECIAL_EXIT", "REQUEUE_HOLD", "CONFIGURING"):
            return JobState("queued", reason)
        is_live = state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
        return JobState("running" if is_live else "gone", state)
    if found.returncode and "Invalid job id" not in found.stderr:
        raise _error(["squeue"], found.stderr)
    return JobState("gone")


def _pbs_state(job_id: str) -> JobState:
    found = _try(["qstat", "-x", "-f", "-F", "json", job_id])
    if found.returncode:
        if re.search("unknown job", found.stderr, re.I):
            return JobState("gone", "the server does not know it: a request that fits no queue vanishes")
        raise _error(["qstat"], found.stderr)
    try:
        facts = next(iter(json.loads(found.stdout)["Jobs"].values()))
        state = facts["job_state"]
    except (ValueError, KeyError, StopIteration):
        raise ResourceError(f"qstat printed what is no JSON about job {job_id}. Ask it yourself.") from None
    comment = str(facts.get("comment", ""))
    return JobState("queued" if state in "QHWTM" else "running" if state in "RES" else "gone", comment)


def _kubernetes_state(record: Record) -> JobState:
    found = _try(["kubectl", "get", "job", record.name, *_namespace(record), "-o", "json"])
    if found.returncode:
        if "NotFound" in found.stderr:
            return JobState("gone")
        raise _error(["kubectl"], found.stderr)
    status = json.loads(found.stdout).get("status", {})
    ended = [c for c in status.get("conditions", []) if c["type"] in ("Complete", "Failed") and c["status"] == "True"]
    if ended:
        return JobState("gone", ended[0].get("message", ""))
    return JobState("running" if status.get("ready") else "queued", "")


def _process_state(record: Record) -> JobState:
    if record.host != socket.gethostname():
        return JobState("unknown", f"it runs on {record.host}")
    return JobState("running" if started_at(int(record.id)) == record.started else "gone")


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0: there is none."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(facts[18])


def _namespace(record: Record) -> list[str]:
    return ["--namespace", record.namespace] if record.namespace else []


def _try(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise ResourceError(
            f"{command[0]} is not installed here. Use a machine from which jobs are submitted."
        ) from None
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{command[0]} did not answer within {_SECONDS:g} s. Try again later.") from None


def _ask(command: Sequence[str]) -> str:
    done = _try(command)
    if done.returncode:
        raise _error(command, done.stderr or done.stdout)
    return done.stdout


def _error(command: Sequence[str], output: str) -> ResourceError:
    lines = output.strip().splitlines() or ["no message"]
    return ResourceError(f"{command[0]}: {'; '.join(lines[-3:])}. Nothing was changed; correct it and try again.")
