"""One process of a job: `python -m recmill.launch.worker`, started by `launch.local`."""

import contextlib
import gc
import importlib
import json
import mmap
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from recmill import registry
from recmill.environment import process_environment
from recmill.files.atomic import write_json
from recmill.launch.early import leave
from recmill.launch.failures import report_failure
from recmill.launch.processes import launcher_of_ahead, wait_for_order
from recmill.launch.signals import FORWARDED, StopRequest, stop_on, stop_with_parent
from recmill.observe.log import limit_console, set_up_console
from recmill.observe.progress import spinner
from recmill.tables.libraries import import_libraries

_RESERVE_BYTES = 32 << 20  # of address space; without it, a process without memory cannot report its error
_IMPORTING = "importing torch"


def main() -> None:
    """Run the command in the launcher's job.json, and write its result or its error to the same directory."""
    set_up_console()
    gc.disable()  # scanning the many objects that imports create would take a quarter of their time
    launcher = launcher_of_ahead()
    failure = None if launcher is None else _import_ahead(launcher)
    process = process_environment()
    assert process.job is not None
    stop_with_parent()
    code = 1
    if os.getppid() == process.launcher:  # otherwise it was killed before that
        code = _run_order(process.job, process.rank, failure)
    if os.getppid() != process.launcher:
        shutil.rmtree(process.job, ignore_errors=True)  # the launcher cannot do it any more
    leave(code)


def _import_ahead(launcher: int) -> Exception | None:
    """Import torch while the launcher checks the config, then take over its variables. Return an import's error."""
    stop_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:  # it was killed before that
        leave(1)
    received: dict[str, str] = {}
    is_imported = threading.Event()

    def receive() -> None:
        received.update(wait_for_order())
        if not is_imported.is_set():
            with spinner(_IMPORTING):  # not before: the launcher uses the terminal until then
                is_imported.wait()

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    failure = None
    try:
        import_libraries(in_own_process=True)
    except Exception as error:
        failure = error
    is_imported.set()
    waiting.join()
    os.environ.update(received)
    return failure


def _run_order(job: Path, rank: int, failure: Exception | None) -> int:
    order = json.loads((job / "job.json").read_text(encoding="utf-8"))
    arguments = order["arguments"]
    registry.search_also(order["plugin_directories"])
    limit_console(order["log_level"])
    stop_signals = arguments.pop("stop_signals", None)  # None: the command has nothing to save
    with contextlib.nullcontext() if stop_signals is None else stop_on(stop_signals) as stop:
        return _run(job, rank, order["command"], arguments, stop, failure)


def _run(
    job: Path, rank: int, command: str, arguments: dict[str, Any], stop: StopRequest | None, failure: Exception | None
) -> int:
    reserve = None
    try:
        reserve = mmap.mmap(-1, _RESERVE_BYTES)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # the launcher blocked them until now
        with spinner(_IMPORTING):
            if failure is not None:
                raise failure
            import_libraries(in_own_process=True)
            from recmill.world import finish_together, join_world

            body = importlib.import_module(f"recmill.commands.{command}")
        joining = {name: arguments.pop(name) for name in ("join_seconds", "wait_seconds") if name in arguments}
        world = join_world(arguments.pop("device"), **joining)
        gc.freeze()  # modules stay: no collection has to look at them
        gc.enable()
        if stop is not None:
            arguments["stop"] = stop
        result = body.work(world, **arguments)
        if world.local_rank == 0:
            with contextlib.suppress(FileNotFoundError):  # a job without launcher
                write_json(job / "result.json", result)
        finish_together(world)
        return 0
    except BaseException as error:
        if reserve:
            reserve.close()
        return report_failure(job, rank, error)


if __name__ == "__main__":
    main()
