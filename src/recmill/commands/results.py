"""`recmill results`: what runs have reached, beside the best that can be, and where their files are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill.commands.assemble import open_run
from recmill.data.opening import open_dataset
from recmill.errors import CheckpointError, DataError, UserError


@dataclass(frozen=True)
class RunReport:
    run: str
    model: str
    state: str  # of status.json
    values: dict[str, Any]
    best: dict[str, float]  # known for synthetic data alone


def results(*runs: str | Path, split: str = "test") -> list[RunReport]:
    return [_reached(run, split) for run in runs]


def _reached(path: str | Path, split: str) -> RunReport:
    run, config = open_run(path)
    state = run.read_status().get("state", "unknown")
    if not run.results_file.is_file():
        raise UserError(
            f"{run.path}: no results yet (the run is {state}). "
            f"Train to the end: recmill train {run.config_file} --run {path}."
        )
    values = run.read_results().get(split)
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{run.results_file}: no metrics of split '{split}'. Remove it and train again to write it anew."
        )
    return RunReport(str(path), config.model_name, state, values, best_reachable(config.settings.data.path, split))


def best_of_run(run: str | Path, split: str) -> dict[str, float]:
    _, config = open_run(run)
    return best_reachable(config.settings.data.path, split)


def best_reachable(data: str, split: str) -> dict[str, float]:
    """Empty where it is not known, or where the dataset is no longer there."""
    try:
        return open_dataset(data).description.truth.get(split, {})
    except DataError:
        return {}
