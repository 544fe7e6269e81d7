"""Whether bfloat16 and float16 work on this CPU, and at what speed: found by running them in a child process.

A CPU may list AMX or AVX-512 instructions that fault under its hypervisor. Then a matrix product kills its process,
unless ONEDNN_MAX_CPU_ISA keeps oneDNN, torch's library for these products, from using them. oneDNN reads the variable
when a process starts.
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from recmill.errors import UserError
from recmill.files.atomic import new_file
from recmill.hardware.child import last_line, run_child
from recmill.hardware.cpu import FAULTS, cache_folder, instruction_sets

Dtype = Literal["bfloat16", "float16"]

VARIABLE = "ONEDNN_MAX_CPU_ISA"
_LAUNCHERS_FINDING = "RECMILL_PRECISION"  # a variable for workers, so that all decide by the same measurement
# From the fastest to one that every CPU of the last ten years has; all are without AMX.
_LOWER_ISAS: dict[Dtype, tuple[str, ...]] = {
    "bfloat16": ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2"),
    "float16": ("AVX512_CORE_FP16", "AVX512_CORE", "AVX2"),
}
_MAX_SECONDS = 60.0
# Prefixes of variables that decide which code oneDNN and torch choose, or what tests simulate.
_ENVIRONMENT = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_", "RECMILL_FAIL")


@dataclass(frozen=True)
class Finding:
    """What running a dtype has shown.

    `ratio`: its speed divided by float32's, or None if it does not work. `max_isa`: the value that ONEDNN_MAX_CPU_ISA
    must have, or "". `problem`: what a product does without that value, like "is killed by SIGILL".
    """

    dtype: Dtype
    ratio: float | None = None
    max_isa: str = ""
    problem: str = ""

    @property
    def is_faster(self) -> bool:
        return self.ratio is not None and self.ratio > 1.0

    def __str__(self) -> str:
        if self.ratio is None:
            return f"a product {self.problem} on this CPU"
        speed = f"{self.ratio:.2f} {'times' if self.is_faster else 'of'} float32's speed on this CPU"
        setting = f" with {VARIABLE}={self.max_isa}, without which a product {self.problem}" if self.max_isa else ""
        return f"measured {speed}{setting}"


def worker_environment(finding: Finding) -> dict[str, str]:
    """Return the variables with which to start processes that may use the dtype."""
    isa = {VARIABLE: finding.max_isa} if finding.max_isa and finding.is_faster else {}
    return {_LAUNCHERS_FINDING: json.dumps(asdict(finding)), **isa}


def verdict(finding: Finding) -> tuple[bool, str]:
    """Return whether this process should use the dtype rather than float32, and why."""
    if finding.is_faster and finding.max_isa and os.environ.get(VARIABLE) != finding.max_isa:
        return False, f"{finding}. To use it: export {VARIABLE}={finding.max_isa}"
    return finding.is_faster, str(finding)


def probe(dtype: Dtype, threads: int) -> Finding:
    """Return what running `dtype` on this CPU shows. It takes seconds the first time; the finding is cached.

    If the user has set ONEDNN_MAX_CPU_ISA, no other value is tried.
    """
    if launchers := _parsed(os.environ.get(_LAUNCHERS_FINDING, ""), dtype):
        return launchers
    folder = cache_folder()
    cached = folder / f"precision-{_digest(dtype, threads)}.json" if folder else None
    with contextlib.suppress(OSError):
        if cached and (known := _parsed(cached.read_text("utf-8", "replace"), dtype)):
            return known
    finding, is_certain = _search(dtype, threads)
    if cached and is_certain:
        with contextlib.suppress(OSError, UserError), new_file(cached) as file:  # if the disk is full, probe again
            file.write_text(json.dumps(asdict(finding)) + "\n", encoding="utf-8")
    return finding


def _search(dtype: Dtype, threads: int) -> tuple[Finding, bool]:
    """Return the finding, and whether it would be the same next time: a busy machine may run out of time."""
    ratio, problem, is_certain = _run(dtype, threads, "")
    if ratio is not None or not is_certain:
        return Finding(dtype, ratio, problem=problem), is_certain
    is_users_choice = VARIABLE in os.environ or "DNNL_MAX_CPU_ISA" in os.environ
    for isa in () if is_users_choice else _LOWER_ISAS[dtype]:
        ratio, _, is_known = _run(dtype, threads, isa)
        is_certain = is_certain and is_known
        if ratio is not None:
            return Finding(dtype, ratio, isa, problem), True
    return Finding(dtype, problem=problem), is_certain


def _run(dtype: Dtype, threads: int, isa: str) -> tuple[float | None, str, bool]:
    """Run the probe in a child process. Return the ratio of speeds, the problem, and whether that is certain."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **({VARIABLE: isa} if isa else {})}
    command = [sys.executable, "-P", "-m", "recmill.hardware.probe", dtype]
    try:
        done = run_child(command, _MAX_SECONDS, environment)
    except subprocess.TimeoutExpired:
        return None, f"gives no result within {_MAX_SECONDS:.0f} s", False
    if done.returncode < 0:
        return None, f"is {last_line(done)}", -done.returncode in FAULTS
    if done.returncode:
        return None, f"fails ({last_line(done)})", False
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # ONEDNN_VERBOSE prints others
    answer = json.loads(line)
    return answer.get("ratio"), answer.get("problem", ""), True


def _digest(dtype: Dtype, threads: int) -> str:
    """Return a key of this machine and of what runs on it: machines may share a home directory."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    facts = [platform.node(), platform.release(), torch, dtype, str(threads), *settings]
    return hashlib.sha256(instruction_sets() + "|".join(facts).encode()).hexdigest()[:16]


def _parsed(text: str, dtype: Dtype) -> Finding | None:
    """Return the finding that `text` holds; None if it is corrupt or about another dtype."""
    try:
        finding = Finding(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    is_good = isinstance(finding.ratio, float | None) and finding.max_isa in ("", *_LOWER_ISAS[dtype])
    return finding if finding.dtype == dtype and is_good and isinstance(finding.problem, str) else None
