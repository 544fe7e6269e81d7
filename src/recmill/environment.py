"""The environment variables that say which process of a job this is: torchrun's, our launcher's, or nobody's."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recmill.errors import ConfigError

_JOB = "RECMILL_JOB"
_LAUNCHER = "RECMILL_LAUNCHER"
_ATTEMPT = "RECMILL_ATTEMPT"
_STORE_DESCRIPTOR = "RECMILL_STORE_FD"
_TORCHRUN_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class ProcessEnvironment:
    """What a launcher told this process.

    `job` is the directory that a worker shares with our own launcher, whose process id is `launcher`. `attempt` counts
    restarts of the job.
    """

    is_launched: bool
    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    launched_by: Literal["recmill", "torchrun", "other"]
    job: Path | None
    launcher: int | None


def process_environment() -> ProcessEnvironment:
    """Read which process of which job this is; a process that nobody launched is rank 0 of 1."""
    rank = _number("RANK", 0)
    size = _number("WORLD_SIZE", 1)
    launched_by: Literal["recmill", "torchrun", "other"] = "recmill" if _JOB in os.environ else "other"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        launched_by = "torchrun"
    return ProcessEnvironment(
        is_launched="RANK" in os.environ and "WORLD_SIZE" in os.environ,
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", rank),
        local_size=_number("LOCAL_WORLD_SIZE", size),
        attempt=_number(_TORCHRUN_ATTEMPT, _number(_ATTEMPT, 0)),
        launched_by=launched_by,
        job=Path(os.environ[_JOB]) if _JOB in os.environ else None,
        launcher=_number(_LAUNCHER, 0) or None,
    )


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a job meet.

    `descriptor`: the listening socket that our launcher bound for rank 0. `prefix` keeps the keys of a restarted job
    apart from those of its predecessor in the store that torchrun's agent holds.
    """

    host: str
    port: int
    descriptor: int | None
    prefix: str | None


def rendezvous() -> Rendezvous:
    """Read where the processes of this job meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE = {os.environ.get('WORLD_SIZE')}, but {name} is not set: the processes cannot find each "
                "other. Set it to rank 0's address or port, or start them with torchrun or `recmill train --procs`."
            )
    attempt = os.environ.get(_TORCHRUN_ATTEMPT)
    return Rendezvous(
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT", 0),
        descriptor=_number(_STORE_DESCRIPTOR, 0) if _STORE_DESCRIPTOR in os.environ else None,
        prefix=None if attempt is None else f"recmill/{attempt}",
    )


def worker_environment(procs: int, job: Path, attempt: int, port: int) -> dict[str, str]:
    """Return what our launcher adds to the environment of every worker; rank 0 also gets `store_descriptor`."""
    return {
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        _JOB: str(job),
        _LAUNCHER: str(os.getpid()),
        _ATTEMPT: str(attempt),
    }


def rank_environment(rank: int, store_descriptor: int) -> dict[str, str]:
    """Return what differs between workers: their ranks, and rank 0's listening socket."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return own | {_STORE_DESCRIPTOR: str(store_descriptor)} if rank == 0 else own


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} = {text!r} is not a number. Unset it, or correct it.") from None
