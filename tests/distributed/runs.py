"""What the tests of this folder read from run directories."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from recmill import prepare

Lines = list[dict[str, Any]]


def prepared_clicks(factory: pytest.TempPathFactory, tables: Iterable[int], rows: int = 900) -> Path:
    """Prepare uniform random clicks of three days, of which one is for validation and one for the test."""
    path = factory.mktemp("data") / "clicks"
    prepare("random-clicks", path, rows=rows, days=3, dense=2, tables=list(tables))
    return path


def metric_lines(run: Path) -> Lines:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def loss_by_step(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metric_lines(run) if line["split"] == "train"}


def losses(run: Path) -> list[float]:
    return list(loss_by_step(run).values())


def close_to(values: dict[str, Any], rel: float = 2e-5) -> dict[str, Any]:
    """Metrics whose numbers are equal up to rounding; the name of the checkpoint is the same."""
    return {name: value if isinstance(value, str) else pytest.approx(value, rel=rel) for name, value in values.items()}


OF_THIS_MACHINE = ("samples_per_s", "step_ms_p50", "step_ms_p95", "memory_gb")


def learned(run: Path) -> list[dict[str, Any]]:
    """Losses and metrics, without times and counters."""
    noise = ("time", *OF_THIS_MACHINE)
    return [
        {k: v for k, v in line.items() if k not in noise and not k.startswith(("store_", "dynamic_rows"))}
        for line in metric_lines(run)
    ]


def assert_same_run(one: Path, other: Path) -> None:
    """Every logged loss and metric, step by step; speeds differ, of course."""
    ours, theirs = metric_lines(one), metric_lines(other)
    assert [(a["step"], a["split"]) for a in ours] == [(b["step"], b["split"]) for b in theirs]
    for a, b in zip(ours, theirs, strict=True):
        numbers = [name for name, value in a.items() if isinstance(value, float) and name not in OF_THIS_MACHINE]
        assert numbers
        assert [a[n] for n in numbers] == pytest.approx([b[n] for n in numbers], rel=2e-5), f"step {a['step']}"
