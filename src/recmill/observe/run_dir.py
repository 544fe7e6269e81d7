"""The run directory: config, status, metrics and results of a run, and its lock."""

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from recmill.errors import CheckpointError
from recmill.files.atomic import write_json, write_text
from recmill.files.locks import exclusive_lock
from recmill.files.timestamps import utc_now

State = Literal["running", "done", "preempted", "interrupted", "failed"]
# The files of a run that ended before it wrote its status
_EARLY_FILES = re.compile(r"\.lock|\.status\.json\.\d+|(log(\.rank-\d+)?|hang-rank-\d+)\.txt")


class RunDirectory:
    """The paths and small files of a run directory. Only rank 0 writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.checkpoints = self.path / "checkpoints"
        self.results_file = self.path / "results.json"
        self.status_file = self.path / "status.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self._status_lock = threading.Lock()
        self._has_ended = False

    def foreign_file(self) -> str | None:
        """Return the name of a file that no run has written, if any: training must not write here."""
        if not self.path.is_dir() or (self.status_file.is_file() and not (self.path / "dataset.json").exists()):
            return None
        names = sorted(path.name for path in self.path.iterdir())
        return next((name for name in names if not _EARLY_FILES.fullmatch(name)), None)

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*/MANIFEST.json"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock within the block, or raise ResourceError naming the process that holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path / ".lock", "Wait for it, stop it, or choose another --run."):
            yield

    def write_status(self, state: State, **facts: Any) -> None:
        """Replace status.json, from any thread.

        A run that has ended is not set to running again: its last checkpoint may be committed while it ends.
        """
        with self._status_lock:
            if state == "running" and self._has_ended:
                return
            self._has_ended = state != "running"
            write_json(self.status_file, {"state": state, "updated_at": utc_now(), "pid": os.getpid(), **facts})

    def read_status(self) -> dict[str, Any]:
        return _read_json(self.status_file) if self.status_file.is_file() else {}

    def read_results(self) -> dict[str, dict[str, Any]]:
        return _read_json(self.results_file)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Remove the lines of later steps, which a resumed run will repeat."""
        if self.metrics_file.is_file():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self.metrics_file, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinity for an incomplete line, which a killed run may leave."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not readable as JSON. Remove it; checkpoints do not depend on it.")
    return value
