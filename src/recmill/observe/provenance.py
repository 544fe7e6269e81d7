"""Where a run was computed: versions, hardware and commit, as kept in env.json and in checkpoints."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from recmill import __version__
from recmill.files.timestamps import utc_now
from recmill.hardware.cpu import cpu_name, num_cores
from recmill.hardware.memory import memory_bytes

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "polars", "pydantic")


def environment(world_size: int, device: str) -> dict[str, Any]:
    """Describe what computes a run, without environment variables, which may hold secrets."""
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
        "started_at": utc_now(),
    }


def versions() -> dict[str, str]:
    return {"recmill": __version__, "python": platform.python_version(), **_packages()}


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, str]:
    return {name: version for name in _PACKAGES if (version := installed_version(name))}


def _git_commit() -> str | None:
    """Return the commit of this source tree, whatever the current directory is."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
