"""What a command does first, before slow imports: handle signals, open standard files that are closed, check limits."""

import contextlib
import logging
import os
import resource
import signal
import sys
from types import FrameType
from typing import NoReturn

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75}

# With less, libraries abort the process or hang: Polars with up to 1.5 GB of address space, torch with up to 0.7,
# NumPy with up to 0.2 (on two cores). With more, they fail with an error, if it is still not enough. The second number
# is for commands that import neither torch nor Polars.
_NEEDED = {
    resource.RLIMIT_AS: (2_000_000_000, 500_000_000, "bytes of address space", "-v"),
    resource.RLIMIT_DATA: (600_000_000, 300_000_000, "bytes of data", "-d"),
    resource.RLIMIT_NOFILE: (32, 32, "open files", "-n"),
}
is_command = False  # whether this process runs the command line, and not a program that imports Recmill
_SMALL_COMMANDS = ("results", "checkpoint list", "checkpoint verify", "adopt", "split", "download", "doctor")


def begin() -> None:
    """Let signals end this process at once, with one line, make the standard files usable, and check limits."""
    global is_command
    is_command = True
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
    words = " ".join(argument for argument in sys.argv[1:] if not argument.startswith("-"))
    for which, (most, least, what, flag) in _NEEDED.items():
        limit, _ = resource.getrlimit(which)
        needed = least if words.startswith(_SMALL_COMMANDS) else most
        if 0 <= limit < needed:
            fact = f"a process may have {limit:,} {what}, and this needs {needed:,}"
            _leave(f"recmill: resource error: {fact}. Raise the limit (see: ulimit {flag}).\n", 5)


def end_with(code: int) -> NoReturn:
    """Exit. After a stop by a signal, ignore further ones: Python restores their defaults early while it ends."""
    _ignore_signals_after_stop(code)
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """Exit without tearing the libraries down, which takes 0.3 s with torch, and 0.05 s with Polars.

    After all work is done, gloo may abort otherwise: 'terminate called without an active exception'.
    """
    _ignore_signals_after_stop(code)
    logging.shutdown()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it
            file.flush()
    os._exit(code)


def _ignore_signals_after_stop(code: int) -> None:
    if code in _EXIT_CODES.values():
        for number in _EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)


def restore_default_signals() -> None:
    """Undo what `begin` did to signals, for a command that cleans up when it is interrupted."""
    for number in _EXIT_CODES:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    code = _EXIT_CODES[signal.Signals(number)]
    kind = "interrupted" if code == 130 else f"preempted: ended at once by {signal.Signals(number).name}"
    _leave(f"recmill: {kind}; what was committed before is complete\n", code)


def _leave(line: str, code: int) -> NoReturn:
    try:
        os.write(2, line.encode())
    finally:
        os._exit(code)
