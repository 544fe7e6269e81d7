"""Facts about this machine, from real steps of small models: what each kind of work costs, by least squares."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill.hardware.cpu import cpu_name, num_cores
from recmill.hardware.memory import memory_bytes
from recmill.planning.devices import Device
from recmill.planning.forecast import LAYER_PASSES, ROW_PASSES
from recmill.planning.work import Work
from recmill.tables.spec import VALUE_BYTES

_DISK_BYTES = 256 << 20
_COPY_BYTES = 128 << 20
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
    """Return non-negative factors of the columns of `costs` that explain `seconds` best, by relative error."""
    relative = costs / seconds[:, None]
    used = list(range(costs.shape[1]))
    while True:
        scale = np.abs(relative[:, used]).max(axis=0)
        found = np.linalg.lstsq(relative[:, used] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if not (found < 0).any():
            break
        used.pop(int(np.argmin(found * scale)))
    factors = np.zeros(costs.shape[1])
    factors[used] = found
    return np.maximum(factors, 1e-18)


def device_from(alone: Measured, together: Measured, procs: int, copy_seconds: float, directory: Path) -> Device:
    """Return the facts from steps of one process with all cores, and of `procs` processes at the same time."""
    columns = np.array([[1.0, w.calls, w.lookups, w.row_values, w.flops, w.values] for w, _ in alone])
    step, call, lookup, row_value, flop, value = fitted_costs(columns, np.array([seconds for _, seconds in alone]))
    rest, shared = [], []
    for work, seconds in together:
        rest.append(max(seconds - step - call * work.calls, 1e-6))
        of_cores = lookup * work.lookups + row_value * work.row_values + flop * work.flops + value * work.values
        shared.append([procs * of_cores, work.collectives, procs * work.link_bytes])
    slower, latency, sent_byte = fitted_costs(np.array(shared), np.array(rest))
    return Device(
        kind="cpu",
        source=f"measured: {cpu_name()}",
        memory_gb=memory_bytes() / 1e9,
        cores=num_cores(),
        gemm_gflops=1e-9 / flop,
        memory_gb_per_s=1e-9 * VALUE_BYTES * LAYER_PASSES / value,
        row_gb_per_s=1e-9 * VALUE_BYTES * ROW_PASSES / row_value,
        row_ns=1e9 * lookup,
        call_us=1e6 * call,
        step_ms=1e3 * step,
        several=1 / slower,
        link_gb_per_s=1e-9 / sent_byte,
        link_us=1e6 * latency,
        disk_gb_per_s=_DISK_BYTES / 1e9 / _write_seconds(directory),
        copy_gb_per_s=_COPY_BYTES / 1e9 / copy_seconds,
        **_NETWORK,
    )


def copy_seconds() -> float:
    """Return how long copying a part of memory takes, at best."""
    source = np.zeros(_COPY_BYTES // 8)
    target = np.ones_like(source)
    return min(_timed(lambda: np.copyto(target, source)) for _ in range(5))


def _timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _write_seconds(directory: Path) -> float:
    """Return how long writing a file without a name to the disk of `directory` takes."""
    block = os.urandom(4 << 20)
    file = os.open(directory, os.O_TMPFILE | os.O_WRONLY)
    try:
        start = time.perf_counter()
        for _ in range(_DISK_BYTES // len(block)):
            os.write(file, block)
        os.fsync(file)
        return time.perf_counter() - start
    finally:
        os.close(file)
