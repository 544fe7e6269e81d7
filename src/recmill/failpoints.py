"""Points where a test may make this process die, fail or hang, or find the disk full; off unless RECMILL_FAIL is set.

    RECMILL_FAIL="ckpt.before_rename@rank=1:kill, train.step@step=7@attempt=0:raise"

Each entry is a point, conditions and an action. Conditions: `rank`, `step`, `hit` (the N-th time this process reaches
the point, from 1) and `attempt` (restarts of the job so far). Actions: kill, sigill (as a CPU that lacks an instruction
does), raise, hang, nospace, eio.
"""

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

from recmill.environment import process_environment
from recmill.errors import ConfigError

VARIABLE = "RECMILL_FAIL"
POINTS = {
    "train.begin": "a worker has started, nothing is loaded",
    "train.loaded": "the checkpoint is loaded, or the tables are filled; no step is done",
    "train.step": "before a step; `step` counts finished ones",
    "train.updated": "after a step, before anything is reported or saved",
    "train.end": "the last checkpoint is committed, the results are not written",
    "eval.batch": "before a batch of an evaluation",
    "ckpt.begin": "a save is due, nothing is copied",
    "ckpt.copied": "the copy is made, nothing is written",
    "ckpt.shards": "the directory exists, no shard is written",
    "ckpt.written": "this rank's shards are written",
    "ckpt.sync": "state.json or the manifest is being synced",
    "ckpt.before_manifest": "everything but the manifest is written",
    "ckpt.before_rename": "the manifest is written, the directory is still hidden",
    "ckpt.committed": "the checkpoint is renamed into place, older ones are still there",
    "ckpt.pruned": "older checkpoints are removed, the new one is not announced",
    "prepare.begin": "a dataset's hidden directory exists, empty",
    "prepare.written": "all files but dataset.json are written",
    "prepare.before_rename": "dataset.json is written, the directory is still hidden",
    "prepare.renamed": "the dataset is renamed into place",
    "probe.all_features": "a child process tries bfloat16 or float16; ONEDNN_MAX_CPU_ISA is not set",
    "probe.lowered": "the same; ONEDNN_MAX_CPU_ISA is set",
    "probe.kernel": "a child process tries a kernel of ours that was just compiled",
}
_ERRORS = {"nospace": errno.ENOSPC, "eio": errno.EIO}
_SIGNALS = {"kill": signal.SIGKILL, "sigill": signal.SIGILL}
_ACTIONS = (*_SIGNALS, "raise", "hang", *_ERRORS)
_CONDITIONS = ("rank", "step", "hit", "attempt")


@dataclass(frozen=True)
class _Failure:
    point: str
    conditions: dict[str, int]
    action: str

    def happen(self) -> None:
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        if self.action == "hang":
            time.sleep(1e9)
        if self.action == "raise":
            raise RuntimeError(f"requested by {VARIABLE} at {self.point}")
        number = _ERRORS[self.action]
        raise OSError(number, os.strerror(number))


class Failpoints:
    """The failures that RECMILL_FAIL describes, and how often this process reached each point."""

    def __init__(self, text: str) -> None:
        self._failures = _parse(text)
        self._hits: Counter[str] = Counter()

    def reach(self, point: str, step: int | None = None) -> None:
        if not self._failures:
            return
        assert point in POINTS, point
        self._hits[point] += 1
        process = process_environment()
        now = {"rank": process.rank, "step": step, "hit": self._hits[point], "attempt": process.attempt}
        for failure in self._failures:
            if failure.point == point and all(now[key] == value for key, value in failure.conditions.items()):
                failure.happen()


_active: Failpoints | None = None  # of this process; made when the first point is reached


def reach(point: str, step: int | None = None) -> None:
    """Note that this process is at `point`, and fail here if a test wants that."""
    global _active
    if _active is None:
        _active = Failpoints(os.environ.get(VARIABLE, ""))
    _active.reach(point, step)


def _parse(text: str) -> list[_Failure]:
    failures = []
    for part in filter(None, map(str.strip, text.split(","))):
        where, _, action = part.rpartition(":")
        point, *conditions = where.split("@")
        pairs = dict(condition.partition("=")[::2] for condition in conditions)
        is_known = point in POINTS and action in _ACTIONS and pairs.keys() <= set(_CONDITIONS)
        if not is_known or not all(value.isdigit() for value in pairs.values()):
            raise ConfigError(
                f"{VARIABLE}: '{part}' is not POINT[@CONDITION=NUMBER...]:ACTION. Points: {', '.join(POINTS)}. "
                f"Conditions: {', '.join(_CONDITIONS)}. Actions: {', '.join(_ACTIONS)}."
            )
        failures.append(_Failure(point, {key: int(value) for key, value in pairs.items()}, action))
    return failures
