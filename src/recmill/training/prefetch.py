"""Batches prepared in the background, a few ahead of the loop that uses them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def pinned(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """In memory that a GPU copies from while it works; as they are for the CPU."""
    if device.type != "cuda":
        yield from batches
        return
    torch.cuda.set_device(device)  # each thread has its own; all ranks' would be GPU 0
    for batch in batches:
        yield batch.pin_memory()


@contextmanager
def prefetched(batches: Iterator[T], ahead: int) -> Iterator[Iterator[T]]:
    """The same batches in the same order, and the same error in the same place; 0 ahead: no thread.

    The one thread ends with the block: it finishes the batch that it is at, the rest is never begun.
    """
    if not ahead:
        yield batches
        return
    end: Any = object()
    with ThreadPoolExecutor(1, "prefetch") as thread:

        def ready() -> Iterator[T]:
            waiting = deque(thread.submit(next, batches, end) for _ in range(ahead))
            while (batch := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, batches, end))
                yield batch

        try:
            yield ready()
        finally:
            thread.shutdown(cancel_futures=True)
