"""Prepare batches in the background, a few ahead of the loop that uses them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from recmill.protocols import Batch
from recmill.world import use_device

T = TypeVar("T")


def pinned(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches, for a GPU in page-locked memory, from which it can copy while it computes."""
    if device.type != "cuda":
        yield from batches
        return
    use_device(device)  # of the thread that prepares batches
    for batch in batches:
        yield batch.pin_memory()


@contextmanager
def prefetched(batches: Iterator[T], ahead: int) -> Iterator[Iterator[T]]:
    """Yield the same batches in the same order, prepared `ahead` by a thread; 0 uses none.

    An error of the iterator is raised where the batch would have come. The thread ends with the block: it finishes the
    batch that it is preparing and begins no other.
    """
    if not ahead:
        yield batches
        return
    end = object()
    with ThreadPoolExecutor(1, "prefetch") as thread:

        def ready() -> Iterator[T]:
            waiting = deque(thread.submit(next, batches, end) for _ in range(ahead))
            while (batch := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, batches, end))
                yield batch  # type: ignore[misc]  # not `end`

        try:
            yield ready()
        finally:
            thread.shutdown(cancel_futures=True)
