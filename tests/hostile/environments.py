"""Odd environment variables, and descriptors that are closed or lead nowhere."""

import itertools
import os
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .sandbox import SECONDS, Outcome, Sandbox
from .verdict import Finding, is_close, judge, shown
from .worlds import Worlds, commands, normalized

COMMANDS = [
    *(("clicks", title) for title in ("train", "evaluate", "resume", "list", "verify", "inspect", "results", "audit")),
    *(("histories", title) for title in ("recommend", "recommend-all", "evaluate")),
    *(("raw", title) for title in ("split", "adopt", "films", "criteo")),
    ("raw", "doctor"),
]
HANGING_SECONDS = 60.0  # how long a command waits for a compiler
_NUMBERS = ("", " ", "-1", "99", "x", "1.5", "٣", str(10**30))
GROUP = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
# One or several variables; None removes one.
ODD: list[Mapping[str, str | None]] = [
    *({name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") for value in _NUMBERS),
    *(
        {"RANK": rank, "WORLD_SIZE": size}
        for rank, size in (("0", "0"), ("1", "1"), ("-1", "1"), ("0", "x"), ("x", "2"))
    ),
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "x"},
    {"RANK": "0", "WORLD_SIZE": "2"},
    *(GROUP | {"MASTER_PORT": port} for port in ("", "x", "-1", "70000", str(10**30))),
    *({"TORCHELASTIC_RESTART_COUNT": value} for value in ("x", "", "-1")),
    *({"RECMILL_JOB": value} for value in ("", "/nowhere")),
    *({"RECMILL_LAUNCHER": value} for value in ("x", "1")),
    *({"RECMILL_STORE_FD": value} for value in ("x", "-1", "0", "999")),
    *({"OMP_NUM_THREADS": value} for value in ("0", "-1", "x", "", "1,2", "100000000000", "1.5")),
    *({"TMPDIR": value} for value in ("", "/nowhere/at/all", "/dev/null", "relative", "/proc")),
    *({"HOME": value} for value in ("", "/dev/null/nowhere", "/dev/null", "relative", None)),
    *({"LANG": value, "LC_ALL": value} for value in ("C", "POSIX", "tr_TR.UTF-8", "xx", "", "de_DE.ISO-8859-1")),
    *({"PYTHONIOENCODING": value} for value in ("ascii", "latin-1", "ascii:strict", "utf-16")),
    {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    *({"COLUMNS": value} for value in ("0", "1", "-5", "x", "1000000")),
    *({"TERM": value} for value in ("", "dumb", "xterm-256color", "x" * 5000)),
    *({"CXX": value} for value in ("", "/bin/false", "/nowhere", "/dev/null", "/tmp", "true; echo", "failing-g++")),
    *({"PATH": value} for value in ("", "/nowhere", "failing-g++")),
    {"PATH": "hanging-g++", "HOME": "/dev/null"},
    *({"CUDA_VISIBLE_DEVICES": value} for value in ("", "-1", "99", "x", "GPU-x")),
    *({"RECMILL_FAIL": value} for value in ("x", ":", "@:", "train.step@step=x:kill", "train.step:nothing", "a:b@c=1")),
    {"RECMILL_FAIL": ", ,"},
    *({"NO_COLOR": "1", "FORCE_COLOR": value} for value in ("1", "x")),
    *({"PYTHONWARNINGS": value} for value in ("error", "x")),
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
    *({"MALLOC_MMAP_THRESHOLD_": value} for value in ("x", "-1")),
    *({"POLARS_MAX_THREADS": value} for value in ("0", "x")),
    *({"GLOO_SOCKET_IFNAME": value} for value in ("nothing0", "")),
    *({"TZ": value} for value in ("", "x/y", "UTC-99")),
    {"http_proxy": "http://nowhere.invalid:1", "https_proxy": "x"},
]
_FORMATTING = (
    "COLUMNS",
    "TERM",
    "FORCE_COLOR",
    "PYTHONIOENCODING",
    "PYTHONUTF8",
    "LANG",
)  # they change what is printed


@cache
def _pairs() -> list[tuple[int, tuple[str, str]]]:
    return list(itertools.product(range(len(ODD)), COMMANDS))


def run_environment(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    """Run a command with an odd environment: the result must be the usual one, or an error must name the variable."""
    pairs = list(_pairs())
    order.shuffle(pairs)
    number, (world, title) = pairs[index % len(pairs)]
    sandbox = worlds.copy(world, name)
    changes = _with_compilers(sandbox, ODD[number])
    arguments = _arguments(world, title)
    seconds = SECONDS + (HANGING_SECONDS if "hanging-g++" in ODD[number].values() else 0)
    outcome = sandbox.run(*arguments, environment=changes, seconds=seconds)
    what = f"{' '.join(f'{key}={ascii(value)[:60]}' for key, value in ODD[number].items())} {shown(arguments)}"
    if title == "doctor":
        return what, judge(outcome, {0, 2, 5})
    expected = worlds.expected(world, title)
    found = judge(outcome, {expected.code, 2, 5}, list(changes))
    if outcome.code == 0 and expected.code == 0 and not set(changes) & set(_FORMATTING):
        found += _compared(worlds, world, title, outcome, sandbox)
    return what, found


def _arguments(world: str, title: str) -> tuple[str, ...]:
    return ("doctor",) if title == "doctor" else commands(world)[title]


def _compared(worlds: Worlds, world: str, title: str, outcome: Outcome, sandbox: Sandbox) -> list[Finding]:
    if is_close(normalized(outcome.stdout, sandbox), worlds.expected(world, title).stdout):
        return []
    return [Finding("bug", f"exit code 0, but other output: {outcome.stdout[:300]!r}")]


def _with_compilers(sandbox: Sandbox, changes: Mapping[str, str | None]) -> dict[str, str | None]:
    """Replace the names of fake compilers by their paths, or by a PATH that begins with them."""
    changed = dict(changes)
    for name, body in (("failing-g++", "echo no >&2; exit 1"), ("hanging-g++", "exec sleep 100")):
        folder = sandbox.folder.with_name(f"{sandbox.folder.name}.{name}")
        for key, value in changes.items():
            if value == name:
                folder.mkdir()
                for compiler in ("g++", "c++", "clang++"):
                    (folder / compiler).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
                    (folder / compiler).chmod(0o755)
                changed[key] = f"{folder}:{os.environ['PATH']}" if key == "PATH" else str(folder / "g++")
    return changed


# Descriptors

_CLOSED = [set(some) for size in (1, 2, 3) for some in itertools.combinations(range(3), size)]
_ODD_OUTPUTS = ("pipe", "pipe-err", "pipe-both", "full-out", "full-err", "full-both")
DESCRIPTORS: list[set[int] | str] = [*_CLOSED, *_ODD_OUTPUTS, "no-directory"]
WRITING = ("train", "resume", "recommend-all", "split", "adopt", "films", "criteo")  # commands whose result is files


def run_descriptors(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    """Run a command with closed descriptors, outputs that cannot be written, or a working directory that is gone."""
    pairs = list(itertools.product(range(len(DESCRIPTORS)), COMMANDS))
    order.shuffle(pairs)
    number, (world, title) = pairs[index % len(pairs)]
    how = DESCRIPTORS[number]
    sandbox = worlds.copy(world, name)
    arguments = _arguments(world, title)
    if how == "no-directory":
        arguments = _absolute(arguments, sandbox)
    outcome = sandbox.run(*arguments, **_options(how))
    what = f"{f'closed {sorted(how)}' if isinstance(how, set) else how}: {shown(arguments)}"
    if title == "doctor":
        codes = {"pipe": {141}, "pipe-both": {141}, "full-out": {5}, "full-both": {5}}.get(str(how), {0, 5})
        return what, [finding for finding in judge(outcome, codes) if "without a message" not in finding.text]
    expected = worlds.expected(world, title)
    codes, sees_output = _expectation(how, expected.code, title, bool(expected.stdout.strip()))
    found = judge(outcome, codes)
    if outcome.code == 0 and sees_output and how != "no-directory":
        found += _compared(worlds, world, title, outcome, sandbox)
    if outcome.code == 0 and title in ("train", "resume"):
        folder = "new" if title == "train" else "run"
        if (check := sandbox.fork("checkpoint", "verify", folder)).code != 0:
            found.append(Finding("bug", f"the run is corrupt afterwards: {check.text[:300]}"))
    return what, [finding for finding in found if "without a message" not in finding.text]


def _expectation(how: set[int] | str, usual: int, title: str, prints: bool) -> tuple[set[int], bool]:
    """Return the exit codes that are right, and whether the output must be the usual one.

    A command that writes files has done its work, even if nobody can read its output.
    """
    if isinstance(how, set):
        return {usual}, 1 not in how
    is_lost = prints and title not in WRITING
    if how in ("pipe", "pipe-both"):
        return {141} if is_lost else {usual}, False
    if how in ("full-out", "full-both"):
        return {5} if is_lost else {usual}, False
    return ({5} if how == "no-directory" else {usual}), True


def _options(how: set[int] | str) -> dict[str, Any]:
    if isinstance(how, set):
        return {"preexec_fn": _closing(how), "stdin": None}
    if how == "no-directory":
        return {"prefix": ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh"]}
    if how.startswith("pipe"):
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    output = _Closing(writing)
    stream = how.partition("-")[2] or "out"
    return {name: output for name in ("stdout", "stderr") if stream in ("both", name.removeprefix("std"))}


class _Closing:
    """A descriptor for Popen, closed when this object goes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def _closing(descriptors: set[int]) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


def _absolute(arguments: tuple[str, ...], sandbox: Sandbox) -> tuple[str, ...]:
    made = [str(sandbox.folder / a) if (sandbox.folder / a).exists() or a in ("new", "out") else a for a in arguments]
    return (*made, "--set", f"data.path={sandbox.folder / 'data'}") if arguments[0] == "train" else tuple(made)
