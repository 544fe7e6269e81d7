"""The directory of one trial, and two ways to run a command in it: the real one, and a fork that starts at once."""

import ctypes
import faulthandler
import importlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

RECMILL = str(Path(sys.executable).with_name("recmill"))
SECONDS = 60.0  # a command that takes longer hangs
GONE_SECONDS = 10.0  # after a command has ended, its other processes must end by then
FORK_BYTES = 3 << 30  # address space that a forked command may add to that of this process
TEMPORARY = re.compile(r"\..*\.(partial|old)-\d+|\.saving-.*|\..*\.\d+")  # names of files that are being written
_PR_SET_CHILD_SUBREAPER = 36
_IN_GROUP = ("train", "evaluate")  # forked, they act as the only process of a group that torchrun has started
_COMMANDS = (
    "adopt",
    "audit",
    "checkpoint",
    "compare",
    "evaluate",
    "plot",
    "recommend",
    "report",
    "results",
    "split",
    "train",
)
_NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RECMILL_FAIL")


@dataclass(frozen=True)
class Outcome:
    """What a command did. `code` is None if it did not end in time, negative if a signal ended it."""

    arguments: Sequence[str]
    code: int | None
    stdout: str
    stderr: str
    left: list[str] = field(default_factory=list)  # processes and temporary files

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


class Sandbox:
    """The working directory of a trial, with a TMPDIR and a HOME beside it.

    All processes that a trial leaves are found here. Its HOME has a copy of the compiled kernels in `cache`, but knows
    nothing of files that were verified in other trials.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self.temporary = folder.with_name(f"{folder.name}.tmp")
        self.home = folder.with_name(f"{folder.name}.home")
        self.folder.mkdir(parents=True)
        self.temporary.mkdir()
        self.home.mkdir()
        if cache and cache.exists():
            shutil.copytree(cache, self.home / ".cache", ignore=shutil.ignore_patterns("verified-files.txt"))
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the environment of a command. A change to None removes the variable."""
        own = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        own |= {"TMPDIR": str(self.temporary), "HOME": str(self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        merged = own | dict(changes or {})
        return {name: value for name, value in merged.items() if value is not None}

    def fork(self, *arguments: str, seconds: float = SECONDS, is_alone: bool = True) -> Outcome:
        """Run the command in a fork of this process, which has loaded everything.

        With `is_alone`, this process must have no other children: those that are there afterwards were left behind.
        """
        before = self._temporary_files()
        stdout, stderr = self._outputs()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become_command(arguments, self.folder, self.environment(), stdout, stderr)
        code = wait(pid, seconds)
        processes = end_children(GONE_SECONDS) if is_alone else []
        return self._outcome(arguments, code, before, processes)

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        **options: Any,
    ) -> "subprocess.Popen[bytes]":
        """Start the real command; `prefix` is a command that starts it, and `options` are those of Popen."""
        stdout, stderr = self._outputs()
        with stdout.open("wb") as out, stderr.open("wb") as err:
            given: dict[str, Any] = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL, "cwd": self.folder}
            given |= {"env": self.environment(environment), **options}
            return subprocess.Popen([*prefix, RECMILL, *arguments], **given)

    def run(self, *arguments: str, seconds: float = SECONDS, **options: Any) -> Outcome:
        """Run the real command; `options` are those of `start`."""
        before = self._temporary_files()
        return self.end(self.start(*arguments, **options), arguments, before, seconds)

    def run_through_pipes(self, *arguments: str, **options: Any) -> Outcome:
        """Run the real command with pipes as its outputs, because a limit of the file size would apply to files."""
        before = self._temporary_files()
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            outputs = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            outputs = process.communicate()
        for path, output in zip(self._outputs(), outputs, strict=True):
            path.write_bytes(output)
        code = None if process.returncode == -signal.SIGKILL else process.returncode
        return self._outcome(arguments, code, before, end_children(GONE_SECONDS))

    def end(
        self,
        process: "subprocess.Popen[bytes]",
        arguments: Sequence[str],
        before: set[Path] | None = None,
        seconds: float = SECONDS,
        gone_seconds: float = GONE_SECONDS,
    ) -> Outcome:
        """Wait for a command that was started, and return what it did."""
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        processes = end_children(gone_seconds)
        if code is not None and code < 0:  # nobody cleaned up before it ended; its workers do when they leave
            deadline = time.monotonic() + GONE_SECONDS
            while self._temporary_files() - (before or set()) and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._outcome(arguments, code, before or set(), processes)

    def remove(self) -> None:
        for path in self.folder.parent.glob(f"{self.folder.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _outputs(self) -> tuple[Path, Path]:
        return self.temporary.with_suffix(".stdout"), self.temporary.with_suffix(".stderr")

    def _outcome(self, arguments: Sequence[str], code: int | None, before: set[Path], processes: list[str]) -> Outcome:
        left = [f"process {text}" for text in processes]
        left += [str(path) for path in sorted(self._temporary_files() - before)]
        left = [] if code is None else left  # we have killed it
        stdout, stderr = (path.read_text("utf-8", "replace") for path in self._outputs())
        return Outcome(arguments, code, stdout, stderr, left)

    def _temporary_files(self) -> set[Path]:
        own = [path for path in self.folder.rglob("*") if TEMPORARY.fullmatch(path.name)]
        return {*self.temporary.iterdir(), *own}


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child, negative for a signal; kill it after `seconds` and return None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in lists for child in text.split()]


def end_children(seconds: float) -> list[str]:
    """Wait until this process has no children; after `seconds`, kill those that are left and describe them."""
    deadline = time.monotonic() + seconds
    left: list[str] = []
    while found := children(os.getpid()):
        for pid in found:
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
            if time.monotonic() > deadline:
                left.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ').strip()}")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        time.sleep(0.01)
    return left


def _become_command(
    arguments: Sequence[str], folder: Path, environment: dict[str, str], stdout: Path, stderr: Path
) -> NoReturn:
    """Do in this forked process what the command would do, and end it."""
    code = 1
    try:
        for descriptor, path, flags in (
            (0, Path(os.devnull), os.O_RDONLY),
            (1, stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            os.dup2(os.open(path, flags), descriptor)
        faulthandler.disable()
        limit = _own_bytes() + FORK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if any(name in arguments for name in _IN_GROUP):
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        sys.argv = ["recmill", *arguments]
        import recmill.cli

        recmill.cli.main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would do
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def load_everything() -> None:
    """Import what commands import, so that a fork of this process needs no time for it."""
    from recmill import registry

    for module in ("cli", "training.loop", *(f"commands.{command}" for command in _COMMANDS)):
        importlib.import_module(f"recmill.{module}")
    for names in (registry.MODELS, registry.DATASETS, registry.TASKS):
        for name in names:
            registry.load(names, name, "plug-in")


@contextmanager
def terminated_at_end(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill the process, if it still runs, when the block ends."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
