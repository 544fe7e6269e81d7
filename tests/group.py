"""Groups of processes that take no time to start: children of one process that has loaded everything.

`train` and `evaluate` are the public functions in processes that somebody else has launched, as under torchrun. What
our own launcher does is tested with itself: test_resume.py, test_stopping.py and the command line's tests.
"""

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

import recmill
from recmill.failpoints import VARIABLE

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "recmill.commands.evaluate", "recmill.training.loop"])


TWO_BACKENDS = "cpu:gloo,cuda:gloo"  # as on GPUs, where NCCL is the second
backend = ""  # of every group, instead of the one that Recmill chooses, if not empty


def in_group(procs: int, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Rank 0's result; the error of the first rank that has one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(
                _rank, (procs, folder, backend, body, arguments, options), nprocs=procs, start_method="forkserver"
            )
        except ProcessException:
            errors = sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            if not errors:
                raise
            raise pickle.loads(errors[0].read_bytes()) from None
        return pickle.loads((Path(folder) / "result").read_bytes())


def _rank(
    rank: int, procs: int, folder: str, backend: str, body: Callable[..., Any], arguments: Any, options: Any
) -> None:
    import torch.distributed as dist

    from recmill import world

    local = {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(procs), **local}
    if backend:
        init = dist.init_process_group
        dist.init_process_group = lambda _, **rest: init(backend, **rest)
    world._store = lambda size, *_: dist.FileStore(f"{folder}/store", size)  # no port to agree upon
    try:
        result = body(*arguments, **options)
    except Exception as error:
        partial = Path(folder) / f"partial-{rank}"
        partial.write_bytes(pickle.dumps(error))
        partial.rename(Path(folder) / f"error-{rank}")
        raise
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))


def train(config: Any, run: Path, *, procs: int = 1, **options: Any) -> Any:
    return in_group(procs, recmill.train, config, run, **options)


def evaluate(run: Path, *, procs: int = 1, **options: Any) -> Any:
    return in_group(procs, recmill.evaluate, run, **options)


def exit_code(body: Callable[..., Any], *arguments: Any, fail: str = "") -> int:
    """Of one process that is to fail somewhere: see recmill.failpoints."""
    process = SERVER.Process(target=_child, args=(fail, body, *arguments))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def _child(fail: str, body: Callable[..., Any], *arguments: Any) -> None:
    os.environ |= {VARIABLE: fail, "RANK": "0", "WORLD_SIZE": "1"}
    body(*arguments)
