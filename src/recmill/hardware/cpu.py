"""Cores, name and instruction sets of the CPU, its C++ compiler, and the cache of files made for this machine."""

import os
import platform
import shutil
import signal
import tempfile
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
# Signals that end a process which does what this CPU cannot do. Others, like SIGKILL, come from outside.
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_process(procs: int) -> int:
    """Return the number of threads of each of `procs` processes: OMP_NUM_THREADS, or its share of the cores."""
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(chosen) if chosen.isdecimal() and int(chosen) else max(1, num_cores() // max(1, procs))


def cpu_name() -> str:
    names = (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(names, platform.machine())


def instruction_sets() -> bytes:
    """Return the CPU's model and flags, as a key for what was compiled or measured on it."""
    facts = {line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))}
    return "|".join(sorted(facts)).encode()


def is_amd_with_avx512() -> bool:
    lines = _cpuinfo()
    is_amd = any(line.startswith("vendor_id") and line.endswith("AuthenticAMD") for line in lines)
    return is_amd and any(line.startswith("flags") and "avx512f" in line.split() for line in lines)


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return [f"model name: {platform.machine()}"]


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler: that of CXX, or the first of `COMPILERS` that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)


def cache_folder() -> Path | None:
    """Return ~/.cache/recmill, or None if it is not writable. It is private, because its files are executed."""
    try:
        folder = Path.home() / ".cache" / "recmill"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None
