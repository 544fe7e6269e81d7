"""The run directory: config, status, metrics and results of a run, and its lock."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from recmill.errors import CheckpointError, ResourceError
from recmill.files.atomic import remove_leftovers, write_json, write_text
from recmill.files.locks import exclusive_lock, is_holder_gone
from recmill.files.reading import read_json
from recmill.files.timestamps import utc_now
from recmill.observe.tensorboard import EventFile

log = logging.getLogger(__name__)

State = Literal["running", "done", "preempted", "interrupted", "failed"]
# What a run has before it writes its status
_EARLY_FILES = re.compile(r"jobs|\.lock(\.owner.*)?|\.status\.json\.\d+|(log(\.rank-\d+)?|hang-rank-\d+)\.txt")


class RunDirectory:
    """The paths and small files of a run directory. Only rank 0 writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.checkpoints = self.path / "checkpoints"
        self.results_file = self.path / "results.json"
        self.status_file = self.path / "status.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.mlperf_log = self.path / "mlperf.log"
        self.trace = self.path / "trace"
        self.tensorboard = self.path / "tensorboard"
        self._events: EventFile | None = None
        self._status_lock = threading.Lock()
        self._has_ended = False
        self._lock_file: os.stat_result | None = None  # while this object holds the lock

    def foreign_file(self) -> str | None:
        """Return the name of a file that no run has written, if any: training must not write here."""
        is_run = self.status_file.is_file() or any(self.checkpoints.glob("step-*/MANIFEST.json"))
        if not self.path.is_dir() or (is_run and not (self.path / "dataset.json").exists()):
            return None
        names = sorted(path.name for path in self.path.iterdir())
        return next((name for name in names if not _EARLY_FILES.fullmatch(name)), None)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock within the block, or raise ResourceError naming the process that holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / ".lock"
        with exclusive_lock(path, "Wait for it, stop it, or choose another --run."):
            self._lock_file = path.stat()
            try:
                yield
            finally:
                self._lock_file = None

    def _check_still_there(self) -> None:
        """Raise ResourceError if somebody removed or replaced the directory after it was locked."""
        if self._lock_file is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat((self.path / ".lock").stat(), self._lock_file):
                return
        raise ResourceError(
            f"{self.path} or its file .lock was removed or replaced while this run was using it. "
            "Restore the directory and run the same command to resume, or run it to start anew."
        )

    def write_status(self, state: State, **facts: Any) -> None:
        """Replace status.json, from any thread.

        A run that has ended is not set to running again: its last checkpoint may be committed while it ends.
        """
        with self._status_lock:
            if state == "running" and self._has_ended:
                return
            self._check_still_there()
            self._has_ended = state != "running"
            if self._has_ended:
                remove_leftovers(self.status_file)  # of workers that were killed
            write_json(self.status_file, {"state": state, "updated_at": utc_now(), "pid": os.getpid(), **facts})

    def read_status(self) -> dict[str, Any]:
        return _read_json(self.status_file, "Replace it with {}") if self.status_file.is_file() else {}

    def started_from(self) -> dict[str, Any] | None:
        """Return the run and the step whose weights this run began with; {}: none; None: env.json does not say it."""
        with suppress(OSError, ValueError, AttributeError):
            started = read_json(self.path / "env.json").get("started_from")
            return started if isinstance(started, dict) else None
        return None

    def saved_step(self) -> int:
        """Return the last step that status.json reports as saved in a checkpoint; 0: none."""
        step = self.read_status().get("step", 0)
        return step if isinstance(step, int) else 0

    def trained_seconds(self) -> float:
        """Return how long the run has trained until the checkpoint that status.json names."""
        seconds = self.read_status().get("seconds", 0.0)
        return seconds if isinstance(seconds, float) else 0.0

    def read_results(self) -> dict[str, dict[str, Any]]:
        return _read_json(self.results_file, "Remove it")

    def append_metrics(self, line: dict[str, Any]) -> None:
        self._check_still_there()
        line = {**line, "time": round(time.time(), 3)}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._events:
            self._events.add(line)

    def copy_metrics_to_tensorboard(self) -> None:
        """Write the metrics for TensorBoard, those so far and all that are appended from now on."""
        self._events = EventFile(self.tensorboard)
        self._events.begin(self.read_metrics())

    def forget_metrics_after(self, step: int) -> None:
        """Remove the lines of later steps, which a resumed run will repeat."""
        self._keep_metrics(lambda line_step, _: line_step <= step)

    def forget_metrics_of(self, step: int, split: str) -> None:
        """Remove the line of an evaluation that a resumed run repeats."""
        self._keep_metrics(lambda *line: line != (step, split))

    def _keep_metrics(self, is_kept: Callable[[int, str], bool]) -> None:
        """Remove the lines of other steps and splits, and incomplete ones, which a killed run may leave."""
        if not os.path.lexists(self.metrics_file):
            return
        if not self.metrics_file.is_file():  # a pipe, whose reader every report would wait for, or a link to itself
            raise ResourceError(f"{self.metrics_file} is not a file. Remove it; checkpoints do not depend on it.")
        kept = [line for line in self.read_metrics() if is_kept(line["step"], line.get("split", ""))]
        write_text(self.metrics_file, "".join(f"{json.dumps(line)}\n" for line in kept))
        if self._events:
            self._events.begin(kept)

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(self.metrics())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl, without incomplete ones, which a killed run may leave."""
        if not self.metrics_file.is_file():
            return
        with self.metrics_file.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                values: Any = None
                with suppress(ValueError, RecursionError):
                    values = json.loads(line)
                found = values if isinstance(values, dict) else {}
                if isinstance(found.get("step"), int) and isinstance(found.get("split", ""), str):
                    yield found

    def new_trace(self) -> Path | None:
        """Create the next directory for what the ranks record; None and a warning if that is not possible."""
        try:
            names = [path.name for path in self.trace.iterdir()] if self.trace.is_dir() else []
            numbers = [int(name) for name in names if name.isdecimal()]
            new = self.trace / str(max(numbers, default=-1) + 1)
            new.mkdir(parents=True)
        except OSError as error:
            log.warning("%s: cannot be created (%s): this run is not recorded.", self.trace, error.strerror)
            return None
        return new

    def has_lost_its_process(self) -> bool:
        """Return whether the process that trained here has ended, as far as this machine knows."""
        return is_holder_gone(self.path / ".lock")


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = read_json(path)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not readable as JSON. {remedy}; checkpoints do not depend on it.")
    return value
