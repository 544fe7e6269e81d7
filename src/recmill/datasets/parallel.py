"""Work on blocks in threads, with compiled functions and results in order."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from numba import njit
from numba.core import event

from recmill.hardware.cpu import num_cores

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


class _CompilationNote(event.Listener):
    """Logs when the first function is compiled, not loaded from the cache: all together take some 20 s."""

    is_logged = False

    def on_start(self, event: event.Event) -> None:
        if not self.is_logged and event.data["dispatcher"].py_func.__module__.startswith("recmill."):
            self.is_logged = True
            log.info("compiling the parser")

    def on_end(self, event: event.Event) -> None:
        pass


compilation_note = _CompilationNote()
event.register("numba:compile", compilation_note)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with Numba, without Python's global lock, so that threads run in parallel.

    The machine code is cached beside the source or in the user's cache directory, if either can be written.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def ordered(pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """Yield `function` of each item, computed by the pool, in order.

    Besides one result per core, at most `ahead` results wait in memory.
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
