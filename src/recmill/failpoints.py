"""Places where a test may make this process die, fail, hang or find the disk full; nothing unless RECMILL_FAIL is set.

    RECMILL_FAIL="ckpt.before_rename@rank=1:kill, train.step@step=7@attempt=0:raise"

A place, conditions (`rank`, `step`, `hit`: the so manieth time here, `attempt`: how many restarts there were), and what
is to happen: kill, sigill (as a CPU does that lacks an instruction), raise, hang, nospace, eio.
"""

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

from recmill.errors import ConfigError

VARIABLE = "RECMILL_FAIL"
PLACES = {
    "train.begin": "a worker has started, nothing is loaded",
    "train.loaded": "the checkpoint is loaded, or the tables are filled; no step is done",
    "train.step": "before a step; `step`: those that are done",
    "train.updated": "after a step, before anything is reported or saved",
    "train.end": "the last checkpoint is committed, the results are not written",
    "eval.batch": "before a batch of an evaluation",
    "ckpt.begin": "a save is due, nothing is copied",
    "ckpt.copied": "the copy is made, nothing is written",
    "ckpt.shards": "the directory is there, no shard is written",
    "ckpt.written": "this rank's shards are written",
    "ckpt.sync": "state or manifest is being made durable",
    "ckpt.before_manifest": "all is written but the manifest",
    "ckpt.before_rename": "the manifest is written, the directory is still hidden",
    "ckpt.committed": "renamed, older ones are still there",
    "ckpt.pruned": "older ones are gone, nobody was told of the new one",
    "prepare.begin": "a dataset's hidden directory is there, empty",
    "prepare.written": "all files are written but dataset.json",
    "prepare.before_rename": "dataset.json is written, the directory is still hidden",
    "prepare.renamed": "the dataset is in its place",
    "probe.all_features": "a child process tries bfloat16 or float16, ONEDNN_MAX_CPU_ISA is not set",
    "probe.lowered": "the same, ONEDNN_MAX_CPU_ISA is set",
    "probe.kernel": "a child process tries a kernel of ours that was just compiled",
}
_ERRORS = {"nospace": errno.ENOSPC, "eio": errno.EIO}
_ACTIONS = ("kill", "sigill", "raise", "hang", *_ERRORS)
_CONDITIONS = ("rank", "step", "hit", "attempt")


@dataclass(frozen=True)
class _Failure:
    place: str
    conditions: dict[str, int]
    action: str


def _parsed(text: str) -> list[_Failure]:
    failures = []
    for part in filter(None, map(str.strip, text.split(","))):
        where, _, action = part.rpartition(":")
        place, *conditions = where.split("@")
        pairs = dict(condition.partition("=")[::2] for condition in conditions)
        is_known = place in PLACES and action in _ACTIONS and pairs.keys() <= set(_CONDITIONS)
        if not is_known or not all(value.isdigit() for value in pairs.values()):
            raise ConfigError(
                f"{VARIABLE}: '{part}' is not PLACE[@CONDITION=NUMBER...]:ACTION. Places: {', '.join(PLACES)}. "
                f"Conditions: {', '.join(_CONDITIONS)}. Actions: {', '.join(_ACTIONS)}."
            )
        failures.append(_Failure(place, {key: int(value) for key, value in pairs.items()}, action))
    return failures


_failures: list[_Failure] | None = None
_hits: Counter[str] = Counter()


def reach(place: str, step: int | None = None) -> None:
    """This process is at `place` now."""
    global _failures
    if _failures is None:
        _failures = _parsed(os.environ.get(VARIABLE, ""))
    if not _failures:
        return
    assert place in PLACES, place
    _hits[place] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("RECMILL_ATTEMPT", "0"))
    now = {"rank": int(os.environ.get("RANK", "0")), "step": step, "hit": _hits[place], "attempt": int(attempt)}
    for failure in _failures:
        if failure.place == place and all(now[key] == value for key, value in failure.conditions.items()):
            _do(failure)


def _do(failure: _Failure) -> None:
    if failure.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure.action == "sigill":
        os.kill(os.getpid(), signal.SIGILL)
    if failure.action == "hang":
        time.sleep(1e9)
    if failure.action == "raise":
        raise RuntimeError(f"asked for by {VARIABLE} at {failure.place}")
    number = _ERRORS[failure.action]
    raise OSError(number, os.strerror(number))
