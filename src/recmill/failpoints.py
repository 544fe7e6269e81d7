"""Points where a test can make this process die, fail, hang, wait, or find the disk full, with RECMILL_FAIL:

    RECMILL_FAIL="ckpt.before_rename@rank=1:kill, train.step@step=7@attempt=0:raise"

Each entry is a point, conditions and an action. Conditions: `rank`, `step`, `hit` (the N-th time that this process
reaches the point, from 1) and `attempt` (restarts of the job so far). Actions: kill, sigill (as on a CPU that lacks an
instruction), raise, hang, slow (100 ms), nospace, quota, eio; in store.read and store.append also eintr (interrupted)
and short (only a part is read or written), and slow is 50 ms.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass
from functools import cache

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
    "ckpt.rows": "a chunk of the rows of cached tables is written",
    "ckpt.written": "this rank's shards are written",
    "ckpt.sync": "state.json or the manifest is being synced",
    "ckpt.before_manifest": "everything but the manifest is written",
    "ckpt.before_rename": "the manifest is written, the directory is still hidden",
    "ckpt.committed": "the checkpoint is renamed into place, older ones are still there",
    "ckpt.pruned": "older checkpoints are removed, the new one is not announced",
    "prepare.begin": "a dataset's hidden directory exists, empty",
    "prepare.part": "the work of a part is done, and not noted as done",
    "prepare.written": "all files but dataset.json are written",
    "prepare.before_rename": "dataset.json is written, the directory is still hidden",
    "prepare.renamed": "the dataset is renamed into place",
    "predict.part": "some rows are scored, and their scores are in a hidden directory",
    "observe.write": "a rank is about to write what it recorded",
    "probe.all_features": "a child process tries bfloat16 or float16; ONEDNN_MAX_CPU_ISA is not set",
    "probe.lowered": "the same; ONEDNN_MAX_CPU_ISA is set",
    "probe.kernel": "a child process tries a kernel of ours that was just compiled",
    "store.read": "a row of a cached table was read from its file, and is not checked yet",
    "store.append": "a segment of rows is complete, and not written to the file",
    "store.compact": "a segment is chosen for compaction, and not read",
    "store.snapshot": "a snapshot of cached tables begins",
}
_ERRORS = {"nospace": errno.ENOSPC, "quota": errno.EDQUOT, "eio": errno.EIO}
_WAIT_SECONDS = {"hang": 1e9, "slow": 0.1}
_SIGNALS = {"kill": signal.SIGKILL, "sigill": signal.SIGILL}
_OF_DISKS = {"eintr": int(errno.EINTR), "short": 10_001, "slow": 10_002}  # as in kernels/rows.cpp
_ON_DISKS = ("store.read", "store.append")
_ACTIONS = (*_SIGNALS, "raise", *_WAIT_SECONDS, *_ERRORS)
_CONDITIONS = ("rank", "step", "hit", "attempt")


@dataclass
class _Failure:
    point: str
    conditions: dict[str, int]
    action: str
    hits: int = 0  # how often this process has reached the point

    def happen_if_due(self, step: int | None) -> None:
        process = process_environment()
        now = {"rank": process.rank, "step": step, "hit": self.hits, "attempt": process.attempt}
        if any(now[name] != value for name, value in self.conditions.items()):
            return
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        if self.action in _WAIT_SECONDS:
            time.sleep(_WAIT_SECONDS[self.action])
            return
        if self.action == "raise":
            raise RuntimeError(f"requested by {VARIABLE} at {self.point}")
        number = _ERRORS[self.action]
        raise OSError(number, os.strerror(number))


@cache
def active_failures() -> list[_Failure]:
    """Return the failures of this process, which also count how often their points were reached."""
    return _parse(os.environ.get(VARIABLE, ""))


def reach(point: str, step: int | None = None) -> None:
    """Fail here if RECMILL_FAIL says so."""
    assert point in POINTS, point
    failures_here = [failure for failure in active_failures() if failure.point == point]
    for failure in failures_here:
        failure.hits += 1
    for failure in failures_here:
        failure.happen_if_due(step)


def native_failures(points: list[str]) -> list[tuple[int, int, int]]:
    """Return (index of the point, hit or 0, action) for C++, which counts hits (`Failure` in kernels/rows.cpp)."""
    process = process_environment()
    now = {"rank": process.rank, "attempt": process.attempt}
    found = []
    for failure in active_failures():
        fixed = failure.conditions.keys() - {"hit"}
        if failure.point in points and all(now.get(name) == failure.conditions[name] for name in fixed):
            signal_number = _SIGNALS.get(failure.action, 0)
            numbers = _ERRORS | _OF_DISKS
            action = 0 if failure.action == "hang" else -signal_number or numbers.get(failure.action, errno.EIO)
            found.append((points.index(failure.point), failure.conditions.get("hit", 0), int(action)))
    return found


def _parse(text: str) -> list[_Failure]:
    failures = []
    for part in filter(None, map(str.strip, text.split(","))):
        where, _, action = part.rpartition(":")
        point, *conditions = where.split("@")
        pairs = dict(condition.partition("=")[::2] for condition in conditions)
        actions = (*_ACTIONS, *_OF_DISKS) if point in _ON_DISKS else _ACTIONS
        is_known = point in POINTS and action in actions and pairs.keys() <= set(_CONDITIONS)
        if not is_known or not all(value.isdecimal() for value in pairs.values()):
            raise ConfigError(
                f"{VARIABLE}: '{part}' is not POINT[@CONDITION=NUMBER...]:ACTION. Points: {', '.join(POINTS)}. "
                f"Conditions: {', '.join(_CONDITIONS)}. Actions: {', '.join(_ACTIONS)}."
            )
        failures.append(_Failure(point, {key: int(value) for key, value in pairs.items()}, action))
    return failures
