"""`World`: which process of a run this is, and the few collectives that are not about tables."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recmill.environment import ProcessEnvironment, process_environment, rendezvous
from recmill.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)  # rank 0 may digest a large checkpoint while the others wait


@dataclass(frozen=True)
class World:
    """This process among those of a run. `rank` is global; all ranks take part in every method."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum each element over all ranks, in float64; every rank gets the same result."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

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

    def exchange_numbers(self, numbers: list[int]) -> list[int]:
        """Send number i to rank i; return what each rank sent here, in rank order."""
        received = torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(numbers))
        return received.tolist()


@contextmanager
def joined_world(device: str, wait_seconds: float = 0.0) -> Iterator[World]:
    """Join the process group within the block, in a process that continues afterwards."""
    world = join_world(device, wait_seconds)
    has_succeeded = False
    try:
        yield world
        finish_together(world)
        has_succeeded = True
    finally:
        # After an error the other ranks may be stuck, and NCCL's shutdown may wait for them: exiting ends it anyway.
        if has_succeeded or world.device.type != "cuda":
            dist.destroy_process_group()


def finish_together(world: World) -> None:
    """Wait until no rank needs another any more. All ranks take part."""
    if world.size > 1:
        dist.barrier()


def join_world(device: str, wait_seconds: float = 0.0) -> World:
    """Join the process group that the environment describes: torchrun's, our launcher's, or a group of one.

    Collectives wait for the other ranks at least `wait_seconds`.
    """
    own = process_environment()
    world = World(own.rank, own.size, own.local_rank, own.local_size, _device(device, own))
    timeout = max(_TIMEOUT, timedelta(seconds=wait_seconds))
    use_device(world.device)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store = _store(world.size, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    if world.device.type == "cuda":
        uuids = world.gather(str(torch.cuda.get_device_properties(world.device).uuid))
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


def _store(size: int, timeout: timedelta) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    place = rendezvous()
    # With a socket that our launcher bound to loopback; TCPStore's own would listen on every interface.
    store = dist.TCPStore(
        place.host, place.port, size, place.is_server, timeout=timeout, master_listen_fd=place.descriptor
    )
    return store if place.prefix is None else dist.PrefixStore(place.prefix, store)
