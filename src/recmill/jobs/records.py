"""RUN/jobs: what was submitted for a run (jobs.jsonl), and how each job ended (ID.end.json)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recmill.files.atomic import write_json
from recmill.files.reading import read_json_of


@dataclass(frozen=True)
class Record:
    """A job as it was submitted. `id` is the scheduler's, or the process id of a script that runs on `host`."""

    launcher: str
    id: str
    name: str
    nodes: int
    procs: int
    submitted_at: str
    host: str
    started: int = 0  # when a process started, in clock ticks since boot: process ids are reused
    namespace: str | None = None
    kind: str = "job"  # in Kubernetes
    cluster: str | None = None  # of several that one Slurm serves

    @property
    def number(self) -> str:
        """Return the id without the server's name, which PBS adds: files of the job begin with it."""
        return self.id.partition(".")[0]


def note_job(jobs: Path, record: Record) -> None:
    with (jobs / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_jobs(jobs: Path) -> list[Record]:
    """Return the jobs of a run, the newest last; an incomplete line, as a full disk leaves it, is skipped."""
    found = []
    path = jobs / "jobs.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(Record(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def write_job_end(jobs: Path, job_id: str, facts: dict[str, Any]) -> None:
    write_json(jobs / f"{job_id}.end.json", facts)


def read_job_end(jobs: Path, job_id: str) -> dict[str, Any]:
    """Return how a job ended; empty if its script did not get that far."""
    found: dict[str, Any] = read_json_of(jobs / f"{job_id}.end.json", dict)
    return found


def request_cancel(jobs: Path, job_id: str) -> None:
    """Note that a job must not start again."""
    (jobs / f"{job_id}.cancelled").touch()


def is_cancel_requested(jobs: Path, job_id: str) -> bool:
    return (jobs / f"{job_id}.cancelled").exists()
