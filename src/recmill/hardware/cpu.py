"""Cores, name and instruction sets of the CPU, the C++ compiler, and the cache of what was made for this machine."""

import os
import platform
import shutil
import signal
import tempfile
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
# Signals by which a process ends that does what this CPU cannot do. Others (SIGKILL, say) come from outside.
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_process(procs: int) -> int:
    """Return how many threads each of `procs` processes on this machine computes with; OMP_NUM_THREADS wins."""
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(chosen) if chosen.isdigit() and int(chosen) else max(1, num_cores() // max(1, procs))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def instruction_sets() -> bytes:
    """Return the CPU's model and flags: what was compiled or measured for others does not hold here."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.machine().encode()
    return b"|".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler: what CXX names, or the first of `COMPILERS` that is there."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)


def cache_folder() -> Path | None:
    """Return ~/.cache/recmill, private because what lies in it is executed; None if it cannot be written to."""
    try:
        folder = Path.home() / ".cache" / "recmill"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None
