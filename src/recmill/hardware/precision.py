"""Whether bfloat16 and float16 work on this CPU, and at what speed: found by running them in a child process.

A CPU may list AMX or AVX-512 instructions on which its hypervisor faults. Then a product kills the
process that computes it, unless the variable ONEDNN_MAX_CPU_ISA keeps oneDNN, torch's library for
these products, from using them. oneDNN reads it once, so it must be set before a process starts.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from recmill.hardware.cpu import FAULTS, cache_folder, instruction_sets

Dtype = Literal["bfloat16", "float16"]

VARIABLE = "ONEDNN_MAX_CPU_ISA"
_HANDED_DOWN = "RECMILL_PRECISION"  # a launcher's finding, for its workers: they all decide by the same numbers
# From the fastest down to what every CPU of the last ten years runs; all are without AMX.
_LOWER_ISAS: dict[Dtype, tuple[str, ...]] = {
    "bfloat16": ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2"),
    "float16": ("AVX512_CORE_FP16", "AVX512_CORE", "AVX2"),
}
_MAX_SECONDS = 60.0
# What else decides which code oneDNN and torch choose, and what tests simulate.
_ENVIRONMENT = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_", "RECMILL_FAIL")


@dataclass(frozen=True)
class Finding:
    """What running a dtype has shown. `ratio`: its speed divided by float32's; None: it does not work.

    `max_isa`: the value of ONEDNN_MAX_CPU_ISA without which it does not work ("": it needs none).
    `problem`: what it does without, like "is killed by SIGILL".
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
    """Return the variables that processes which may use the dtype must be started with."""
    handed = {_HANDED_DOWN: json.dumps(asdict(finding))}
    return handed | ({VARIABLE: finding.max_isa} if finding.max_isa and finding.is_faster else {})


def verdict(finding: Finding) -> tuple[bool, str]:
    """Return whether this process should use the dtype, and why. False: float32 is faster, or safer."""
    if finding.is_faster and finding.max_isa and os.environ.get(VARIABLE) != finding.max_isa:
        return False, f"{finding}. To use it: export {VARIABLE}={finding.max_isa}"
    return finding.is_faster, str(finding)


def probe(dtype: Dtype, threads: int) -> Finding:
    """Return what running `dtype` on this CPU has shown. Takes seconds the first time; then it is in the cache.

    The user's own ONEDNN_MAX_CPU_ISA is respected: nothing else is tried then.
    """
    if handed := _parsed(os.environ.get(_HANDED_DOWN, ""), dtype):
        return handed
    folder = cache_folder()
    kept = folder / f"precision-{_digest(dtype, threads)}.json" if folder else None
    if kept and (known := _parsed(_read(kept), dtype)):
        return known
    finding, is_certain = _search(dtype, threads)
    if kept and is_certain:
        _write(kept, finding)
    return finding


def _search(dtype: Dtype, threads: int) -> tuple[Finding, bool]:
    """Return the finding, and whether it would be the same the next time (a busy machine may run out of time)."""
    ratio, problem, is_certain = _run(dtype, threads, "")
    if ratio is not None or not is_certain:
        return Finding(dtype, ratio, problem=problem), is_certain
    is_set = any(name in os.environ for name in (VARIABLE, "DNNL_MAX_CPU_ISA"))
    for isa in () if is_set else _LOWER_ISAS[dtype]:
        ratio, _, is_known = _run(dtype, threads, isa)
        is_certain = is_certain and is_known
        if ratio is not None:
            return Finding(dtype, ratio, isa, problem), True
    return Finding(dtype, problem=problem), is_certain


def _run(dtype: Dtype, threads: int, isa: str) -> tuple[float | None, str, bool]:
    """Run the probe in a child process: the ratio of speeds or the problem, and whether that is certain."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **({VARIABLE: isa} if isa else {})}
    command = [sys.executable, "-P", "-m", "recmill.hardware.probe", dtype]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"gives no result within {_MAX_SECONDS:.0f} s", False
    if done.returncode < 0:
        return None, f"is killed by {signal.Signals(-done.returncode).name}", -done.returncode in FAULTS
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return None, f"fails ({reason})", False
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # ONEDNN_VERBOSE prints others
    answer = json.loads(line)
    return answer.get("ratio"), answer.get("problem", ""), True


def _digest(dtype: Dtype, threads: int) -> str:
    """Return what identifies this machine and what was run on it: machines may share a home directory."""
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
    except (ValueError, TypeError):
        return None
    return finding if finding.dtype == dtype and isinstance(finding.ratio, float | None) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _write(path: Path, finding: Finding) -> None:
    """Keep the finding; others see all of it or nothing. If the disk is full, the next process probes again."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        made.write_text(json.dumps(asdict(finding)) + "\n", encoding="utf-8")
        os.replace(made, path)
