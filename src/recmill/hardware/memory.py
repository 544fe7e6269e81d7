"""Memory of this machine, within the limits of this process's control groups (containers, Slurm jobs)."""

import os
from pathlib import Path


def memory_bytes() -> int:
    """Return the memory of this machine, or the smallest limit of a control group that this process is in."""
    limits = [limit for limit, _ in _cgroups(Path("/"))]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def available_memory_bytes() -> int:
    """Return the bytes that this process can still allocate, within the limits of its control groups."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (free,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([free, *(max(limit - used, 0) for limit, used in _cgroups(Path("/")))])


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) bytes of this process's control group and of each group above it that has a limit.

    Version 2 ('0::/path') and 1 ('5:memory:/path'). File cache that can be reclaimed does not count as used.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        limit = "memory.limit_in_bytes" if controllers else "memory.max"
        use = "memory.usage_in_bytes" if controllers else "memory.current"
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder.is_relative_to(top) and (text := _read(folder / limit)).isdigit():  # 'max': no limit
                stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                found.append((int(text), int(_read(folder / use) or 0) - cache))
    return found


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
