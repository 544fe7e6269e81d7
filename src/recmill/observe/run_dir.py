"""The run directory: what was asked for, where it ran, how it goes and what came out."""

import json
import math
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from recmill import __version__
from recmill.errors import CheckpointError
from recmill.files.atomic import write_json, write_text
from recmill.files.locks import exclusive_lock
from recmill.hardware.cpu import cpu_name, num_cores
from recmill.hardware.memory import memory_bytes

State = Literal["running", "done", "preempted", "interrupted", "failed"]
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "polars", "pydantic")


class RunDirectory:
    """Paths and small files. Only the main rank writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.checkpoints = self.path / "checkpoints"
        self.results_file = self.path / "results.json"
        self.status_file = self.path / "status.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self._status_lock, self._has_ended = threading.Lock(), False

    def foreign_file(self) -> str | None:
        """A name that says this directory is somebody's, and no run's: training must not write here."""
        if not self.path.is_dir() or (self.status_file.is_file() and not (self.path / "dataset.json").exists()):
            return None
        early = re.compile(
            r"\.lock|\.status\.json\.\d+|(log(\.rank-\d+)?|hang-rank-\d+)\.txt"
        )  # of a run that ended before its first word
        return next((path.name for path in sorted(self.path.iterdir()) if not early.fullmatch(path.name)), None)

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*/MANIFEST.json"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One writer at a time. The lock dies with the process that holds it; who that is stands in the file."""
        self.path.mkdir(parents=True, exist_ok=True)

        def in_use(holder: str) -> str:
            return f"{self.path} is in use by {holder}. Wait for it, stop it, or choose another --run."

        with exclusive_lock(self.path / ".lock", in_use):
            yield

    def write_status(self, state: State, **facts: Any) -> None:
        """From any thread: a checkpoint that is committed while the run ends does not make it run again."""
        with self._status_lock:
            if state == "running" and self._has_ended:
                return
            self._has_ended = state != "running"
            write_json(self.status_file, {"state": state, "updated_at": now(), "pid": os.getpid(), **facts})

    def read_status(self) -> dict[str, Any]:
        return read_json(self.status_file) if self.status_file.is_file() else {}

    def read_results(self) -> dict[str, dict[str, Any]]:
        return read_json(self.results_file)

    def append_metrics(self, line: dict[str, Any]) -> None:
        line = {**line, "time": round(time.time(), 3)}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint: their lines would stand twice."""
        if self.metrics_file.is_file():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self.metrics_file, "".join(f"{line}\n" for line in kept))


def environment(world_size: int, device: str) -> dict[str, Any]:
    """Versions, hardware, commit and world; no environment variables, so never a secret."""
    return {
        "recmill": __version__,
        "python": platform.python_version(),
        "packages": _packages(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "device": device,
        "world_size": world_size,
        "git_commit": _git_commit(),
        "started_at": now(),
    }


def versions() -> dict[str, str]:
    """Of what computes a run."""
    return {"recmill": __version__, "python": platform.python_version(), **_packages()}


def _packages() -> dict[str, str]:
    return {name: version for name in _PACKAGES if (version := installed_version(name))}


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _step_of(line: str) -> float:
    """Infinite for half a line, which a kill may leave."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not readable as JSON. Remove it; checkpoints do not depend on it.")
    return value


def _git_commit() -> str | None:
    """Of the code that runs, not of the directory the user happens to be in."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
