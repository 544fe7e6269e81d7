"""`World`: which process of a run this is, how it finds the others, and the collectives that are not about tables."""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recmill.environment import (
    ProcessEnvironment,
    meeting_place,
    own_node,
    process_environment,
    rendezvous,
    use_interface_to,
)
from recmill.errors import ConfigError, LostPeerError, ResourceError

log = logging.getLogger(__name__)

T = TypeVar("T")

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(minutes=30)  # rank 0 may digest a large checkpoint while the others wait
_POLL_SECONDS = 0.1
_ANNOUNCE_SECONDS = 1.5  # a job whose processes start together says nothing
_CONNECT_SECONDS = 3.0
_GONE_SECONDS = 1.0  # how long a process that lost its connections may take to disappear
_MAX_RANKS_SHOWN = 8
_REMEDY = "Look at the output of that process for the cause, then start all of them again: training resumes."


@dataclass(frozen=True)
class World:
    """This process among those of a run. `rank` is global; all ranks take part in every method except `explained`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    pids: Mapping[int, int] = field(default_factory=dict)  # process ids of the ranks on this machine
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum each element over all ranks, in float64; every rank gets the same result."""
        return self.start_sum(values)()

    def start_sum(self, values: list[float]) -> Callable[[], list[float]]:
        """Start to sum each element over all ranks; return a function that waits for the result.

        The numbers are in CPU memory, so no rank waits for its GPU.
        """
        if self.size == 1:
            return lambda: list(values)
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, async_op=True)

        def wait_for_all_ranks() -> list[float]:
            work.wait()
            return total.tolist()

        return wait_for_all_ranks

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place and on its device."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_counts(self, counts: np.ndarray) -> np.ndarray:
        """Sum int64 counts over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(torch.from_numpy(counts))
        return counts

    def gather(self, value: T) -> list[T] | None:
        """Return one value per rank, in rank order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, gathered)
        return gathered

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def exchange(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Send 1-D array i to rank i; return what each rank sent here, in rank order."""
        if self.size == 1:
            return parts
        sizes = list(map(len, parts))
        received_sizes = self.exchange_numbers(sizes)
        sent = torch.from_numpy(np.concatenate(parts))
        received = torch.empty(sum(received_sizes), dtype=sent.dtype)
        dist.all_to_all_single(received, sent, received_sizes, sizes)
        return np.split(received.numpy(), np.cumsum(received_sizes)[:-1])

    def exchange_numbers(self, numbers: list[int], device: torch.device = _CPU) -> list[int]:
        """Send number i to rank i, over gloo from the CPU, over NCCL from a GPU; return what each rank sent here."""
        received = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_to_all_single(received, torch.tensor(numbers, device=device))
        return received.tolist()

    def explained(self, error: BaseException) -> BaseException:
        """Return the error, or what it means if gloo raised it: the connection to another rank broke."""
        if "gloo/transport" not in str(error):
            return error
        reason = str(error).partition("] ")[2].partition(". ")[0]  # after the place in gloo's source
        gone = self._gone_ranks()
        who = f"{_named(gone)} of the job ended" if gone else "another process of the job ended or does not answer"
        lost = LostPeerError(f"Rank {self.rank} cannot continue: {who} ({reason}). {_REMEDY}")
        lost.rank = gone[0] if len(gone) == 1 else None
        return lost

    def silent_ranks(self, seconds: float) -> list[int]:
        """Return the ranks that do not call this within `seconds`. A rank without a connection to rank 0 returns [0].

        Any thread may call it. The store's own connection may be in use, or broken without anybody noticing.
        """
        if self.store is None:
            return []
        keys = [f"recmill/silent/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + seconds
        try:
            store = _interruptible(self.store.clone, _CONNECT_SECONDS)
            store.set(keys[self.rank], "")
            for _ in _attempts(deadline):
                if not (silent := [rank for rank, key in enumerate(keys) if not store.check([key])]):
                    break
            return silent
        except (RuntimeError, TimeoutError):
            return [0]

    def _gone_ranks(self) -> list[int]:
        """Return the ranks on this machine whose processes have ended; wait a moment for the first."""
        for _ in _attempts(time.monotonic() + _GONE_SECONDS):
            if gone := [rank for rank, pid in self.pids.items() if not _is_running(pid)]:
                return gone
        return []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN])) + (", ..." if len(ranks) > _MAX_RANKS_SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@contextmanager
def joined_world(device: str, join_seconds: float = 600.0, wait_seconds: float = 0.0) -> Iterator[World]:
    """Join the process group within the block, in a process that continues afterwards."""
    world = join_world(device, join_seconds, wait_seconds)
    has_succeeded = False
    try:
        yield world
        finish_together(world)
        has_succeeded = True
    except RuntimeError as error:
        raise world.explained(error) from error
    finally:
        # After an error the other ranks may be stuck, and NCCL's shutdown may wait for them: exiting ends it anyway.
        if has_succeeded or world.device.type != "cuda":
            dist.destroy_process_group()


def finish_together(world: World) -> None:
    """Wait until no rank needs another any more. All ranks take part."""
    if world.size > 1:
        dist.barrier()


def join_world(device: str, join_seconds: float = 600.0, wait_seconds: float = 0.0) -> World:
    """Join the process group that the environment describes: torchrun's, our launcher's, or a group of one.

    Raise LostPeerError if the other ranks have not joined within `join_seconds`. Collectives wait for them at least
    `wait_seconds`. Signals are handled at once meanwhile.
    """
    own = process_environment()
    own_device = _device(device, own)
    timeout = max(_TIMEOUT, timedelta(seconds=wait_seconds))
    backend = "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo"
    deadline = time.monotonic() + join_seconds
    store = _store(own.size, timeout, deadline)
    pids = {} if own.size == 1 else _wait_for_peers(store, own.rank, own.size, deadline)
    # If our launcher has started all processes, it sees for itself which of them answer.
    asked = store if own.size > 1 and (own.job is None or own_node().count > 1) else None
    world = World(own.rank, own.size, own.local_rank, own.local_size, own_device, pids, asked)

    def join() -> None:
        use_device(own_device)
        dist.init_process_group(backend, store=store, rank=own.rank, world_size=own.size, timeout=timeout)

    try:
        _interruptible(join)
    except RuntimeError as error:
        if "Unable to find address" in str(error):
            fact = f"gloo finds no network interface for the processes: {str(error).rpartition('. ')[2]}"
            raise ConfigError(f"{fact}. Correct the environment variable GLOO_SOCKET_IFNAME.") from error
        raise world.explained(error) from error
    use_device(own_device)
    if own_device.type == "cuda":
        uuids = world.gather(str(torch.cuda.get_device_properties(own_device).uuid))
        check_own_gpus(world.broadcast(uuids or []))
    return world


def use_device(device: torch.device) -> None:
    """Make `device` the GPU of this thread. Every thread that uses torch calls this: its GPU is number 0 until then."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _device(wanted: str, own: ProcessEnvironment) -> torch.device:
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if not gpus:
        return choose_device(wanted, own, 0, has_kernels=False)
    import fbgemm_gpu

    device = choose_device(wanted, own, gpus, has_kernels=fbgemm_gpu.__variant__ == "cuda")
    if device.type == "cpu" and own.rank == 0:
        log.warning("%d GPU(s) are not used: the installed FBGEMM is built for CPU. See: recmill doctor.", gpus)
    return device


def choose_device(wanted: str, own: ProcessEnvironment, gpus: int, has_kernels: bool) -> torch.device:
    """Choose the device of a process to which `gpus` GPUs are visible. `has_kernels`: FBGEMM is built for them."""
    if wanted == "cpu" or (wanted == "auto" and not (gpus and has_kernels)):
        return torch.device("cpu")
    if not gpus:
        raise ConfigError(
            "train.device = 'cuda', but torch sees no GPU here. Use 'auto' or 'cpu'; see: recmill doctor."
        )
    if not has_kernels:
        raise ConfigError(
            "train.device = 'cuda', but the installed FBGEMM is built for CPU and cannot use GPUs. Install the CUDA "
            "build (make setup SETUP=cuda), or use 'auto' or 'cpu'; see: recmill doctor."
        )
    if own.local_rank < gpus:
        return torch.device("cuda", own.local_rank)
    if gpus == 1 and own.launcher is None:  # a scheduler may show each process only the GPU that it is to use
        return torch.device("cuda", 0)
    raise ConfigError(
        f"Process {own.rank} is number {own.local_rank} on its machine, counted from 0, but {gpus} GPU(s) are visible, "
        "and each process needs its own. Start fewer processes, set CUDA_VISIBLE_DEVICES or, with a launcher that does "
        "not, LOCAL_RANK."
    )


def check_own_gpus(uuids: Sequence[str]) -> None:
    """Raise ConfigError if two ranks use the same GPU, which NCCL cannot. `uuids`: that of each rank's GPU."""
    for rank, uuid in enumerate(uuids):
        if (first := uuids.index(uuid)) < rank:
            raise ConfigError(
                f"Ranks {first} and {rank} use the same GPU ({uuid}), and each process needs its own. "
                "Start fewer processes, or let the scheduler give each of them one GPU."
            )


def _find(host: str, deadline: float) -> None:
    """Wait until rank 0's machine has a name, which takes a pod some seconds, and choose the interface to it."""
    for _ in _attempts(deadline if own_node().count > 1 else 0.0, f"waiting for the name {host}"):
        with suppress(socket.gaierror):
            socket.getaddrinfo(host, None)
            break
    use_interface_to(host)


def _store(size: int, timeout: timedelta, deadline: float) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    place = rendezvous()
    _find(place.host, deadline)
    descriptor = place.descriptor
    if not place.is_server:
        _wait_for_server(place.host, place.port, deadline)
    elif descriptor is None:
        descriptor = _listen(place.host, place.port)
    connect = partial(dist.TCPStore, place.host, place.port, size, place.is_server, timeout, wait_for_workers=False)
    try:
        # With a socket that is bound to one address; TCPStore's own would listen on every interface.
        store = _interruptible(partial(connect, master_listen_fd=descriptor), deadline - time.monotonic())
    except (RuntimeError, TimeoutError):
        raise ResourceError(
            f"What listens on MASTER_ADDR = {place.host}, MASTER_PORT = {place.port} is not rank 0 of this job. "
            "Choose another port, the same for all processes."
        ) from None
    return store if place.prefix is None else dist.PrefixStore(place.prefix, store)


def _listen(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens on this address alone.

    A machine may map its own host name to 127.0.1.1, where no other machine reaches it: then it listens on all.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_own_name = address[0] in ("127.0.1.1", "127.0.0.1") and host not in (address[0], "localhost")
        return socket.create_server(("", port) if is_own_name else address, family=family).detach()
    except OSError as error:
        fact = f"Rank 0 cannot listen on MASTER_ADDR = {host}, MASTER_PORT = {port}: {error.strerror}."
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ResourceError(f"{fact} Choose another port, the same for all processes.") from None
        raise ConfigError(f"{fact} MASTER_ADDR must be an address of the machine that runs rank 0.") from None


def _wait_for_server(host: str, port: int, deadline: float) -> None:
    """Wait until rank 0 listens. (TCPStore would retry as well, but print a C++ stack for each attempt.)"""
    reason = ""
    for _ in _attempts(deadline, f"waiting for rank 0 at {host}:{port}"):
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            reason = error.strerror or "no answer"
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ConfigError(f"MASTER_ADDR = {host} is not known here: {reason}. Correct it.") from None
    raise _missing_error([0], f" It should listen on MASTER_ADDR = {host}, MASTER_PORT = {port}: {reason}.")


def _wait_for_peers(store: dist.Store, rank: int, size: int, deadline: float) -> dict[int, int]:
    """Wait until all ranks have joined; return the process ids of those on this machine."""
    machine = f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"  # a container has its own process ids
    keys = [f"recmill/process/{peer}" for peer in range(size)]
    try:
        others_size = store.compare_set("recmill/size", "", str(size)).decode()
        if others_size != str(size):
            raise ConfigError(f"WORLD_SIZE = {size}, but another process of this job has WORLD_SIZE = {others_size}.")
        if store.add(f"recmill/rank/{rank}", 1) > 1:
            raise ConfigError(f"RANK = {rank}, but another process of this job has that rank. Give each its own.")
        store.set(keys[rank], f"{os.getpid()} {machine}")
        for _ in _attempts(deadline, f"waiting for {size} processes at {meeting_place()}: this is rank {rank}"):
            if store.check(keys):
                found = [store.get(key).decode().partition(" ") for key in keys]
                return {peer: int(pid) for peer, (pid, _, where) in enumerate(found) if where == machine}
        raise _missing_error([peer for peer in range(size) if not store.check([keys[peer]])])
    except RuntimeError as error:
        raise LostPeerError(f"Rank 0 ended before all processes had joined. {_REMEDY}") from error


def _attempts(deadline: float, announcement: str = "") -> Iterator[None]:
    """Yield once, and again every `_POLL_SECONDS` until the deadline; log `announcement` if that takes long."""
    announce_at = time.monotonic() + _ANNOUNCE_SECONDS
    while True:
        yield
        now = time.monotonic()
        if now > deadline:
            return
        if announcement and now > announce_at:
            log.info("%s", announcement)
            announcement = ""
        time.sleep(_POLL_SECONDS)


def _missing_error(ranks: list[int], detail: str = "") -> LostPeerError:
    error = LostPeerError(
        f"{_named(ranks).capitalize()} of the job did not join within train.join_seconds.{detail} Start every rank "
        "from 0 to WORLD_SIZE - 1, or raise that key if they start slowly."
    )
    error.rank = ranks[0] if len(ranks) == 1 else None
    return error


def _interruptible(call: Callable[[], T], seconds: float | None = None) -> T:
    """Return the result of a call that waits in C++; raise TimeoutError after `seconds`.

    It runs in another thread: signal handlers run in the main thread, while that waits in Python.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again below
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(seconds)
