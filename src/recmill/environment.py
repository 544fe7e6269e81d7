"""The environment variables that say which process of a job this is: torchrun's, our launcher's, or nobody's."""

import os
from dataclasses import dataclass
from pathlib import Path

from recmill.errors import ConfigError

_JOB = "RECMILL_JOB"
_LAUNCHER = "RECMILL_LAUNCHER"
_ATTEMPT = "RECMILL_ATTEMPT"
_STORE_DESCRIPTOR = "RECMILL_STORE_FD"
_TORCHRUN_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class ProcessEnvironment:
    """This process among those of its job.

    `is_launched`: a launcher started it. `attempt` counts restarts of the job. Our own launcher has the process id
    `launcher` and shares the directory `job` with its workers.
    """

    is_launched: bool
    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    job: Path | None
    launcher: int | None


def is_launched() -> bool:
    """Return whether a launcher started this process, however sensible its variables are."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def process_environment() -> ProcessEnvironment:
    """Read which process of which job this is; a process that nobody launched is rank 0 of 1."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in os.environ and other not in os.environ:
            raise ConfigError(f"{name} = {os.environ[name]!r}, but {other} is not set. Set both, or unset {name}.")
    size = _number("WORLD_SIZE", 1, at_least=1)
    rank = _number("RANK", 0)
    _check_rank("RANK", rank, "WORLD_SIZE", size)
    local_size = _number("LOCAL_WORLD_SIZE", size, at_least=1, at_most=size)
    local_rank = _number("LOCAL_RANK", rank % local_size)
    _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return ProcessEnvironment(
        is_launched=is_launched(),
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        attempt=_number(_TORCHRUN_ATTEMPT, _number(_ATTEMPT, 0)),
        job=Path(os.environ[_JOB]) if _JOB in os.environ else None,
        launcher=_number(_LAUNCHER, 0) or None,
    )


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a job meet: the address of a key-value store.

    `is_server`: this process holds the store, on the socket `descriptor` if our launcher has bound one. `prefix` keeps
    the keys of each attempt apart in a store that torchrun's agent holds.
    """

    host: str
    port: int
    is_server: bool
    descriptor: int | None
    prefix: str | None


def meeting_place() -> str:
    """Return the address of the store, for messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def rendezvous() -> Rendezvous:
    """Read where the processes of this job meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"WORLD_SIZE = {os.environ.get('WORLD_SIZE')}, but {name} is not set: the processes cannot find each "
                "other. Set it to rank 0's address or port, or start them with torchrun or `recmill train --procs`."
            )
    host = os.environ["MASTER_ADDR"]
    try:
        host.encode("idna")  # as every lookup does
    except UnicodeError:
        raise ConfigError(f"MASTER_ADDR = {host!r} is not a name or an address of a machine. Correct it.") from None
    attempt = os.environ.get(_TORCHRUN_ATTEMPT)
    agent_is_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    descriptor = _number(_STORE_DESCRIPTOR, 0) if _STORE_DESCRIPTOR in os.environ else None
    return Rendezvous(
        host=host,
        port=_number("MASTER_PORT", 0, at_least=1, at_most=65535),
        is_server=descriptor is not None or (_number("RANK", 0) == 0 and not agent_is_server),
        descriptor=descriptor,
        prefix=None if attempt is None else f"recmill/{attempt}",
    )


def launched_environment(
    rank: int, procs: int, job: Path, attempt: int, port: int, store_descriptor: int
) -> dict[str, str]:
    """Return what our launcher adds to the environment of a worker. Rank 0 inherits the store's listening socket."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _JOB: str(job),
        _LAUNCHER: str(os.getpid()),
        _ATTEMPT: str(attempt),
        **({_STORE_DESCRIPTOR: str(store_descriptor)} if rank == 0 else {}),
    }


def max_processes(cores: int) -> int:
    """Return how many processes may be started on this machine: RECMILL_MAX_PROCS, or 4 per core and at least 16."""
    return _number("RECMILL_MAX_PROCS", max(16, 4 * cores), at_least=1)


def _number(name: str, default: int, at_least: int = 0, at_most: int = 2**31 - 1) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} = {text!r} is not a number. Unset it, or correct it.") from None
    if not at_least <= number <= at_most:
        raise ConfigError(
            f"environment variable {name} = {text!r} is not in {at_least}..{at_most}. Unset it, or correct it."
        )
    return number


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ConfigError(
            f"{name} = {rank}, but {size_name} = {size}: ranks are 0 to {size - 1}. Correct one of the two variables."
        )
