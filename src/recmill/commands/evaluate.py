"""`recmill evaluate`: the metrics of a run's newest or best checkpoint. Changes nothing in a run directory."""

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
from recmill.errors import CheckpointError, ConfigError
from recmill.launch.local import is_launched_with, run_job

if TYPE_CHECKING:
    from recmill.world import World

Split = Literal["val", "test"]
Which = Literal["newest", "best"]


def evaluate(
    run: str | Path, *, split: Split = "test", procs: int = 1, verify: bool = False, checkpoint: Which = "newest"
) -> dict[str, Any]:
    """{"auroc": 0.79, "logloss": ...}: the same values for any number of processes.

    `checkpoint`: the newest, or the one that was best in validation (with checkpoint.keep_best).
    """
    if checkpoint not in ("newest", "best"):
        raise ConfigError(f"checkpoint '{checkpoint}': evaluate the 'newest' or the 'best'.")
    if split not in ("val", "test"):
        raise ConfigError(f"split '{split}': evaluate 'val' or 'test'.")
    directory, config = open_trained_run(run)
    open_matching_dataset(config, "digests" if verify else "sizes")
    arguments = {"run": str(directory.path.absolute()), "split": split, "which": checkpoint}
    if is_launched_with(procs):
        from recmill.world import joined_world

        with joined_world(config.run.train.device) as world:
            return work(world, **arguments)
    return run_job("evaluate", {"device": config.run.train.device, **arguments}, procs)


def work(world: "World", run: str, split: str, which: str) -> dict[str, Any]:
    """What each process does."""
    from recmill.training import checkpoint
    from recmill.training.evaluate import evaluate_split

    directory, config = open_trained_run(run)
    dataset = open_matching_dataset(config)
    found = checkpoint.found_for_all(directory.checkpoints, which, world)
    if found is None:
        raise CheckpointError(
            f"{run}: no {which} checkpoint. Only a run with checkpoint.keep_best = true keeps the best one; "
            "evaluate the newest."
        )
    check_same_data(found, dataset)
    model = build_sharded(config, dataset, world)
    checkpoint.load(found, model)
    source = build_source(config, dataset, world.rank, world.size)
    return evaluate_split(model, task_module(config), source, split, config.run, world)
