"""Measure how long training waits for a checkpoint and how long until it is safe: ours and torch's.

    python benchmarks/checkpoint.py [--gigabytes 4] [--rounds 3] [--folder DIR]

One process holds DLRM with tables of this size and their row-wise Adagrad state. In each round every method saves once,
and each file is synced to the disk before it counts as written:

    background    ours with its defaults: a copy, then shards, digests, manifest and rename in a thread
    waiting       ours with checkpoint.background = false
    torch_save    torch.save of the same tensors, then fsync
    dcp           torch.distributed.checkpoint.save, no digests, no commit
    dcp_async     torch.distributed.checkpoint.async_save
    changes       ours, incremental, after steps that touched about 1 % of the rows; changes_8: with 8 bits per value

`stall` is the seconds that the caller waits, `total` those until everything is on the disk. The last line is JSON.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from recmill import prepare
from recmill.checkpoints import loading as checkpoint
from recmill.checkpoints.format import Origin, Position, committed
from recmill.checkpoints.saver import Saver
from recmill.commands.assemble import build_sharded, build_source, model_module, open_matching_dataset, task_module
from recmill.config import load_config
from recmill.config.sections import CheckpointSection
from recmill.launch.watchdog import Heartbeat
from recmill.observe.log import quiet_libraries
from recmill.tables.first_values import fill_tables
from recmill.training.optim import build_optimizer
from recmill.training.parts import Parts
from recmill.training.step import Step
from recmill.world import joined_world

DIM, TABLES = 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; needs twice the tables")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        with quiet_libraries():
            figures = measure(folder, int(options.gigabytes * 1e9 / (DIM * 4 * TABLES)), options.rounds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures))


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    touched = rows // 100  # by one batch of this many random rows
    data = folder / "data"
    prepare("random-clicks", data, rows=2 * touched + 20, days=2, dense=4, tables=[rows] * TABLES)
    config = load_config(
        {
            "data": {"path": str(data)},
            "model": {"name": "dlrm", "embedding_dim": DIM, "bottom_mlp": [DIM], "top_mlp": [16]},
            "train": {"device": "cpu", "global_batch_size": touched},
        }
    )
    with joined_world("cpu") as world:
        dataset = open_matching_dataset(config)
        model = build_sharded(config, dataset, world)
        optimizer = build_optimizer(model, config.settings.optim)
        fill_tables(model, model_module(config).tables(config.model, dataset.description), 1)
        source = build_source(config, dataset, 0, 1)
        parts = Parts(model, task_module(config), source, world, prefetch=0, heartbeat=Heartbeat())
        step = Step(parts, optimizer, config.settings.train, config.settings.optim.dense, Position())
        batch = next(source.train_batches(0, 0))
        step(batch, 1.0 / touched)
        state = checkpoint.state_of(model, optimizer)
        size = sum(_whole(value).nbytes for value in state.values())
        print(
            f"{TABLES} tables of {rows:,} rows, {DIM} wide: {size / 1e9:.2f} GB with the optimizer's state", flush=True
        )

        def saver(name: str, **section: Any) -> Saver:
            origin = Origin("", "", 1, touched, 1, {})
            return Saver(folder / name, model, optimizer, origin, CheckpointSection(**section), world, Heartbeat())

        changes, changes_8 = (saver(name, full_every=1000, row_bits=bits) for name, bits in (("c", 32), ("c8", 8)))
        for changing in (changes, changes_8):
            changing.save(Position(step=1))
            changing.finish()
        step(batch, 1.0 / touched)  # changes rows since the full checkpoint
        ours = {"background": saver("b"), "waiting": saver("w", background=False)}
        ways: dict[str, Callable[[int], float]] = {
            name: partial(_ours, own) for name, own in {**ours, "changes": changes, "changes_8": changes_8}.items()
        }
        ways |= {
            "torch_save": lambda number: _torch_save(state, folder / "torch.pt"),
            "dcp": lambda number: _dcp(state, folder / "dcp"),
            "dcp_async": lambda number: _dcp_async(state, folder / "dcp"),
        }
        return _rounds(ways, rounds, folder) | {"gigabytes": round(size / 1e9, 3), "rounds": rounds}


def _rounds(ways: dict[str, Callable[[int], float]], rounds: int, folder: Path) -> dict[str, Any]:
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    totals: dict[str, list[float]] = {name: [] for name in ways}
    written: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            os.sync()
            before = set(folder.rglob("*"))
            started = time.monotonic()
            stall = way(number + 2)
            total = time.monotonic() - started
            if number:  # the first round allocates memory that later ones reuse
                stalls[name].append(stall)
                totals[name].append(total)
                print(f"{name:12} stall {stall:7.2f} s   total {total:7.2f} s", flush=True)
            new = [path for path in folder.rglob("*") if path not in before and path.is_file()]
            written[name] = sum(path.stat().st_size for path in new) or written.get(name, 0)
            _forget(folder, name)
    figures: dict[str, Any] = {}
    for name in ways:
        figures[name] = {
            "stall": round(statistics.median(stalls[name]), 3),
            "total": round(statistics.median(totals[name]), 2),
            "megabytes": round(written[name] / 1e6, 1),
        }
    for name in ("waiting", "torch_save", "dcp", "dcp_async"):
        ratios = [other / own for other, own in zip(stalls[name], stalls["background"], strict=True)]
        figures[f"{name}_stall_over_ours"] = round(statistics.median(ratios), 2)
    figures["changes_bytes_of_full"] = round(figures["changes"]["megabytes"] / figures["background"]["megabytes"], 4)
    figures["changes_time_of_full"] = round(figures["changes"]["total"] / figures["background"]["total"], 3)
    figures["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    return figures


def _ours(saver: Saver, step: int) -> float:
    started = time.monotonic()
    saver.save(Position(step=step))
    stall = time.monotonic() - started
    saver.finish()
    return stall


def _torch_save(state: dict[str, Any], path: Path) -> float:
    started = time.monotonic()
    tensors = {key: _whole(value) for key, value in state.items()}
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - started


def _whole(value: Any) -> torch.Tensor:
    """Return the only shard of a tensor: a single process holds all of it."""
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


def _dcp(state: dict[str, Any], path: Path) -> float:
    started = time.monotonic()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
    return time.monotonic() - started


def _dcp_async(state: dict[str, Any], path: Path) -> float:
    started = time.monotonic()
    future: Any = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
    stall = time.monotonic() - started
    future.result()
    return stall


def _forget(folder: Path, name: str) -> None:
    """Delete what a method wrote. The base of the incremental checkpoints must stay; they are pruned to two."""
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    (folder / "torch.pt").unlink(missing_ok=True)
    own = {"background": "b", "waiting": "w"}.get(name)
    if own:
        for path in committed(folder / own):
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
