"""Submit, query and stop jobs with the commands of their scheduler."""

import contextlib
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
_SECONDS = 60.0  # timeout of a scheduler's command
_STOP_SIGNAL = "USR2"
_ENDED = ("Complete", "Completed", "Failed")  # conditions in Kubernetes; the second is a JobSet's


@dataclass(frozen=True)
class JobState:
    """The state of a job in its scheduler; `gone`: the job has ended, or the scheduler no longer knows it."""

    state: Literal["queued", "running", "gone", "unknown"]
    reason: str = ""


def check_with_slurm(script: str, queue: str | None) -> None:
    """Raise ResourceError if Slurm has no nodes for a script: sbatch alone would let it wait forever."""
    tried = _try(["sbatch", "--test-only"], text=script)
    if tried.returncode == 0:
        return
    if "configuration is not available" in tried.stderr:
        # Also said of nodes that are down or drained for now, for which sbatch lets a job wait.
        nodes = _ask(["sinfo", "-h", "-o", "%a %T", *(["-p", queue] if queue else [])]).split()
        if not {"up", "idle", "mixed", "allocated", "completing"}.issuperset(nodes):
            return
    raise _error(["sbatch --test-only"], tried.stderr)


def submit(launcher: str, script: Path, name: str, after: str | None = None) -> str:
    """Submit a script, to start only if job `after` fails, and return the job's id: for Slurm, ID or ID;CLUSTER."""
    if launcher == "slurm":
        return _ask(["sbatch", "--parsable", str(script)]).strip()
    if launcher == "pbs":
        dependency = ["-W", f"depend=afternotok:{after}"] if after else []
        # The server copies its own files of output to the current directory.
        return _ask(["qsub", *dependency, str(script)], script.parent).strip().splitlines()[-1]
    _ask(["kubectl", "create", "-f", str(script)])
    return name


def job_state(record: Record) -> JobState:
    """Ask the scheduler about a job."""
    try:
        if record.launcher == "slurm":
            return _slurm_state(record)
        if record.launcher == "pbs":
            return _pbs_state(record.id)
        if record.launcher == "kubernetes":
            return _kubernetes_state(record)
    except ResourceError as error:
        return JobState("unknown", str(error))
    if record.host != socket.gethostname():
        return JobState("unknown", f"it runs on {record.host}")
    return JobState("running" if started_at(int(record.id)) == record.started else "gone")


def stop_job(record: Record, now: bool) -> None:
    """Let a job save and end, or end it at once if `now` or if it has not started."""
    is_gentle = not now and job_state(record).state == "running"
    if record.launcher == "slurm":
        _ask(["scancel", *_cluster(record), *([f"--signal={_STOP_SIGNAL}"] if is_gentle else []), record.id])
    elif record.launcher == "pbs":
        _ask(["qsig", "-s", f"SIG{_STOP_SIGNAL}", record.id] if is_gentle else ["qdel", record.id])
    elif record.launcher == "kubernetes":
        what = [f"{kind}/{record.name}" for kind in (record.kind, "service", "configmap")]
        options = ["--ignore-not-found", *(["--grace-period=1"] if now else [])]
        _ask(["kubectl", "delete", *what, *_namespace(record), *options])
    elif record.host != socket.gethostname():
        raise ResourceError(f"Job {record.id} runs on {record.host}, not here. Run the same command there.")
    elif is_gentle:
        os.kill(int(record.id), signal.SIGTERM)
    elif job_state(record).state == "running":
        _kill_with_descendants(int(record.id))


def _kill_with_descendants(pid: int) -> None:
    """Kill a script first, so that it does not go on when its programs end, and then those."""
    parents = {int(file.name): _facts(int(file.name)) for file in Path("/proc").iterdir() if file.name.isdigit()}
    found = [pid]
    for one in found:  # grows meanwhile
        found += [child for child, facts in parents.items() if facts and int(facts[1]) == one]
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _cluster(record: Record) -> list[str]:
    return [f"--clusters={record.cluster}"] if record.cluster else []


def _slurm_state(record: Record) -> JobState:
    # Not JSON, whose shape changes between versions.
    found = _try(["squeue", *_cluster(record), "-h", "-t", "all", "-j", record.id, "-o", "%T|%r"])
    if found.returncode == 0 and "|" in found.stdout:
        # Some versions print the name of the cluster first.
        state, _, reason = next(line for line in found.stdout.splitlines() if "|" in line).partition("|")
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
            return JobState("gone", "PBS does not know the job; it also deletes a job whose request fits no queue")
        raise _error(["qstat"], found.stderr)
    try:
        facts = next(iter(json.loads(found.stdout)["Jobs"].values()))
        state = facts["job_state"]
    except (ValueError, KeyError, StopIteration):
        raise ResourceError(
            f"qstat did not print valid JSON for job {job_id}. Check it with: qstat -x -f -F json {job_id}."
        ) from None
    comment = str(facts.get("comment", ""))
    return JobState("queued" if state in "QHWTM" else "running" if state in "RES" else "gone", comment)


def _kubernetes_state(record: Record) -> JobState:
    found = _try(["kubectl", "get", record.kind, record.name, *_namespace(record), "-o", "json"])
    if found.returncode:
        if "NotFound" in found.stderr:
            return JobState("gone")
        raise _error(["kubectl"], found.stderr)
    status = json.loads(found.stdout).get("status", {})
    ended = [c for c in status.get("conditions", []) if c["type"] in _ENDED and c["status"] == "True"]
    if ended:
        return JobState("gone", ended[0].get("message", ""))
    # A Job counts its pods; the others count the jobs that they made, which are ready or have pods that wait.
    parts = status.get("replicatedJobsStatus") or status.get("jobsStatus") or [status]
    return JobState("running" if any(part.get("ready") for part in parts) else "queued", "")


def pods_command(record: Record, follow: bool) -> list[str]:
    """Return the command that prints the logs of a job's pods. A TrainJob makes a JobSet of the same name."""
    label = "job-name" if record.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
    # Of pods that a label selects, 10 lines are printed unless all are asked for, and 5 pods are followed.
    options = ["--prefix", "--tail=-1", f"--max-log-requests={record.nodes}", *(["--follow"] if follow else [])]
    return ["kubectl", "logs", f"--selector={label}={record.name}", *options, *_namespace(record)]


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0: there is none."""
    facts = _facts(pid)
    return int(facts[19]) if facts else 0


def _facts(pid: int) -> list[str]:
    """Return what /proc says about a live process, from its state on; empty: there is none."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if facts[0] in "ZX" else facts


def _namespace(record: Record) -> list[str]:
    return ["--namespace", record.namespace] if record.namespace else []


def _try(
    command: Sequence[str], directory: Path | None = None, text: str | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, cwd=directory, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ResourceError(
            f"{command[0]} is not installed here. Run this on a machine from which jobs can be submitted."
        ) from None
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{command[0]} did not answer within {_SECONDS:g} s. Try again later.") from None


def _ask(command: Sequence[str], directory: Path | None = None) -> str:
    done = _try(command, directory)
    if done.returncode:
        raise _error(command, done.stderr or done.stdout)
    return done.stdout


def _error(command: Sequence[str], output: str) -> ResourceError:
    lines = output.strip().splitlines() or ["no message"]
    return ResourceError(f"{command[0]}: {'; '.join(lines[-3:])}. Fix this and try again.")
