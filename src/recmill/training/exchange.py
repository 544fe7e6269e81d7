"""Measure how long the training thread waits for other ranks inside a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from recmill.observe.recorder import Recorder
from recmill.world import World


@contextmanager
def timed_exchanges(recorder: Recorder, world: World) -> Iterator[None]:
    """Within the block, record every wait for a collective that Python code starts, as TorchRec's does."""
    if world.size == 1:
        yield
        return
    wait = dist.Work.wait

    def timed_wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return wait(work, *arguments, **options)
        finally:
            recorder.exchanged(start, time.perf_counter_ns())

    dist.Work.wait = timed_wait
    try:
        yield
    finally:
        dist.Work.wait = wait


class BackwardEnd:
    """When the backward pass of a loss had computed its last gradient on this rank.

    What follows until backward() returns is DDP's wait, in C++, for the gradients of the other ranks. DDP queues it
    during the backward pass; a callback that is queued before it runs before it.
    """

    def __init__(self) -> None:
        self.at: int | None = None

    def watch(self, loss: Tensor) -> None:
        self.at = None
        loss.register_hook(self._queue)

    def _queue(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self.at = time.perf_counter_ns()
