"""`recmill results`: what runs have reached, side by side, whether they are done, running, stopped or failed."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from recmill.commands import assemble
from recmill.commands.history import number
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Runs, listed
from recmill.config import load_config, read_settings
from recmill.config.options import given_path
from recmill.data.frames import Kind, converted
from recmill.data.names import Names
from recmill.data.opening import open_dataset
from recmill.data.recipes import has_recipe
from recmill.errors import CheckpointError, DataError
from recmill.metrics.binary import Values
from recmill.observe.run_dir import RunDirectory

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.data.frames import AnyFrame


@dataclass(frozen=True)
class RunReport:
    run: str
    state: str  # of status.json, or lost: it ended without writing how
    reason: str = ""  # the error or the signal
    model: str = ""
    dataset: str = ""  # its path
    fingerprint: str = ""  # of the dataset; of a run that is not done it is not known
    started_from: str = ""  # the run and step of --init-from
    step: int = 0  # how far training got
    metric: str = ""  # the headline metric of validation, which chooses the best step
    best_step: int | None = None
    best_value: float | None = None
    tested_step: int | None = None  # None: results of an earlier version
    checkpoint: str = ""  # the tested one, in the run directory
    seconds: float | None = None
    samples_per_s: float | None = None
    verdict: str = ""  # what limits the speed
    values: Values = field(default_factory=dict)  # of the test split
    popularity: dict[str, float] = field(default_factory=dict)  # the baseline's
    reachable: dict[str, float] = field(default_factory=dict)  # the best that any model can reach; of synthetic data

    def has_data_of(self, other: "RunReport") -> bool:
        """Return whether both runs are of one dataset, wherever it is, as far as that is known."""
        mine, theirs = self.fingerprint, other.fingerprint
        if not (mine and theirs):
            mine, theirs = self.dataset, other.dataset
        return mine == theirs or not (mine and theirs)


@overload
def results(*runs: Runs, frame: Literal["polars"] = "polars") -> "pl.DataFrame": ...
@overload
def results(*runs: Runs, frame: Literal["pandas"]) -> "pd.DataFrame": ...
@overload
def results(*runs: Runs, frame: Literal["arrow"]) -> "pa.Table": ...
@checked_keywords
def results(*runs: Runs, frame: Kind = "polars") -> "AnyFrame":
    """Return one row per run: state, model, best step, test metrics, what popularity reaches and what is reachable.

    `runs`: paths, or lists of them. `frame`: "polars", "pandas" or "arrow".
    """
    import polars as pl

    rows = []
    for report in map(run_report, listed(runs)):
        facts = asdict(report)
        groups = [("", facts.pop("values")), *((f"{name}/", facts.pop(name)) for name in ("popularity", "reachable"))]
        metrics = {f"{prefix}{name}": number(value) for prefix, values in groups for name, value in values.items()}
        rows.append(facts | metrics)
    return converted(pl.DataFrame(rows, infer_schema_length=None), frame)


def deltas(reports: Sequence[RunReport]) -> list[dict[str, float]]:
    """Return by how much each run differs from the first one of its dataset."""
    firsts = [next((first for first in reports if report.has_data_of(first)), report) for report in reports]
    return [
        {
            name: value - before
            for name, value in report.values.items()
            if isinstance(value, float) and isinstance(before := first.values.get(name), float)
        }
        if report is not first
        else {}
        for report, first in zip(reports, firsts, strict=True)
    ]


def run_report(path: str | Path) -> RunReport:
    """Read how a run ended, or how far it is, and its test metrics if it is done."""
    run = RunDirectory(given_path(path, "RUN"))
    if not run.status_file.is_file():
        run = assemble.open_directory(path)
    status = run.read_status()
    state = str(status.get("state", "unknown"))
    facts: dict[str, Any] = {"reason": str(status.get("reason") or ""), "seconds": number(status.get("seconds"))}
    facts["fingerprint"] = str(status.get("dataset") or "")
    facts |= _progress(run)
    if started := run.started_from():
        start = Path(str(started.get("run")))
        start = start.relative_to(Path.cwd()) if start.is_relative_to(Path.cwd()) else start
        facts["started_from"] = f"{start}, step {started.get('step')}"
    if run.config_file.is_file():  # a run that failed very early has none
        name, settings = read_settings(run.config_file)
        facts |= {"model": name, "dataset": settings.data.path}
    if state == "done":
        facts |= _tested(run, path)
    elif state == "running" and run.has_lost_its_process():
        state = "lost"
    return RunReport(str(path), state, **facts)


def _progress(run: RunDirectory) -> dict[str, Any]:
    """Return the last step, the speed, and the best validation so far by the metric that the last one names."""
    step, metric, reports, seconds_per_sample = run.saved_step(), "", 0, 0.0
    best: dict[str, tuple[float, int]] = {}  # value and negative step: of equal values the earliest
    for line in run.metrics():
        step = max(step, line["step"])
        if (speed := number(line.get("samples_per_s"))) and speed > 0:
            reports, seconds_per_sample = reports + 1, seconds_per_sample + 1 / speed
        if line.get("split") == "val" and isinstance(line.get("headline"), str):
            metric = line["headline"]
            for name, value in line.items():
                if (found := number(value)) is not None:
                    best[name] = max(best.get(name, (found, -line["step"])), (found, -line["step"]))
    facts: dict[str, Any] = {"step": step, "metric": metric}
    if seconds_per_sample:
        facts["samples_per_s"] = reports / seconds_per_sample  # the harmonic mean
    if metric in best:
        facts |= {"best_value": best[metric][0], "best_step": -best[metric][1]}
    return facts


def _tested(run: RunDirectory, path: str | Path) -> dict[str, Any]:
    if not run.results_file.is_file():
        raise CheckpointError(
            f"{run.results_file}: missing, though the run is done. Test it again: recmill evaluate {path}."
        )
    results = run.read_results()
    tested = results.get("test", {} if not read_settings(run.config_file)[1].eval.test else None)
    if not isinstance(tested, dict):
        raise CheckpointError(
            f"{run.results_file}: no metrics of split 'test'. Remove it and train again to write a new one."
        )
    step = tested.get("step")
    values = {name: value for name, value in tested.items() if name not in ("step", "checkpoint")}
    popularity = {name: values.pop(name) for name in list(values) if name.startswith("popularity/")}
    timing = results.get("timing")
    return {
        "verdict": str(timing.get("verdict", "")) if isinstance(timing, dict) else "",
        "tested_step": step if isinstance(step, int) else None,
        "checkpoint": str(tested.get("checkpoint", "")),
        "values": values,
        "popularity": {name.removeprefix("popularity/"): value for name, value in popularity.items()},
        "reachable": best_of_run(path, "test"),
    }


def best_of_run(run: str | Path, split: str) -> dict[str, float]:
    """Return the best metrics that the run's data allows; empty if they are unknown."""
    directory = assemble.open_directory(run)
    _, settings = read_settings(directory.config_file)
    try:
        dataset = open_dataset(settings.data.path)
    except DataError:  # the dataset is no longer there
        return {}
    is_same = directory.read_status().get("dataset") in (None, dataset.fingerprint)  # it may have been prepared anew
    return dataset.description.truth.get(split, {}) if is_same else {}


def next_command(run: str | Path) -> str:
    """Return what to try next with a run that is done: recommendations for a user, scores, or a report."""
    config = load_config(RunDirectory(run).config_file)
    if assemble.model_module(config).KIND == "histories":
        users = Names(Path(config.settings.data.path) / "users.parquet", "user").originals
        return shlex.join(["recmill", "recommend", str(run), "--users", str(users[0])])
    if has_recipe(Path(run)):
        return shlex.join(["recmill", "predict", str(run), "--input", "new.csv", "--output", "scores.parquet"])
    return shlex.join(["recmill", "report", str(run)])
