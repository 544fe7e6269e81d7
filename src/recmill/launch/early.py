"""What a command does first, before slow imports: handle signals, and open standard files that are closed."""

import os
import signal
import sys
from types import FrameType

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75}


def begin() -> None:
    """Let signals end this process at once, with one line, and make the standard files usable."""
    for number in _EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by the caller: otherwise the next file or socket would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # as Python leaves the file of a closed descriptor
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a locale may lack a title's letters


def restore_default_signals() -> None:
    """Undo what `begin` did to signals, for a command that cleans up when it is interrupted."""
    for number in _EXIT_CODES:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    code = _EXIT_CODES[signal.Signals(number)]
    kind = "interrupted" if code == 130 else "preempted"
    line = f"recmill: {kind}: ended at once by {signal.Signals(number).name}; what was committed before is complete\n"
    try:
        os.write(2, line.encode())
    finally:
        os._exit(code)
