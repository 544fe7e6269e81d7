"""Logging: rank 0 writes to stderr and log.txt, every other rank to a file of its own."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from recmill.observe.printed import escaped, fitted
from recmill.observe.progress import CONSOLE, show_progress

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}  # on a terminal
_NOISY = ("torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace", "torch.distributed")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), keep="\n\t")


class _ConsoleHandler(logging.Handler):
    """Prints through rich's console, so that lines appear above a progress bar.

    `log.info(..., extra={"console": TEXT})` prints a shorter text here than in the log file, or nothing if it is empty.
    Warnings begin with a word that says so; log files have the level of each line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        short = getattr(record, "console", None)
        text = self.format(record) if short is None else escaped(short, keep="\n")
        if text and record.levelno == logging.WARNING:
            text = f"warning: {text}"
        if text:
            with contextlib.suppress(OSError):  # a closed terminal does not end a run; log.txt has every line
                CONSOLE.print(fitted(text) if CONSOLE.is_terminal else text, style=_STYLES.get(record.levelno))


def set_up_console() -> None:
    """Log to stderr, in a process that only runs Recmill: a command or a worker."""
    root = logging.getLogger()
    if not any(isinstance(handler, _ConsoleHandler) for handler in root.handlers):
        handler = _ConsoleHandler()
        handler.setFormatter(_Formatter("%(message)s"))
        root.addHandler(handler)
    logging.getLogger("recmill").setLevel(logging.INFO)
    root.addFilter(_is_error)  # TorchRec's planner logs to the root logger itself; our loggers never do
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.simplefilter("ignore")  # PYTHONWARNINGS=error is for tests of code: libraries warn, and continue
    _hide_library_warnings()


def limit_console(level: int) -> None:
    """Show lines of at least this level only, and no progress on a terminal above INFO. Log files have every line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.setLevel(level)
    show_progress(level <= logging.INFO)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide warnings of TorchRec and FBGEMM within the block, for a process that is not ours alone."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    with warnings.catch_warnings():
        _hide_library_warnings()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _hide_library_warnings() -> None:
    """Hide warnings of TorchRec and FBGEMM that no user can act on, from now on."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # TorchRec uses what torch is about to rename, and warns at every step.
    warnings.simplefilter("ignore", FutureWarning)
    # FBGEMM warns about data_parallel tables, whose gradients are right (tests/distributed/test_sharding.py).
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")


class _RunFile(logging.FileHandler):
    """The log file of a run. The next run in the same process replaces this handler."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first line that cannot be written, on the console. A run does not depend on its log."""
        if not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(OSError):
                CONSOLE.print(f"{self.baseFilename}: cannot be written ({sys.exc_info()[1]}). The run continues.")


def log_to_file(directory: Path, rank: int) -> None:
    """Log to the run directory, also in a program that calls `recmill.train` and sets up no logging."""
    if logging.getLogger("recmill").level == logging.NOTSET:
        logging.getLogger("recmill").setLevel(logging.INFO)
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if isinstance(handler, _RunFile)]:
        root.removeHandler(earlier)
        with contextlib.suppress(OSError):  # a full disk, which was reported
            earlier.close()
    name = "log.txt" if rank == 0 else f"log.rank-{rank}.txt"
    handler = _RunFile(directory / name, encoding="utf-8", errors="backslashreplace")  # a path may hold any bytes
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    root.addHandler(handler)
