"""Who am I among the processes of this run, and the few collectives that are not about tables.

`rank` is the global rank, `local_rank` the rank on this machine. Everything else receives a `World`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recmill.errors import ConfigError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)  # rank 0 may digest a large checkpoint while the others wait


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise over all ranks, in float64, the same on each."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_counts(self, counts: np.ndarray) -> np.ndarray:
        """int64 over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(torch.from_numpy(counts))
        return counts

    def gather(self, value: T) -> list[T] | None:
        """One value per rank, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, gathered)
        return gathered

    def broadcast(self, value: T) -> T:
        """Rank 0's value, everywhere."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def exchange(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """All-to-all of 1-D arrays: part i goes to rank i; what each rank sent here, in rank order."""
        if self.size == 1:
            return parts
        sizes = [len(part) for part in parts]
        received_sizes = exchange(self, sizes)
        sent = torch.from_numpy(np.concatenate(parts))
        received = torch.empty(sum(received_sizes), dtype=sent.dtype)
        dist.all_to_all_single(received, sent, received_sizes, sizes)
        return np.split(received.numpy(), np.cumsum(received_sizes)[:-1])


@contextmanager
def joined_world(device: str, wait_seconds: float = 0.0) -> Iterator[World]:
    """For a process that goes on afterwards."""
    world = join_world(device, wait_seconds)
    try:
        yield world
        finish_together(world)
    finally:
        dist.destroy_process_group()


def finish_together(world: World) -> None:
    """Nobody leaves while another still needs it. All ranks take part."""
    if world.size > 1:
        dist.barrier()


def join_world(device: str, wait_seconds: float = 0.0) -> World:
    """Join the process group that the environment describes: torchrun's, our launcher's, or a group of one.

    Its collectives wait at least `wait_seconds` for the other ranks.
    """
    timeout = max(_TIMEOUT, timedelta(seconds=wait_seconds))
    world = _read_environment(_resolve_device(device))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=_store(world, timeout), rank=world.rank, world_size=world.size, timeout=timeout
    )
    return world


def exchange(world: World, values: list[int]) -> list[int]:
    """All-to-all, what sharded tables live on: value i goes to rank i."""
    sent, received = torch.tensor(values), torch.empty(world.size, dtype=torch.int64)
    dist.all_to_all_single(received, sent)
    return received.tolist()


def _resolve_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device = 'cuda', but torch sees no GPU here. Use 'auto' or 'cpu'; see: recmill doctor."
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _read_environment(device: str) -> World:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    place = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    return World(rank, size, local_rank, local_size, place)


def _store(world: World, timeout: timedelta) -> dist.Store:
    if world.size == 1:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if (listening := os.environ.get("RECMILL_STORE_FD")) is not None:
        # Our launcher bound this socket to loopback: a plain TCPStore would listen on every interface.
        return dist.TCPStore(
            host, port, world.size, is_master=True, timeout=timeout, master_listen_fd=int(listening), use_libuv=True
        )
    # Our launcher's rank 0 and torchrun's agent hold the store themselves; otherwise rank 0 does.
    is_held = "RECMILL_JOB" in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(host, port, world.size, is_master=world.is_main and not is_held, timeout=timeout)
    # A group that torchrun restarts meets its predecessor's keys: each attempt gets its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return store if attempt is None else dist.PrefixStore(f"recmill/{attempt}", store)
