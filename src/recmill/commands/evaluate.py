"""`recmill evaluate`: the metrics of a run's newest checkpoint on a split. Changes nothing in the run directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recmill.commands.assemble import (
    build_sharded,
    build_source,
    check_same_data,
    open_matching_dataset,
    open_trained_run,
    task_module,
)
from recmill.errors import ConfigError
from recmill.launch.local import is_launched_with, run_job

if TYPE_CHECKING:
    from recmill.world import World

Split = Literal["val", "test"]


def evaluate(run: str | Path, *, split: Split = "test", procs: int = 1, verify: bool = False) -> dict[str, Any]:
    """{"auroc": 0.79, "logloss": ...}: the same values for any number of processes."""
    if split not in ("val", "test"):
        raise ConfigError(f"split '{split}': evaluate 'val' or 'test'.")
    directory, config = open_trained_run(run)
    open_matching_dataset(config, "digests" if verify else "sizes")
    arguments = {"run": str(directory.path.absolute()), "split": split}
    if is_launched_with(procs):
        from recmill.world import joined_world

        with joined_world(config.run.train.device) as world:
            return work(world, **arguments)
    return run_job("evaluate", {"device": config.run.train.device, **arguments}, procs)


def work(world: "World", run: str, split: str) -> dict[str, Any]:
    """What each process does."""
    from recmill.training import checkpoint
    from recmill.training.evaluate import evaluate_split

    directory, config = open_trained_run(run)
    dataset = open_matching_dataset(config)
    found = checkpoint.newest_for_all(directory.checkpoints, world)
    assert found is not None  # the parent looked
    check_same_data(found, dataset)
    model = build_sharded(config, dataset, world)
    checkpoint.load(found, model)
    source = build_source(config, dataset, world.rank, world.size)
    return evaluate_split(model, task_module(config), source, split, config.run.eval, world)
