"""Choose the checkpoint to resume from or to use: the newest, the best, or that of a step. No torch."""

import contextlib
import logging
from pathlib import Path

from recmill.checkpoints.format import Checkpoint, OnBlock, PrunedError, committed, held, step_of, step_path, verify
from recmill.errors import CheckpointError

log = logging.getLogger(__name__)


def best_path(directory: Path, fallback: bool = False) -> Path | None:
    """Return the checkpoint with the best validation metric, which the newest one names; None if it was not kept.

    With `fallback`, ask the newest one that is readable.
    """
    paths = committed(directory)
    for path in reversed(paths):
        try:
            best_step = verify(path, digests=False).position.best_step
        except CheckpointError:
            if not fallback:
                raise
            continue
        wanted = step_path(directory, best_step)
        return wanted if best_step and wanted in paths else None
    return None


def lost_error(directory: Path, saved_step: int) -> CheckpointError | None:
    """Return an error if no checkpoint is as new as `saved_step`, which status.json names.

    Read the status first: a run writes it after it has committed a checkpoint.
    """
    paths = committed(directory)
    newest = step_of(paths[-1]) if paths else 0
    if newest >= saved_step:
        return None
    fact = f"the newest in {directory} is of step {newest:,}" if paths else f"there is none in {directory}"
    fallback = " or use an older one with --fallback," if paths else ""
    return CheckpointError(
        f"{directory.parent / 'status.json'} says that a checkpoint of step {saved_step:,} was saved, but {fact}. "
        f"Restore it,{fallback} or start anew: choose another --run, or remove {directory.parent}."
    )


def choose(
    directory: Path,
    which: str,
    fallback: bool = False,
    on_block: OnBlock = lambda: None,
    saved_step: int = 0,
    hold: contextlib.ExitStack | None = None,
) -> Checkpoint | None:
    """Return the 'newest' or the 'best' checkpoint, or that of a step, after checking every digest; None: not there.

    With `fallback`, if the newest or best one is corrupt or lost, return the newest complete one instead of raising
    CheckpointError. `saved_step`: see `lost_error`. The checkpoint is not pruned until `hold` is closed.
    """
    while True:
        try:
            return _choose(directory, which, fallback, on_block, saved_step, hold)
        except PrunedError:
            log.info("%s: a checkpoint was pruned while it was being read; choosing again", directory)


def _choose(
    directory: Path, which: str, fallback: bool, on_block: OnBlock, saved_step: int, hold: contextlib.ExitStack | None
) -> Checkpoint | None:
    candidates = committed(directory)[::-1]
    if which.isdecimal():
        candidates = [path for path in candidates if step_of(path) == int(which)]
        saved_step = 0  # a newer one that was lost is not wanted
    problem = lost_error(directory, saved_step)
    if problem:
        if not (fallback and candidates):
            raise problem
        log.warning("%s", problem)
    if which == "best":
        best = best_path(directory, fallback)
        candidates = [best, *candidates] if best else []
    for path in candidates:
        try:
            with contextlib.ExitStack() as lock:
                lock.enter_context(held(path))
                checkpoint = verify(path, on_block=on_block)
                if hold:
                    hold.enter_context(lock.pop_all())
        except CheckpointError as error:
            if not fallback or isinstance(error, PrunedError):
                raise
            problem = problem or error
            log.warning("%s", error)
            continue
        if problem:
            log.warning("falling back to %s, the newest complete checkpoint", path)
        return checkpoint
    if problem:
        raise CheckpointError(f"no checkpoint in {directory} is complete. The newest: {problem}")
    return None
