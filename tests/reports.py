"""Run directories as training leaves them, for reports and comparisons."""

import json
from pathlib import Path
from typing import Any

import tomli_w

from .unit.test_timeline import write_rank

VERDICT = "exchange-bound 24 %: without it 1.31x"


def write_run(path: Path, config: dict[str, Any], status: dict[str, Any], auroc: float = 0.7, **train: float) -> Path:
    """Write config, status, and 12 reports and 4 validations; `train`: values of every report."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(config))
    (path / "status.json").write_text(json.dumps(status))
    lines: list[dict[str, Any]] = []
    for step in range(10, 130, 10):
        speed = {"samples_per_s": 1000.0 + step, "step_ms_p50": 9.0, "step_ms_p95": 12.0, "memory_gb": 0.5, "lr": 0.1}
        lines.append({"step": step, "epoch": step // 50, "split": "train", "loss": 10 / step, **speed, **train})
        if step % 30 == 0:
            values = {"auroc": auroc + step / 10_000, "logloss": 0.4, "calibration": "undefined", "rows": 250}
            lines.append({"step": step, "epoch": step // 50, "split": "val", "headline": "auroc", **values})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 130, "spl')
    return path


def finish(path: Path, auroc: float = 0.71, **more: Any) -> None:
    """Add what a run has that was recorded on two hosts, resumed once, and is done."""
    for start in (0, 1):
        for rank in (0, 1):
            write_rank(path / f"trace/{start}", rank)
    tested = {"auroc": auroc, "logloss": 0.45, "rows": 250, "step": 120, "checkpoint": "checkpoints/step-00000120"}
    timing = {
        "verdict": VERDICT,
        "notes": ["n0: threads waited for a core 60 % of the time"],
        "ranks": [],
        "steps": 100,
    }
    (path / "results.json").write_text(json.dumps({"val": {}, "test": tested | more, "timing": timing}))
    host = {"name": "n0", "cpu": "Fast <1>", "cores": 4, "memory_gb": 16.0, "kernel": "6.1", "ranks": [0], "gpus": []}
    facts = {"recmill": "0.1.0", "packages": {"torch": "2.13.0"}, "world_size": 2, "git_commit": "0123abcd"}
    facts |= {"hosts": [host, host | {"name": "n1", "ranks": [1]}], "variables": {"OMP_NUM_THREADS": "1"}}
    (path / "env.json").write_text(json.dumps(facts))
    sizes = [
        {"table": f"table_{n}", "rows": 1000 * n, "dim": 8, "type": "row_wise", "store": "cached_ssd"} for n in (1, 2)
    ]
    tables = [size | {"bytes_by_rank": {"0": 1_000_000, "1": 3_000_000}} for size in sizes]
    (path / "sharding.json").write_text(json.dumps(tables))
