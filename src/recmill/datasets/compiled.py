"""Functions that Numba compiles. It takes 0.4 s to import and to begin: import this only where it is used."""

import logging
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

log = logging.getLogger(__name__)


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
