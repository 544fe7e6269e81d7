"""One process of a job: `python -m recmill.launch.worker`, started by the local launcher."""

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from recmill.errors import as_user_error
from recmill.launch.local import Failure, leave
from recmill.launch.signals import SIGNALS, listening, stop_with_parent
from recmill.observe.log import set_up_console


def main() -> None:
    job = Path(os.environ["RECMILL_JOB"])
    rank = int(os.environ["RANK"])
    stop_with_parent()
    if os.getppid() != int(os.environ["RECMILL_LAUNCHER"]):
        leave(1)  # it was killed before that
    order = json.loads((job / "job.json").read_text(encoding="utf-8"))
    arguments = order["arguments"]
    stop_signals = arguments.pop("stop_signals", None)  # None: a command that has nothing to save
    with listening(stop_signals) if stop_signals is not None else contextlib.nullcontext():
        code = _run(job, rank, order["command"], arguments)
    leave(code)


def _run(job: Path, rank: int, command: str, arguments: dict[str, Any]) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher held them back until now
        set_up_console()
        from recmill.world import finish_together, join_world

        body = importlib.import_module(f"recmill.commands.{command}")
        world = join_world(arguments.pop("device"), arguments.pop("wait_seconds", 0.0))
        result = body.work(world, **arguments)
        if rank == 0:
            (job / "result.json").write_text(json.dumps(result), encoding="utf-8")
        finish_together(world)
        return 0
    except BaseException as error:
        return _report(job, rank, error)


def _report(job: Path, rank: int, error: BaseException) -> int:
    """Written before this process leaves the group, so the first to fail has the earliest time."""
    known = as_user_error(error)
    kind = type(known).__name__ if known else ("KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else "")
    message = str(known) if known else f"{type(error).__name__}: {error}"
    failure = Failure(rank, time.time(), kind, message, traceback.format_exc())
    partial = job / f".error-{rank}"
    partial.write_text(json.dumps(dataclasses.asdict(failure)), encoding="utf-8")
    os.replace(partial, job / f"error-{rank}.json")
    return known.exit_code if known else 1


if __name__ == "__main__":
    main()
