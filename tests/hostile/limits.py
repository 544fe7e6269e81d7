"""Too little of a resource: memory, open files, file size, processes, disk."""

import contextlib
import ctypes
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

from .environments import COMMANDS
from .sandbox import Outcome, Sandbox, wait
from .verdict import Finding, is_close, judge, shown
from .worlds import Worlds, commands, normalized

_MB = 1 << 20
_CLONE_NEWNS = 0x20000
LIMITS: list[tuple[str, int]] = [
    *(("AS", size * _MB) for size in (400, 800, 1500, 2500, 4000)),
    *(("DATA", size * _MB) for size in (60, 200, 600)),
    *(("NOFILE", number) for number in (6, 10, 20, 40)),
    *(("FSIZE", size) for size in (0, 100, 3000, 50_000)),
    *(("NPROC", number) for number in (1, 2, 4, 10) if os.getuid() != 0),  # more than there are now; root has no limit
    ("STACK", 200_000),
]
FREE_KILOBYTES = (0, 4, 8, 16, 32, 64, 150)
FULL_DISK = [
    *(("clicks", title) for title in ("train", "resume", "evaluate", "verify", "list")),
    *(("histories", title) for title in ("recommend-all", "train")),
    *(("raw", title) for title in ("split", "films", "criteo", "adopt")),
]


def run_limits(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    """Run a command with a resource limit: it must do its work, or say that a resource is missing."""
    pairs = list(itertools.product(LIMITS, [command for command in COMMANDS if command[1] != "doctor"]))
    disks = list(itertools.product(FREE_KILOBYTES, FULL_DISK))
    order.shuffle(pairs)
    order.shuffle(disks)
    if index % 3 == 0:
        kilobytes, (world, title) = disks[index // 3 % len(disks)]
        what = f"{kilobytes} kB of disk: {shown(commands(world)[title])}"
        return what, _full_disk(worlds, name, world, title, kilobytes)
    (limit, size), (world, title) = pairs[index % len(pairs)]
    sandbox = worlds.copy(world, name)
    arguments = commands(world)[title]
    outcome = _run_limited(sandbox, arguments, limit, size)
    found = judge(outcome, {worlds.expected(world, title).code, 5})
    found += _after(worlds, world, title, outcome, sandbox)
    return f"RLIMIT_{limit}={size}: {shown(arguments)}", found


def _run_limited(sandbox: Sandbox, arguments: tuple[str, ...], what: str, size: int) -> Outcome:
    number = getattr(resource, f"RLIMIT_{what}")
    limit = size + (_own_threads() if what == "NPROC" else 0)
    return sandbox.run_through_pipes(*arguments, preexec_fn=lambda: resource.setrlimit(number, (limit, limit)))


def _own_threads() -> int:
    """Return how many threads this user has."""
    users = subprocess.run(["ps", "-eLo", "uid="], capture_output=True, text=True, check=True).stdout.split()
    return users.count(str(os.getuid()))


def _after(worlds: Worlds, world: str, title: str, outcome: Outcome, sandbox: Sandbox) -> list[Finding]:
    """Compare the output of a success; after a failure, checkpoints that were there must be complete."""
    expected = worlds.expected(world, title)
    found = []
    if outcome.code == 0 and expected.code == 0:
        if not is_close(normalized(outcome.stdout, sandbox), expected.stdout):
            found.append(Finding("bug", f"exit code 0, but other output: {outcome.stdout[:300]!r}"))
    elif title == "resume":
        check = sandbox.fork("checkpoint", "verify", "run")
        if check.code != 0:
            found.append(Finding("bug", f"the run is corrupt afterwards: {check.text[:300]}"))
    return found


# A full disk


def _full_disk(worlds: Worlds, name: str, world: str, title: str, kilobytes: int) -> list[Finding]:
    """Make the trial in a child process, where a small file system is mounted over the sandbox."""
    report = worlds.folder / f"{name}.json"
    worlds.expected(world, title)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            report.write_text(json.dumps([asdict(f) for f in _on_small_disk(worlds, name, world, title, kilobytes)]))
            code = 0
        finally:
            os._exit(code)
    if wait(pid, 200) != 0 or not report.exists():
        return [Finding("bug", "the tester itself failed on a full disk")]
    return [Finding(**finding) for finding in json.loads(report.read_text())]


def _on_small_disk(worlds: Worlds, name: str, world: str, title: str, kilobytes: int) -> list[Finding]:
    sandbox = worlds.sandbox(name)
    if not _mount(sandbox.folder):
        return []  # without permission there is nothing to try
    original = worlds.folder / "originals" / world
    shutil.copytree(original, sandbox.folder, dirs_exist_ok=True)
    saved = sandbox.folder / "run" / "config.toml"
    if saved.exists():
        saved.write_text(saved.read_text().replace(str(original), str(sandbox.folder)), encoding="utf-8")
    _fill(sandbox.folder, kilobytes * 1024)
    outcome = sandbox.fork(*commands(world)[title])
    expected = worlds.expected(world, title)
    places = ["data", "run/", "new/", "out", "npys", "all.parquet"]  # relative, as the arguments are
    found = judge(outcome, {expected.code, 5}, [str(sandbox.folder), *(f": {place}" for place in places)])
    return [*found, *_after(worlds, world, title, outcome, sandbox)]


def _mount(folder: Path) -> bool:
    """Mount a file system of 8 MB that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True)
    return private.returncode == mounted.returncode == 0


def _fill(folder: Path, free: int) -> None:
    """Leave about `free` bytes."""
    with (folder / "filler").open("wb") as file:
        with contextlib.suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        file.truncate(max(0, file.tell() - free))
