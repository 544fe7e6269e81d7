"""Which process of which job this is, from the environment variables of the launcher that started it."""

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from recmill.errors import ConfigError

_JOB = "RECMILL_JOB"
_LAUNCHER = "RECMILL_LAUNCHER"
_ATTEMPT = "RECMILL_ATTEMPT"
_STORE_DESCRIPTOR = "RECMILL_STORE_FD"
_ASKED = "RECMILL_WORLD_SIZE"  # how many processes a job script has asked its launcher for
_TORCHRUN_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # Slurm's "2(x3),1": three nodes with two tasks, one with one


@dataclass(frozen=True)
class ProcessEnvironment:
    """This process among those of its job.

    `started_by`: the launcher that started it; empty: nobody did, and it is alone. `attempt` counts restarts of the
    job. Our own launcher has the process id `launcher` and shares the directory `job` with its workers.
    """

    started_by: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    job: Path | None
    launcher: int | None

    @property
    def is_launched(self) -> bool:
        return bool(self.started_by)


def is_launched() -> bool:
    """Return whether a launcher started this process, however sensible its variables are."""
    try:
        return process_environment().is_launched
    except ConfigError:
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def process_environment(variables: Mapping[str, str] = os.environ) -> ProcessEnvironment:
    """Return which process of which job this is; a process that nobody launched is rank 0 of 1.

    Launchers run inside each other (torchrun in srun, mpirun in sbatch), so the innermost counts: our own, torchrun,
    MPI, Slurm. Raise ConfigError if variables are missing or contradict each other.
    """
    place = _place(variables) or _Place("", "RANK", 0, "WORLD_SIZE", 1, 0, 1)
    asked = _number(variables, _ASKED, place.size, at_least=1)
    if asked != place.size:
        found = f"{place.launcher} started {place.size}" if place.launcher else "no launcher's variables are set here"
        raise ConfigError(
            f"{asked} processes were asked for ({_ASKED}), but {found}. Start one process per rank, with srun or "
            "mpiexec and the same numbers as the job, or with `recmill launch`."
        )
    local_rank, local_size = _local(place)
    restarts = _number(variables, "SLURM_RESTART_COUNT", 0)
    return ProcessEnvironment(
        started_by=place.launcher,
        rank=place.rank,
        size=place.size,
        local_rank=local_rank,
        local_size=local_size,
        attempt=_number(variables, _TORCHRUN_ATTEMPT, _number(variables, _ATTEMPT, restarts)),
        job=Path(variables[_JOB]) if _JOB in variables else None,
        launcher=_number(variables, _LAUNCHER, 0) or None,
    )


@dataclass(frozen=True)
class _Place:
    """What the variables of one launcher say, and the names of those that say rank and size."""

    launcher: str
    rank_name: str
    rank: int
    size_name: str
    size: int
    local_rank: int | None
    local_size: int | None


def _place(variables: Mapping[str, str]) -> _Place | None:
    """Return what the innermost launcher says, or None if there is none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if _JOB in variables:
        if "RANK" not in variables:
            raise ConfigError(f"{_JOB} is set, but RANK is not. Unset {_JOB}: another job has left it.")
        return _read(variables, "recmill", *names)
    if "TORCHELASTIC_RUN_ID" in variables:
        return _read(variables, "torchrun", *names)
    for name, other in (names[:2], names[1::-1]):
        if name in variables and other not in variables:
            raise ConfigError(f"{name} = {variables[name]!r}, but {other} is not set. Set both, or unset {name}.")
    started = _mpi(variables) or _slurm(variables)
    if "RANK" not in variables:
        return started
    given = _read(variables, "another launcher", *names)
    if started is None:
        return given
    if (given.rank, given.size) != (started.rank, started.size):
        raise ConfigError(
            f"RANK = {given.rank} and WORLD_SIZE = {given.size}, but {started.launcher} says {started.rank_name} = "
            f"{started.rank} and {started.size_name} = {started.size}. Unset RANK and WORLD_SIZE: another launcher or "
            "a login shell has left them."
        )
    local_rank = started.local_rank if given.local_rank is None else given.local_rank
    return replace(started, local_rank=local_rank, local_size=given.local_size or started.local_size)


def _mpi(variables: Mapping[str, str]) -> _Place | None:
    if "OMPI_COMM_WORLD_RANK" in variables:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        return _read(variables, "Open MPI", *names)
    if "PALS_RANKID" in variables:  # sets no size of its own
        size = "PMI_SIZE" if "PMI_SIZE" in variables else _ASKED
        return _read(variables, "PALS", "PALS_RANKID", size, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
    if "PMI_RANK" not in variables or "PMI_SIZE" not in variables:
        return None
    if "MPI_LOCALRANKID" in variables:
        return _read(variables, "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "SLURM_STEP_NUM_TASKS" in variables:  # srun --mpi=pmi2
        return None
    return _read(variables, "MPI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def _slurm(variables: Mapping[str, str]) -> _Place | None:
    """Return this task of a Slurm step; None for a step of one task, which may be a shell."""
    if "SLURM_PROCID" not in variables:  # in the shell of salloc
        return None
    if "SLURM_STEP_NUM_TASKS" not in variables:
        if (tasks := _number(variables, "SLURM_NTASKS", 1)) > 1:  # with SLURM_PROCID = 0, as if this were one of them
            raise ConfigError(
                f"This Slurm job has {tasks} tasks, but its batch script started this process, not srun: it would wait "
                "for the others forever. Start it with srun, or ask for one task, with more --cpus-per-task."
            )
        return None
    place = _read(variables, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    if place.size == 1:
        return None
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks_by_node = [int(n) for n, times in _TASKS.findall(text) for _ in range(int(times or 1))]
    node = _number(variables, "SLURM_NODEID", 0)
    if sum(tasks_by_node) != place.size or node >= len(tasks_by_node):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE = {text!r} does not hold {place.size} tasks with node {node}.")
    if len(set(tasks_by_node)) > 1:
        raise ConfigError(
            f"Slurm started different numbers of tasks on the nodes ({text}), and tables are placed for equal ones. "
            "Give srun --ntasks-per-node."
        )
    return replace(place, local_size=tasks_by_node[node])


def _read(
    variables: Mapping[str, str], launcher: str, rank_name: str, size_name: str, local_name: str, local_size_name: str
) -> _Place:
    for name in (rank_name, size_name):
        if name not in variables:
            raise ConfigError(f"{launcher} started this process, but {name} is not set. Set it, or use recmill launch.")
    size = _number(variables, size_name, 1, at_least=1)
    rank = _number(variables, rank_name, 0)
    _check_rank(rank_name, rank, size_name, size)
    local_size = _number(variables, local_size_name, 0, at_least=1, at_most=size) or None
    local_rank = _number(variables, local_name, 0) if local_name in variables else None
    if local_rank is not None and local_size is not None:
        _check_rank(local_name, local_rank, local_size_name, local_size)
    return _Place(launcher, rank_name, rank, size_name, size, local_rank, local_size)


def _local(place: _Place) -> tuple[int, int]:
    """Return this process's number on its machine, and how many processes its machine has."""
    local_rank, local_size = place.local_rank, place.local_size
    if local_rank is None and local_size is None and place.size > 1:
        raise ConfigError(
            f"{place.rank_name} = {place.rank} of {place.size}, but neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set: "
            "which GPU and which share of the memory is this process's? Set both; LOCAL_WORLD_SIZE=1 for one process "
            "per machine or pod."
        )
    local_size = place.size if local_size is None else local_size
    local_rank = place.rank % local_size if local_rank is None else local_rank
    _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return local_rank, local_size


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


def meeting_host() -> str:
    """Return the address of rank 0's machine."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def meeting_place() -> str:
    """Return the address of the store, for messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def rendezvous() -> Rendezvous:
    """Read where the processes of this job meet."""
    own = process_environment()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"{own.started_by} started {own.size} processes, but {name} is not set: they cannot find each other. "
                "Set it to rank 0's address or port, or start them with `recmill launch` or `recmill train --procs`."
            )
    host = os.environ["MASTER_ADDR"]
    try:
        host.encode("idna")  # as every lookup does
    except UnicodeError:
        raise ConfigError(f"MASTER_ADDR = {host!r} is not a name or an address of a machine. Correct it.") from None
    attempt = os.environ.get(_TORCHRUN_ATTEMPT)
    agent_is_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    descriptor = _number(os.environ, _STORE_DESCRIPTOR, 0) if _STORE_DESCRIPTOR in os.environ else None
    return Rendezvous(
        host=host,
        port=_number(os.environ, "MASTER_PORT", 0, at_least=1, at_most=65535),
        is_server=descriptor is not None or (own.rank == 0 and not agent_is_server),
        descriptor=descriptor,
        prefix=None if attempt is None else f"recmill/{attempt}",
    )


@dataclass(frozen=True)
class Node:
    """This machine among the `count` of a job of our own launcher, and where the job's processes meet."""

    rank: int
    count: int
    host: str
    port: int  # 0: any


def own_node() -> Node:
    """Read which machine of a job this is: RECMILL_NODE_RANK, or a pod's index, of RECMILL_NODES; alone without it."""
    count = _number(os.environ, "RECMILL_NODES", 1, at_least=1)
    if count == 1:
        return Node(0, 1, "127.0.0.1", 0)
    name = "RECMILL_NODE_RANK" if "RECMILL_NODE_RANK" in os.environ else "JOB_COMPLETION_INDEX"
    for needed in (name, "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(needed):
            missing = "RECMILL_NODE_RANK" if needed == name else needed
            raise ConfigError(f"RECMILL_NODES = {count}, but {missing} is not set. Set it on each machine.")
    rank = _number(os.environ, name, 0)
    _check_rank(name, rank, "RECMILL_NODES", count)
    port = _number(os.environ, "MASTER_PORT", 0, at_least=1, at_most=65535)
    return Node(rank, count, os.environ["MASTER_ADDR"], port)


def use_interface_to(host: str) -> None:
    """Let gloo use the interface that leads to `host`, unless GLOO_SOCKET_IFNAME is set.

    By default it takes the address of the host's own name, which many machines map to 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if request[20:24] == own or (own[0] == 127 and name == "lo"):
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


def launched_environment(
    local_rank: int, procs: int, node: Node, job: Path, attempt: int, port: int, store_descriptor: int | None
) -> dict[str, str]:
    """Return what our launcher adds to the environment of a worker. Rank 0 may inherit the store's listening socket."""
    rank = node.rank * procs + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(node.count * procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": node.host,
        "MASTER_PORT": str(port),
        _JOB: str(job),
        _LAUNCHER: str(os.getpid()),
        _ATTEMPT: str(attempt),
        **({_STORE_DESCRIPTOR: str(store_descriptor)} if rank == 0 and store_descriptor is not None else {}),
    }


def job_id(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the id that the scheduler gave to this job, if there is one."""
    return variables.get("SLURM_JOB_ID") or variables.get("PBS_JOBID") or None


def script_variables(names: Iterable[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those of these variables, which a script of another system reads, that are set."""
    return {name: variables[name] for name in names if name in variables}


CONFIG_PREFIX = "RECMILL__"  # of variables like RECMILL__TRAIN__SEED

# What changes the speed or the results of a run, or names its job. Anything else may be a secret.
_RECORDED = re.compile(
    r"(OMP|KMP|MKL|GOMP|MALLOC|NCCL|GLOO|FI|MPICH|TORCH|TORCHELASTIC|PYTORCH|DFTRACER|RECMILL|PALS)_\w+"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|ONEDNN_MAX_CPU_ISA"
    r"|SLURM_(JOB_(ID|NAME|NODELIST|NUM_NODES|PARTITION|QOS|CPUS_PER_NODE)|\w*TASKS\w*|NODEID|PROCID|LOCALID)"
    r"|PBS_(JOBID|QUEUE|JOBNAME)|PMI_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)",
    re.ASCII,
)
_INTERNAL = {_JOB, _LAUNCHER, _ATTEMPT, _STORE_DESCRIPTOR, "RECMILL_ERRORS"}  # a launcher sets them for its workers
_SECRET_NAME = re.compile("TOKEN|SECRET|KEY|PASS|COOKIE|CRED|AUTH|SESSION|PRIVATE|SIGNATURE", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"://[^/\s]*@|\b(bearer|basic)\s|-----BEGIN|(token|secret|key|passw\w*|auth\w*)\s*[=:]", re.I
)


def is_recorded(name: str) -> bool:
    """Return whether a variable of this name may change the speed or the results of a run, or names its job."""
    return name not in _INTERNAL and _RECORDED.fullmatch(name) is not None


def recorded_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are kept with a run: those of an allow-list that do not look like secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if is_recorded(name) and not _SECRET_NAME.search(name) and not _SECRET_VALUE.search(value)
    }


def config_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that set keys of a run config; none in a job script, whose config has their values."""
    if variables.get("RECMILL_ERRORS"):
        return {}
    return {name: value for name, value in sorted(variables.items()) if name.startswith(CONFIG_PREFIX)}


def errors_directory() -> Path | None:
    """Return the directory in which the ranks of a job script report errors."""
    return Path(os.environ["RECMILL_ERRORS"]) if os.environ.get("RECMILL_ERRORS") else None


def deadline() -> float | None:
    """Return when this job should have saved and ended, in seconds since 1970, if RECMILL_DEADLINE says so."""
    return float(_number(os.environ, "RECMILL_DEADLINE", 0, at_most=2**40)) or None


def max_processes(cores: int) -> int:
    """Return how many processes may be started on this machine: RECMILL_MAX_PROCS, or 4 per core and at least 16."""
    return _number(os.environ, "RECMILL_MAX_PROCS", max(16, 4 * cores), at_least=1)


def _number(variables: Mapping[str, str], name: str, default: int, at_least: int = 0, at_most: int = 2**31 - 1) -> int:
    text = variables.get(name)
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
