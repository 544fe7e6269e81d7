"""The last step of a job script: `python -m recmill.jobs.finish JOBS ID CODE STARTED`.

It records how the job ended, and requeues a Slurm job that was preempted.
"""

import calendar
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recmill.errors import UserError
from recmill.files.timestamps import utc_now
from recmill.jobs.records import is_cancel_requested, read_jobs, write_job_end
from recmill.launch.failures import collected_error
from recmill.observe.run_dir import RunDirectory

_MAX_REQUEUES = 20
_PREEMPTED = 75


def main() -> int:
    """Write how the job ended to JOBS/ID.end.json, requeue it if it was preempted, and return its exit code."""
    jobs, job_id, code, started = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        status = RunDirectory(jobs.parent).read_status()
    except UserError as error:
        status = {"reason": str(error)}
    state = _state(status, code, started)
    reason = status.get("reason", "")
    if state == "failed" and (cause := collected_error(jobs / f"{job_id}.errors")):
        reason = str(cause)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    facts = {"code": code, "state": state, "step": status.get("step", 0), "reason": reason, "restarts": restarts}
    write_job_end(jobs, job_id, {**facts, "at": utc_now()})
    _say(f"recmill: job {job_id}: {state} at step {facts['step']:,}" + (f": {reason}" if state == "failed" else ""))
    is_slurm_job = any(record.launcher == "slurm" and record.id == job_id for record in read_jobs(jobs))
    if state == "preempted" and is_slurm_job and not is_cancel_requested(jobs, job_id):
        _requeue(job_id, restarts)
    return {"done": 0, "preempted": _PREEMPTED}.get(state, code or 1)


def _state(status: dict[str, Any], code: int, started: int) -> str:
    """Return how the run ended. The exit code alone is not enough: torchrun returns 1 after a clean stop."""
    if code == 0:
        return "done"
    try:
        updated = calendar.timegm(time.strptime(str(status.get("updated_at")), "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        updated = 0
    if status.get("state") in ("preempted", "interrupted") and updated >= started:
        return str(status["state"])
    return "preempted" if code == _PREEMPTED else "failed"


def _requeue(job_id: str, restarts: int) -> None:
    """Requeue this job, because Slurm does not requeue a job that ends within the grace time of a preemption."""
    asked = subprocess.run(["squeue", "-h", "-j", job_id, "-o", "%T"], capture_output=True, text=True, check=False)
    if asked.stdout.strip() != "RUNNING":  # somebody cancelled it
        _say(f"recmill: job {job_id} was cancelled: launch again to resume")
    elif restarts >= _MAX_REQUEUES:
        _say(f"recmill: job {job_id} was requeued {restarts} times: launch again to resume")
    else:
        _say(f"recmill: requeueing job {job_id}")
        done = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True, check=False)
        if done.returncode:
            _say(f"recmill: scontrol requeue: {done.stderr.strip()}: launch again to resume")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
