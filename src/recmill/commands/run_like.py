"""`recmill run-like`: run the command line of another system's program, or show the commands that do the same here."""

import contextlib
import importlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from recmill.commands.options import Procs, flag
from recmill.compat import find_program
from recmill.compat.program import Given, Plan, Step
from recmill.config import load_config
from recmill.config.sections import Section
from recmill.environment import process_environment, script_variables
from recmill.errors import ResourceError
from recmill.files.locks import exclusive_lock
from recmill.launch.local import is_launched_with
from recmill.schema import DESCRIPTION_FILE

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class Options(Section):
    run: str | None = flag(
        None, "Run directory.  [default: runs/PROGRAM-DIGEST, the same for the same command]", "--run", "--run-dir"
    )
    procs: Procs = 1
    show: bool = flag(False, "Print the commands and the config that do the same, and run nothing.")


def plan_like(program: str, arguments: Sequence[str], run: str | None = None, procs: int = 1) -> Plan:
    """Return what Recmill does for this command line. Raise ConfigError for what cannot be done, before any work.

    `procs`: how many processes train, unless a launcher has started this one.
    """
    found = find_program(program)
    own = process_environment()
    is_launched = is_launched_with(procs)
    values = found.read(arguments, script_variables([flag.name for flag in found.variables]))
    plan = found.plan(Given(found, values, own.size if is_launched else procs, is_launched, run))
    for step in plan.steps:
        if "config" in step.arguments:
            load_config(step.arguments["config"])
    return plan


def run_like(plan: Plan) -> None:
    """Run the steps. If a launcher started several processes, all of them train; one of them does the rest."""
    is_first = process_environment().rank == 0
    for note in plan.notes if is_first else ():
        log.info("note: %s", note)
    commands = [step.command for step in plan.steps]
    for index, step in enumerate(plan.steps):
        if "train" in commands[index + 1 :]:
            _make_once(step)
        elif is_first or step.command == "train":
            _run(step)


def _run(step: Step) -> None:
    getattr(importlib.import_module(f"recmill.commands.{step.command}"), step.command)(**step.arguments)


def _make_once(step: Step) -> None:
    """Make the dataset that all processes wait for, unless it is there.

    The first process that gets the lock makes it. If that fails, the others try and fail as well: not every launcher
    ends them.
    """
    output = Path(step.arguments["output"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        while not (output / DESCRIPTION_FILE).is_file():
            try:
                held.enter_context(exclusive_lock(output.with_name(f".{output.name}.lock"), "Wait for it."))
            except ResourceError:
                time.sleep(_POLL_SECONDS)
            else:
                if not (output / DESCRIPTION_FILE).is_file():
                    _run(step)
                return
