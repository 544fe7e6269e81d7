"""Compare the step times that `recmill plan` forecasts with those of real runs, in eight shapes, on this machine.

The machine is calibrated first, with other models than those that are measured. Both use the fastest steps: on a shared
machine the others say how busy it is. The last line is JSON: the error of each forecast in percent of the measured
time, the median of their sizes and the worst. Two minutes on two cores.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from train_ctr import write_rows

import recmill
from recmill.commands.calibrate import calibrate_machine
from recmill.observe.recorder import STEP

_ROWS = 100_000
_TABLE_ROWS = 200_000  # at most
_WARM_UP = 4


@dataclass(frozen=True)
class Shape:
    name: str
    procs: int
    batch: int
    steps: int
    model: dict[str, Any]
    tables: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def config(self, path: Path) -> dict[str, Any]:
        limits = {"path": str(path), "drop_last": True, "limit_val_batches": 1, "limit_test_batches": 1}
        train = {"device": "cpu", "global_batch_size": self.batch, "num_epochs": 1000, "max_steps": self.steps}
        return {
            "data": limits | self.data,
            "model": self.model,
            "sharding": self.sharding,
            "optim": {"tables": self.tables},
            "train": train,
            "eval": {"every_steps": 10**9},
            "checkpoint": {"every_steps": 10**9},
        }


def dlrm(dim: int, bottom: list[int], top: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "dlrm", "embedding_dim": dim, "bottom_mlp": bottom, "top_mlp": top} | more


_MLPERF = dlrm(128, [512, 256, 128], [1024, 1024, 512, 256])
_DEEPREC = dlrm(16, [512, 256, 64, 16], [512, 256])
_DCN = dlrm(32, [256, 32], [512, 256], name="dcnv2", num_cross_layers=2, cross_rank=64)
SHAPES = (
    Shape("MLPerf's", 1, 2048, 24, _MLPERF),
    Shape("MLPerf's", 2, 2048, 20, _MLPERF, tables={"name": "sgd"}),
    Shape("DeepRec's", 1, 4096, 40, _DEEPREC, tables={"name": "sgd"}),
    Shape("DeepRec's", 2, 4096, 40, _DEEPREC),
    Shape("DCN v2", 1, 2048, 40, _DCN),
    Shape("5 ids per feature", 1, 2048, 40, dlrm(64, [256, 64], [512, 256]), data={"multi_hot": {"sizes": [5]}}),
    Shape("row-wise", 2, 4096, 40, dlrm(32, [256, 32], [256, 128]), sharding={"default": "row_wise"}),
    Shape("DeepRec's", 4, 8192, 30, _DEEPREC, tables={"name": "adagrad"}),
)


def fastest_step(shape: Shape, data: Path, run: Path) -> float:
    """Train, and return the seconds of the fastest step after the first ones."""
    recmill.train(shape.config(data), run, procs=shape.procs)
    (folder,) = (run / "trace").iterdir()
    parts = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))["parts"]
    counted = [number for number, part in enumerate(parts) if part not in ("save", "validate")]
    records = np.fromfile(folder / "rank-0.steps", dtype=STEP)
    seconds = records["parts"][:, counted].sum(axis=1) / records["steps"]
    return float(seconds[_WARM_UP:].min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=Path, help="File of an earlier calibration, to be used instead of a new one.")
    arguments = parser.parse_args()
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        data, facts = Path(folder) / "data", arguments.facts or Path(folder) / "facts.toml"
        write_rows(data, _ROWS, _TABLE_ROWS)
        if not arguments.facts:
            print(calibrate_machine(facts))
        for number, shape in enumerate(SHAPES):
            measured = fastest_step(shape, data, Path(folder) / f"run-{number}")
            step = recmill.plan(shape.config(data), procs=shape.procs, device=str(facts)).step
            name = f"{shape.name}, batch {shape.batch}, {shape.procs} processes"
            errors[name] = round(100 * (step.total / measured - 1), 1)
            print(f"{name}: {1e3 * measured:.1f} ms, forecast {1e3 * step.total:.1f} ms, {errors[name]:+.1f} %")
    sizes = [abs(error) for error in errors.values()]
    print(json.dumps({"errors": errors, "median": statistics.median(sizes), "worst": max(sizes)}))


if __name__ == "__main__":
    main()
