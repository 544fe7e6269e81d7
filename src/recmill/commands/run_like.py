"""`recmill run-like`: run the command line of another system's program, or show the commands that do the same here."""

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
from recmill.launch.local import is_launched_with
from recmill.launch.signals import stop_with_parent
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
    """Run the steps. If a launcher started several processes, all of them train; the first one does the rest."""
    is_first = process_environment().rank == 0
    for note in plan.notes if is_first else ():
        log.info("note: %s", note)
    for index, step in enumerate(plan.steps):
        if step.command == "train" or (is_first and not _is_adopted(step)):
            module = importlib.import_module(f"recmill.commands.{step.command}")
            getattr(module, step.command)(**step.arguments)
        elif not is_first and any(later.command == "train" for later in plan.steps[index:]):
            _wait_for(step)


def _is_adopted(step: Step) -> bool:
    """Return whether a step would only read every file again: training checks those that changed."""
    return step.command == "adopt" and step.output is not None and (step.output / DESCRIPTION_FILE).is_file()


def _wait_for(step: Step) -> None:
    """Wait until the first process has made a dataset. If it fails, the launcher ends this one."""
    stop_with_parent()
    while not (Path(step.arguments["output"]) / DESCRIPTION_FILE).is_file():
        time.sleep(_POLL_SECONDS)
