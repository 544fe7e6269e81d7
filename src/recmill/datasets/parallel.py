"""Work on many blocks by the threads of this machine, with results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from numba import njit

from recmill.hardware.cpu import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By Numba, for the types it is first called with; without Python's lock, so that threads run side by side.

    The machine code is kept beside the source or in the user's cache, if either can be written.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def ordered(pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """`function` of each item in the pool's threads; beside one per core, at most `ahead` results wait in memory."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= num_cores() + min(ahead, num_cores()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
