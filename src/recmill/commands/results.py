"""`recmill results`: the metrics that runs have reached, beside the best that their data allows."""

from dataclasses import dataclass
from pathlib import Path

from recmill.commands.assemble import open_run
from recmill.data.opening import open_dataset
from recmill.errors import CheckpointError, DataError, UserError
from recmill.metrics.binary import Values
from recmill.observe.run_dir import RunDirectory


@dataclass(frozen=True)
class RunReport:
    run: str
    model: str
    state: str  # as in status.json
    values: Values
    best: dict[str, float]  # the best reachable values, known only for synthetic data
    step: int | None  # of the checkpoint that was tested; None: results of an earlier version
    checkpoint: str  # its path in the run directory


def results(*runs: str | Path, split: str = "test") -> list[RunReport]:
    return [_report(run, split) for run in runs]


def _report(path: str | Path, split: str) -> RunReport:
    run, config = open_run(path)
    state = run.read_status().get("state", "unknown")
    if not run.results_file.is_file():
        raise UserError(
            f"{run.path}: no results yet (the run is {state}). "
            f"Train to the end: recmill train {run.config_file} --run {path}."
        )
    values = values_of_split(run, run.read_results(), split)
    return run_report(path, config.model_name, state, values, best_of_run(path, split))


def run_report(run: str | Path, model: str, state: str, values: Values, best: dict[str, float]) -> RunReport:
    """Return the report of a run whose `values` also name the checkpoint."""
    metrics = {name: value for name, value in values.items() if name not in ("step", "checkpoint")}
    step = values.get("step")
    checkpoint = str(values.get("checkpoint", ""))
    return RunReport(str(run), model, state, metrics, best, step if isinstance(step, int) else None, checkpoint)


def values_of_split(run: RunDirectory, results: dict[str, Values], split: str) -> Values:
    values = results.get(split)
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{run.results_file}: no metrics of split '{split}'. Remove it and train again to write a new one."
        )
    return values


def best_of_run(run: str | Path, split: str) -> dict[str, float]:
    """Return the best metrics that the run's data allows; empty if they are unknown."""
    _, config = open_run(run)
    try:
        return open_dataset(config.settings.data.path).description.truth.get(split, {})
    except DataError:  # the dataset is no longer there
        return {}
