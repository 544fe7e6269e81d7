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
    return RunReport(str(path), config.model_name, state, values, best_of_run(path, split))


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
