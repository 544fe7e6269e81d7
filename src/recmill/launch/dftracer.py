"""Let DFTracer record the file operations of this process, if its own variables ask for it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def files_log(trace: Path | None, rank: int) -> str | None:
    """Return the start of the names of this rank's files: DFTRACER_LOG_FILE and the rank; None: nothing is recorded."""
    if os.environ.get("DFTRACER_ENABLE") != "1":
        return None
    if chosen := os.environ.get("DFTRACER_LOG_FILE"):
        return f"{Path(chosen).absolute()}-rank{rank}"
    return None if trace is None else str(trace / f"dft-{rank}")


@contextlib.contextmanager
def recorded_files(prefix: str | None, folders: list[Path]) -> Iterator[None]:
    """Record operations on files in `folders` within the block, or in DFTRACER_DATA_DIR; DFTRACER_* has the rest."""
    if prefix is None:
        yield
        return
    os.environ.setdefault("DFTRACER_DATA_DIR", ":".join(map(str, folders)))
    os.environ.setdefault("DFTRACER_INC_METADATA", "1")
    os.environ.setdefault("DFTRACER_BIND_SIGNALS", "0")  # signals are ours: they save the run
    try:
        from dftracer.python import dftracer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        log.warning("DFTRACER_ENABLE=1, but DFTracer is not installed: pip install dftracer. Files are not recorded.")
        yield
        return
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    recording = dftracer.initialize_log(prefix, os.environ["DFTRACER_DATA_DIR"], -1)
    try:
        yield
    finally:
        recording.finalize()
