"""One process of a job: `python -m recmill.worker`, started by the local launcher."""

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import time
import traceback
from pathlib import Path

from recmill.errors import as_user_error
from recmill.launch.local import Failure, leave
from recmill.observe.log import set_up_console

_PR_SET_PDEATHSIG = 1


def main() -> None:
    job = Path(os.environ["RECMILL_JOB"])
    rank = int(os.environ["RANK"])
    # If the launcher is killed, stop as if asked to: finish the step, save, leave.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ["RECMILL_LAUNCHER"]):
        leave(1)  # it was killed before that
    try:
        set_up_console()
        order = json.loads((job / "job.json").read_text(encoding="utf-8"))
        from recmill.world import finish_together, join_world

        body = importlib.import_module(f"recmill.commands.{order['command']}")
        arguments = order["arguments"]
        world = join_world(arguments.pop("device"))
        result = body.work(world, **arguments)
        if rank == 0:
            (job / "result.json").write_text(json.dumps(result), encoding="utf-8")
        finish_together(world)
        code = 0
    except BaseException as error:
        code = _report(job, rank, error)
    leave(code)


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
