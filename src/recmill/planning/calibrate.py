"""Facts about this machine, from real steps of small models: what each kind of work costs, by least squares."""

import logging
import os
import tempfile
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill.hardware.cpu import cpu_name, num_cores
from recmill.hardware.memory import memory_bytes
from recmill.planning.devices import Device, read_device
from recmill.planning.forecast import LAYER_PASSES, ROW_PASSES
from recmill.planning.work import Work
from recmill.tables.spec import VALUE_BYTES

log = logging.getLogger(__name__)

_DISK_BYTES = 256 << 20
_COPY_BYTES = 128 << 20
_LEAST_SHARE = 1e-4  # of a step: work that takes less in all of them cannot be measured
_NETWORK = {"network_gb_per_s": 1.25, "network_us": 50.0}  # 10 Gbit/s: assumed, one machine cannot measure it


@dataclass(frozen=True)
class Reference:
    """A small model whose steps are measured. Each spends most of its time in another kind of work."""

    tables: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int  # of each process
    ids: int = 1  # per feature
    rows: int = 100_000

    def config(self, size: int) -> dict[str, Any]:
        model = {"name": "dlrm", "embedding_dim": self.dim, "bottom_mlp": [*self.bottom, self.dim], "top_mlp": self.top}
        train = {"device": "cpu", "global_batch_size": self.batch * size}
        return {"data": {"path": "none"}, "model": model, "train": train}


REFERENCES = (
    Reference(4, 16, (), (16,), 256, rows=1000),
    Reference(26, 16, (32,), (32,), 2048),
    Reference(26, 128, (32,), (32,), 1024),
    Reference(8, 32, (32,), (32,), 1024, ids=10),
    Reference(4, 128, (32,), (32,), 1024, ids=20),
    Reference(4, 32, (512, 512), (1024, 1024), 1024, rows=1000),
    Reference(4, 32, (512,), (512, 512), 2048, rows=1000),
    Reference(4, 32, (256, 256), (256, 256, 256), 2048, rows=1000),
    Reference(4, 32, (64, 64, 64), (64, 64, 64), 2048, rows=1000),
)
Measured = Sequence[tuple[Work, float]]  # the work of a step, and its seconds


def fitted_costs(costs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the factors of columns that explain `seconds` best, by relative error; 0: too small to be measured."""
    relative = costs / seconds[:, None]
    factors = np.zeros(costs.shape[1])
    used = [column for column in range(costs.shape[1]) if relative[:, column].any()]
    while used:
        scale = np.abs(relative[:, used]).max(axis=0)
        found = np.linalg.lstsq(relative[:, used] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (found * scale >= _LEAST_SHARE).all():
            factors[used] = found
            break
        used.pop(int(np.argmin(found * scale)))
    return factors


def device_from(alone: Measured, together: Measured, procs: int, copy_and_write: tuple[float, float]) -> Device:
    """Return the facts from steps of one process with all cores, and of `procs` processes at the same time.

    `copy_and_write`: the results of `copy_seconds` and `write_seconds`.
    """
    columns = np.array([[1.0, w.calls, w.lookups, w.row_values, w.flops, w.values] for w, _ in alone])
    step, call, lookup, row_value, flop, value = fitted_costs(columns, np.array([seconds for _, seconds in alone]))
    rest, shared = [], []
    for work, seconds in together:
        rest.append(max(seconds - step - call * work.calls, 1e-6))
        of_cores = lookup * work.lookups + row_value * work.row_values + flop * work.flops + value * work.values
        shared.append([procs * of_cores, work.collectives, procs * work.link_bytes])
    slower, latency, sent_byte = fitted_costs(np.array(shared), np.array(rest))
    costs = {  # in seconds: of a GFLOP, and of each GB
        "gemm_gflops": 1e9 * flop,
        "memory_gb_per_s": 1e9 * value / (VALUE_BYTES * LAYER_PASSES),
        "row_gb_per_s": 1e9 * row_value / (VALUE_BYTES * ROW_PASSES),
        "several": slower,
        "link_gb_per_s": 1e9 * sent_byte,
    }
    return Device(
        kind="cpu",
        source=f"measured: {cpu_name()}",
        memory_gb=memory_bytes() / 1e9,
        cores=num_cores(),
        row_ns=1e9 * lookup,
        call_us=1e6 * call,
        step_ms=1e3 * step,
        link_us=1e6 * latency,
        copy_gb_per_s=_COPY_BYTES / 1e9 / copy_and_write[0],
        disk_gb_per_s=_DISK_BYTES / 1e9 / copy_and_write[1],
        **_rates(costs),
        **_NETWORK,
    )


def _rates(costs: dict[str, float]) -> dict[str, float]:
    """Return the inverse of each cost. Warn if one is 0, and use the rate of `--device cpu` instead."""
    missing = [name for name, cost in costs.items() if not cost]
    if missing:
        log.warning(
            "not measured: %s. The values of --device cpu are used. Stop other programs and calibrate again.",
            ", ".join(missing),
        )
    usual = read_device("cpu")
    return {name: 1 / cost if cost else getattr(usual, name) for name, cost in costs.items()}


def copy_seconds() -> float:
    """Return how long copying a part of memory takes, at best."""
    source = np.zeros(_COPY_BYTES // 8)
    target = np.ones_like(source)
    return min(timeit.repeat(lambda: np.copyto(target, source), number=1))


def write_seconds(directory: Path) -> float:
    """Return how long writing a temporary file to the disk of `directory` takes."""
    block = os.urandom(4 << 20)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(_DISK_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        return time.perf_counter() - start
