"""Logging: the main rank speaks on stderr and in log.txt; every other rank has a file of its own."""

import contextlib
import logging
import warnings
from pathlib import Path

from recmill.observe.progress import CONSOLE

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Chatter about the libraries' own insides, which no user can act on.
_NOISY = ("torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace", "torch.distributed")


class _ConsoleHandler(logging.Handler):
    """Through rich's console, so that lines go above a running progress bar. Lines marked file_only are left out."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            with contextlib.suppress(OSError):  # a terminal that went away does not end a run; log.txt has it all
                CONSOLE.print(self.format(record))


def set_up_console() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, _ConsoleHandler) for handler in root.handlers):
        handler = _ConsoleHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
    logging.getLogger("recmill").setLevel(logging.INFO)
    quiet_libraries()
    root.addFilter(_is_error)  # TorchRec's planner talks through the root logger itself, which none of ours does


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def quiet_libraries() -> None:
    # TorchRec's own use of what torch will rename; shown at every step otherwise.
    warnings.simplefilter("ignore", FutureWarning)
    # Of data_parallel tables; their gradients are right (tests/distributed/test_sharding.py).
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


class _RunFile(logging.FileHandler):
    """Of one run; the next run of the same process has its own."""


def log_to_file(directory: Path, rank: int) -> None:
    """The whole story, also in a program that only calls `recmill.train` and knows nothing of logging."""
    if logging.getLogger("recmill").level == logging.NOTSET:
        logging.getLogger("recmill").setLevel(logging.INFO)
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if isinstance(handler, _RunFile)]:
        root.removeHandler(earlier)
        earlier.close()
    handler = _RunFile(directory / ("log.txt" if rank == 0 else f"log.rank-{rank}.txt"), encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(handler)
