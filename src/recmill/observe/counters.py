"""Counters of this process and its machine, from /proc, cgroups and NVIDIA's library. What is missing is left out."""

import contextlib
import os
import resource
from functools import cache
from pathlib import Path
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def counters(root: Path = Path("/")) -> dict[str, Any]:
    """Return what this process has used so far, and how busy its machine is; times in seconds, sizes in bytes."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, Any] = {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "rss": rss_bytes(),
        "peak_rss": peak_bytes(root),
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
        "switches": usage.ru_nvcsw,
        "involuntary_switches": usage.ru_nivcsw,
    }
    io = _pairs(root / "proc/self/io", ": ")
    found |= {name: int(io[name]) for name in ("read_bytes", "write_bytes") if name in io}
    for kind in ("cpu", "io", "memory"):
        some = _read(root / "proc/pressure" / kind).split("\n")[0].rpartition("total=")[2]
        if some.isdigit():
            found[f"{kind}_pressure_s"] = int(some) / 1e6
    found |= _throttling(root)
    return found | _gpus()


def peak_bytes(root: Path = Path("/")) -> int:
    """Return the most memory that this process used; getrusage would begin with that of the process that started it."""
    return int(_pairs(root / "proc/self/status", ":").get("VmHWM", "0 kB").split()[0]) * 1024


def rss_bytes() -> int:
    """Return the memory that this process uses now."""
    text = _read(Path("/proc/self/statm")).split()
    return int(text[1]) * _PAGE_BYTES if len(text) > 1 else 0


def _throttling(root: Path) -> dict[str, float]:
    """Return for how long the control group of this process was not allowed to run."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            stat = _pairs(root / "sys/fs/cgroup" / controllers / path.lstrip("/") / "cpu.stat", " ")
            if "throttled_usec" in stat:
                return {"throttled_s": int(stat["throttled_usec"]) / 1e6}
            if "throttled_time" in stat:  # version 1, in ns
                return {"throttled_s": int(stat["throttled_time"]) / 1e9}
    return {}


@cache
def _nvml() -> Any:
    """Return NVIDIA's library, if it is installed and finds a GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        return pynvml
    except Exception:  # noqa: BLE001 - without a driver it raises an error of its own
        return None


def _gpus() -> dict[str, Any]:
    """Return utilization, memory, power and temperature of each GPU of the machine."""
    if (nvml := _nvml()) is None:
        return {}
    gpus = []
    with contextlib.suppress(nvml.NVMLError):
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            facts = {"percent": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu}
            facts |= {"used": nvml.nvmlDeviceGetMemoryInfo(gpu).used, "watts": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3}
            gpus.append(facts | {"celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)})
    return {"gpus": gpus} if gpus else {}


def _pairs(path: Path, separator: str) -> dict[str, str]:
    pairs = (line.partition(separator) for line in _read(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # an old kernel, a container, or a file that only others may read
        return ""
