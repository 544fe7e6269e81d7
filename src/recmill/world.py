"""`World`: which process of a run this is, and the few collectives that are not about tables."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recmill.environment import process_environment, rendezvous
from recmill.errors import ConfigError

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
    try:
        yield world
        finish_together(world)
    finally:
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
    world = World(own.rank, own.size, own.local_rank, own.local_size, _device(device, own.local_rank))
    timeout = max(_TIMEOUT, timedelta(seconds=wait_seconds))
    backend = "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"
    store = _store(world.size, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return world


def _device(device: str, local_rank: int) -> torch.device:
    if device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if device == "cuda":
        raise ConfigError(
            "train.device = 'cuda', but torch sees no GPU here. Use 'auto' or 'cpu'; see: recmill doctor."
        )
    return torch.device("cpu")


def _store(size: int, timeout: timedelta) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    place = rendezvous()
    # With a socket that our launcher bound to loopback; TCPStore's own would listen on every interface.
    store = dist.TCPStore(
        place.host, place.port, size, place.is_server, timeout=timeout, master_listen_fd=place.descriptor
    )
    return store if place.prefix is None else dist.PrefixStore(place.prefix, store)
