"""Where a run was computed: versions, hardware and commit, as kept in env.json and in checkpoints."""

import platform
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from recmill import __version__
from recmill.files.timestamps import utc_now
from recmill.hardware.cpu import cpu_name, num_cores
from recmill.hardware.memory import memory_bytes

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "polars", "pydantic")


def environment(world_size: int, device: str) -> dict[str, Any]:
    """Describe what computes a run."""
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


def host_facts(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Describe the machine of this process, with the types of the file systems of `paths`."""
    return {
        "name": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "numa_nodes": len([*Path("/sys/devices/system/node").glob("node[0-9]*")]),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "file_systems": {name: file_system(path) for name, path in paths.items()},
    }


def by_host(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of each host once, with its ranks and their GPUs; `facts` are those of all ranks, in order."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank, own in enumerate(facts):
        gpu = own.get("gpu")
        host = hosts.setdefault(own["name"], {**own, "ranks": [], "gpus": []})
        host.pop("gpu", None)
        host["ranks"].append(rank)
        host["gpus"] += [gpu] if gpu else []
    return list(hosts.values())


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds `path`, like ext4, nfs4 or lustre; "" if it is unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found: tuple[int, str] = (-1, "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        if path.absolute().is_relative_to(point) and len(point) >= found[0]:  # a later mount hides an earlier one
            found = len(point), after.split()[0]
    return found[1]


def gpu_report() -> str | None:
    """Return what nvidia-smi says about the GPUs of this machine, if it exists."""
    try:
        done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout or None


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
