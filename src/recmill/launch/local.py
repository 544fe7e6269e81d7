"""Start the processes of a job on this machine, on loopback only, and return its result or its first error.

Each worker is a new interpreter, because thread counts and the allocator must be set before a process starts.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from recmill import registry
from recmill.environment import Node, launched_environment, max_processes, own_node, process_environment
from recmill.errors import ConfigError, ResourceError, UserError
from recmill.files.atomic import write_json
from recmill.hardware.cpu import num_cores
from recmill.launch import processes
from recmill.launch.failures import LostWorkerError, WorkerError, first_error
from recmill.launch.signals import FORWARDED, ONE_REQUEST_SECONDS, blocked, handled, shown, stop_error
from recmill.launch.watchdog import read_hangs
from recmill.observe.printed import counted

log = logging.getLogger(__name__)

_JOB_PREFIX = "recmill-launched-"
_POLL_SECONDS = 0.05
_GATHER_SECONDS = 1.0  # after the first failure, how long the other ranks may still report theirs
_GATHER_HANGS_SECONDS = 3.0  # the same after the first hang; all ranks write their stacks meanwhile
_SECOND_SIGNAL_SECONDS = 2.0  # how long workers have to exit after a second signal
_END_SECONDS = 10.0  # how long killed workers have to disappear
# 27 files were open in a worker of one process, 40 of two, 43 of four; data of many files takes more.
_OPEN_FILES = 48
_OPEN_FILES_PER_PROCESS = 8


def is_launched_with(procs: int) -> bool:
    """Return whether a launcher has started this process; raise if it did and --procs asks for more processes."""
    own = process_environment()
    if own.is_launched and procs > 1:
        raise ConfigError(
            f"--procs {procs} inside a process that {own.started_by} started: it is rank {own.rank} of {own.size}. "
            "Leave --procs out; if nothing was launched here, unset RANK and WORLD_SIZE."
        )
    return own.is_launched


def run_job(
    command: str,
    arguments: dict[str, Any],
    procs: int,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `recmill.commands.<command>.work(world, **arguments)` in `procs` processes and return its result.

    With RECMILL_NODES, each machine starts this many, and gets the result of its first process.

    A job that lost a worker, or met an internal error, is restarted up to `max_restarts` times. Workers get the
    variables of `environment`, unless this process has them already.
    """
    process_environment()  # raises ConfigError; workers inherit its variables
    if procs < 1:
        raise ConfigError(f"--procs {procs}: at least one process is needed.")
    if procs > (limit := max_processes(num_cores())):
        raise ConfigError(
            f"--procs {procs} on {num_cores()} cores: at most {limit} processes are started, because more only slow "
            "each other down. Set the environment variable RECMILL_MAX_PROCS to start more."
        )
    _check_open_files(procs)
    log.info("starting %s", counted(procs, "process"))
    signals = _Signals()
    order = {
        "command": command,
        "arguments": arguments,
        "plugin_directories": registry.plugin_directories(),
        "log_level": logging.getLogger("recmill").level,  # as the caller has set it
    }
    with handled(FORWARDED, signals.forward):
        attempt = 0
        while True:
            try:
                return _run_once(order, procs, attempt, environment or {}, signals)
            except UserError as error:
                error.restarts = attempt
                may_restart = isinstance(error, LostWorkerError | WorkerError) and not signals.names
                if not may_restart or attempt == max_restarts:
                    raise
                attempt += 1
                log.warning("restart %d of %d after: %s", attempt, max_restarts, error)


def _check_open_files(procs: int) -> None:
    """Raise ResourceError if workers may open too few files: torch would try again to open sockets, for an hour."""
    needed = _OPEN_FILES + _OPEN_FILES_PER_PROCESS * procs
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < needed:
        raise ResourceError(
            f"A process may have {allowed} files open, and --procs {procs} needs {needed}. "
            "Raise the limit: ulimit -n 4096."
        )


def _run_once(
    order: dict[str, Any], procs: int, attempt: int, environment: Mapping[str, str], signals: "_Signals"
) -> Any:
    node = own_node()
    with _job_directory() as job:
        write_json(job / "job.json", order)
        try:
            with blocked():
                if signals.names:
                    name = signals.names[0]
                    raise stop_error(name, f"{shown(name)} was received before the job had started.")
                signals.workers = []
                _start(job, procs, node, attempt, environment, signals.workers)
            signals.forward_again()
            with _handle(signals.workers) as handles:
                failed = _wait(job, signals, node.rank * procs, handles)
        finally:
            _end(signals.workers)
        if failed is not None:
            raise first_error(job, failed, procs, signals.names, node.rank * procs)
        return json.loads((job / "result.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def _job_directory() -> Iterator[Path]:
    """Yield a directory that the job's processes share, and remove it, as well as those of launchers that were killed.

    A launcher holds a lock on its directory. If it is killed, its workers remove the directory when they leave (see
    `worker`); if they are killed as well, the next launcher does.
    """
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ResourceError(f"{error.strerror}. Set TMPDIR to a directory that you may write to.") from None
    for earlier in folder.glob(f"{_JOB_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(earlier):  # held by its launcher, or not ours
            shutil.rmtree(earlier, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="recmill-new-"))
    with _locked(new):
        job = new.rename(folder / new.name.replace("recmill-new-", _JOB_PREFIX))  # only now other launchers look at it
        try:
            yield job
        finally:
            shutil.rmtree(job, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory itself within the block; raise OSError if somebody else does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _start(
    job: Path,
    procs: int,
    node: Node,
    attempt: int,
    environment: Mapping[str, str],
    workers: list[subprocess.Popen[bytes]],
) -> None:
    if environment:
        processes.end_ahead()
    common = {**environment, **processes.variables(procs, is_alone=node.count == 1)}
    with contextlib.ExitStack() as stack:
        descriptor = None
        port = node.port
        if node.count == 1:
            # Bound here and handed to rank 0: no free-port race, and nobody outside can reach it.
            listener = stack.enter_context(socket.create_server((node.host, 0)))
            descriptor, port = listener.fileno(), listener.getsockname()[1]
            os.set_inheritable(descriptor, True)
        for local_rank in range(procs):
            own = launched_environment(local_rank, procs, node, job, attempt, port, descriptor)
            is_main = own["RANK"] == "0"
            with (job / f"out-{own['RANK']}.txt").open("wb") as file:
                output = None if is_main else file  # only rank 0 writes to the terminal
                store = [descriptor] if is_main and descriptor is not None else []
                worker = processes.take_ahead(own) if node.count == procs == 1 else None
                workers.append(worker or processes.start(common | own, output=output, pass_fds=store))


class _Signals:
    """The signals that the launcher received. The first asks the workers to save and stop, the second to stop now."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []
        self.deadline = math.inf  # on the monotonic clock; workers that are left then are killed
        self._first_at = 0.0

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the workers; signals that arrive together are one request, as workers count them."""
        now = time.monotonic()
        if not self.names:
            self._first_at = now
            self.names = [signal.Signals(number).name]
        elif len(self.names) == 1 and now - self._first_at > ONE_REQUEST_SECONDS:
            self.deadline = now + _SECOND_SIGNAL_SECONDS
            self.names.append(signal.Signals(number).name)
        for worker in self.workers:
            worker.send_signal(number)

    def forward_again(self) -> None:
        """Forward what was received while workers were started: a library's thread may take a blocked signal."""
        for name in self.names:
            for worker in self.workers:
                worker.send_signal(signal.Signals[name])


def _wait(job: Path, signals: _Signals, first_rank: int, handles: list[int]) -> list[dict[int, int]] | None:
    """Return None when all workers have succeeded, or their exit codes soon after one failed, hung or ignored a signal.

    Exit codes are by rank, without those of workers that still run; each dictionary holds what one poll has found.
    """
    failed: list[dict[int, int]] = []
    deadline = math.inf
    while True:
        codes = [worker.poll() for worker in signals.workers]
        if not any(codes) and None not in codes:
            return None
        known = set().union(*failed)
        if new := {rank: code for rank, code in enumerate(codes, first_rank) if code and rank not in known}:
            failed.append(new)
        now = time.monotonic()
        if now > min(deadline, signals.deadline) or None not in codes:
            return failed
        if failed:
            deadline = min(deadline, now + _GATHER_SECONDS)
        elif read_hangs(job):
            deadline = min(deadline, now + _GATHER_HANGS_SECONDS)
        select.select(handles, [], [], _POLL_SECONDS)


@contextlib.contextmanager
def _handle(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Yield a descriptor that becomes readable when the only worker ends; several that end together are polled."""
    handles = []
    with contextlib.suppress(OSError):  # an old kernel, or a sandbox
        handles = [os.pidfd_open(worker.pid) for worker in workers if len(workers) == 1]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Kill the workers that are left."""
    for worker in workers:
        worker.kill()  # does nothing to a worker that has ended
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_END_SECONDS)
