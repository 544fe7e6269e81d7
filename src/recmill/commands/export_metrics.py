"""`recmill export-metrics`: what a run has reported, as a CSV file or for TensorBoard, Weights & Biases or MLflow."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from recmill.commands.history import history
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import flag, imported
from recmill.config import flat, read_toml
from recmill.config.options import given_path
from recmill.config.sections import Section
from recmill.errors import ConfigError
from recmill.files.atomic import new_file
from recmill.observe.run_dir import RunDirectory
from recmill.observe.tensorboard import EventFile, scalars

Target = Literal["csv", "tensorboard", "wandb", "mlflow"]
_PROJECT = "recmill"
_AT_ONCE = 100  # params that MLflow takes in one call; it takes 1000 metrics


class Options(Section):
    to: Target = flag(..., "Format to export to.")
    output: str | None = flag(
        None,
        "File or directory to write.  [default: metrics.csv, tensorboard/, wandb/ or mlflow.db in RUN]",
        metavar="PATH",
    )


@checked_keywords
def export_metrics(run: str | Path, *, to: Target, output: str | Path | None = None) -> Path:
    """Write the metrics of `run` for another tool, and return what was written."""
    directory = RunDirectory(given_path(run, "RUN"))
    frame = history(run)  # raises if there is nothing to export
    names = {"csv": "metrics.csv", "tensorboard": directory.tensorboard.name, "wandb": "", "mlflow": "mlflow.db"}
    path = given_path(output, "--output") if output is not None else directory.path / names[to]
    if to == "tensorboard" and output is None and _config(directory).get("observe.tensorboard"):
        raise ConfigError(f"{path}: the run writes it itself (observe.tensorboard). Choose another --output.")
    lines = [line for line in directory.read_metrics() if {"split", "time"} <= line.keys()]
    if to == "csv":
        with new_file(path.absolute()) as partial:
            frame.write_csv(partial)
    elif to == "tensorboard":
        EventFile(path).begin(lines)
    elif to == "wandb":
        return _to_wandb(directory, lines, path)
    else:
        _to_mlflow(directory, lines, path)
    return path


def _to_wandb(run: RunDirectory, lines: list[dict[str, Any]], path: Path) -> Path:
    """Write an offline run into `path`, and return its directory.

    Test metrics go to the summary, since their step may be an earlier one.
    """
    wandb = imported("wandb", "This export needs wandb", "wandb")
    path.mkdir(parents=True, exist_ok=True)
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if line["split"] != "test":
            by_step.setdefault(line["step"], {}).update(scalars(line))
    logged = wandb.init(
        project=_PROJECT,
        id=_identity(run, lines),
        name=run.path.absolute().name,
        config=_config(run),
        dir=path,
        mode="offline",
        settings=wandb.Settings(console="off", silent=True, root_dir=str(path), x_disable_stats=True),
    )
    for step, values in sorted(by_step.items()):
        logged.log(values, step=step)
    for line in lines:
        if line["split"] == "test":
            logged.summary.update(scalars(line))
    written = Path(logged.dir).parent
    logged.finish()
    return written


def _to_mlflow(run: RunDirectory, lines: list[dict[str, Any]], path: Path) -> None:
    """Add a run to a SQLite database of MLflow; it replaces an earlier export of the same run."""
    # The small package mlflow-skinny comes without sqlalchemy.
    modules = ("mlflow.entities", "mlflow.tracking", "sqlalchemy")
    entities, tracking, _ = (imported(module, "This export needs mlflow", "mlflow") for module in modules)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{path.absolute()}")
    known = client.get_experiment_by_name(_PROJECT)
    experiment = known.experiment_id if known else client.create_experiment(_PROJECT)
    identity = _identity(run, lines)
    earlier = client.search_runs([experiment], f"tags.recmill_run = '{identity}'")
    times = [round(1000 * line["time"]) for line in lines]
    name = run.path.absolute().name
    new = client.create_run(experiment, min(times), {"recmill_run": identity}, name).info.run_id
    params = [entities.Param(key, str(value)) for key, value in _config(run).items()]
    for first in range(0, len(params), _AT_ONCE):
        client.log_batch(new, params=params[first : first + _AT_ONCE])
    for line, at in zip(lines, times, strict=True):
        # MLflow's names have no "@".
        metrics = {tag.replace("@", "_at_"): value for tag, value in scalars(line).items()}
        client.log_batch(new, [entities.Metric(tag, value, at, line["step"]) for tag, value in metrics.items()])
    client.set_terminated(new, end_time=max(times))
    for old in earlier:
        client.delete_run(old.info.run_id)


def _identity(run: RunDirectory, lines: list[dict[str, Any]]) -> str:
    """Return a name that an export of the same run at a later time has, too."""
    return hashlib.sha256(f"{run.path.absolute()} {lines[0]['time']}".encode()).hexdigest()[:16]


def _config(run: RunDirectory) -> dict[str, Any]:
    return flat(read_toml(run.config_file)) if run.config_file.is_file() else {}
