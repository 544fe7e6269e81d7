"""Work on blocks in threads, with results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from recmill.hardware.cpu import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered(pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """Yield `function` of each item, computed by the pool, in order.

    Besides one result per core, at most `ahead` results wait in memory; if it is negative, so many fewer.
    """
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
