"""`recmill evaluate`: the metrics of a run's newest or best checkpoint. Changes nothing in a run directory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from recmill import registry
from recmill.commands.assemble import (
    build_sharded,
    build_source,
    check_which,
    model_module,
    open_matching_dataset,
    open_trained_run,
    task_module,
    trained_checkpoint,
)
from recmill.commands.options import Fallback, Procs, Verify, Which
from recmill.config import Config
from recmill.config.sections import RankingProtocol, Section
from recmill.errors import ConfigError
from recmill.launch.local import is_launched_with, run_job
from recmill.schema import Dataset

if TYPE_CHECKING:
    from recmill.world import World

Split = Literal["val", "test"]


class Options(Section):
    """The flags of `recmill evaluate RUN`."""

    split: Split = Field("test", description="What to evaluate on.")
    checkpoint: Which = "newest"
    fallback: Fallback = False
    protocols: list[str] | None = Field(
        None,
        description="How sequence models rank targets: full, pop100, uni100, with commas.  [default: the run's]",
        json_schema_extra={"flags": ["--protocol"]},
    )
    ks: list[int] | None = Field(
        None,
        description="Cut-offs of ranking metrics, like 1,5,10.  [default: the run's]",
        json_schema_extra={"flags": ["--k"]},
    )
    bootstrap: int = Field(
        0,
        description="95 % intervals of ranking metrics, from N resamples of the users.",
        json_schema_extra={"metavar": "N"},
    )
    procs: Procs = 1
    verify: Verify = False


def evaluate(
    run: str | Path,
    *,
    split: Split = "test",
    procs: int = 1,
    verify: bool = False,
    checkpoint: Which = "newest",
    fallback: bool = False,
    protocols: Sequence[str] | None = None,
    ks: Sequence[int] | None = None,
    bootstrap: int = 0,
) -> dict[str, Any]:
    """{"auroc": 0.79, "logloss": ...}: the same values for any number of processes.

    `checkpoint`: the newest, or the one that was best in validation (with checkpoint.keep_best); `fallback`: if the
    newest is damaged, the newest that is not. Sequence models have
    "popularity/full/ndcg@10", ... as well: what ranking by popularity reaches. `protocols` and `ks` replace the run's;
    `bootstrap`: so many resamples of the users make 95 % intervals, from "low/full/ndcg@10" to "high/full/ndcg@10".
    """
    check_which(checkpoint)
    if split not in ("val", "test"):
        raise ConfigError(f"split '{split}': evaluate 'val' or 'test'.")
    directory, config = open_trained_run(run)
    dataset = open_matching_dataset(config, "digests" if verify else "sizes")
    ranking = _checked_ranking(protocols, ks, bootstrap, config, dataset)
    arguments: dict[str, Any] = {
        "run": str(directory.path.absolute()),
        "split": split,
        "which": checkpoint,
        "fallback": fallback,
        "ranking": ranking,
    }
    if is_launched_with(procs):
        from recmill.world import joined_world

        with joined_world(config.settings.train.device) as world:
            return work(world, **arguments)
    return run_job("evaluate", {"device": config.settings.train.device, **arguments}, procs)


def _checked_ranking(
    protocols: Sequence[str] | None, ks: Sequence[int] | None, bootstrap: int, config: Config, dataset: Dataset
) -> dict[str, Any]:
    """What of the run's [eval] section is replaced, and the number of resamples."""
    if dataset.description.kind != "histories":
        for flag, value in (("--protocol", protocols), ("--k", ks), ("--bootstrap", bootstrap)):
            if value:
                raise ConfigError(f"{flag} is for sequence models, and '{config.model_name}' is none. Leave it out.")
        return {"eval": {}, "resamples": 0}
    known = get_args(RankingProtocol)
    for protocol in protocols or []:
        if protocol not in known:
            raise ConfigError(f"--protocol: {registry.unknown('protocol', protocol, known)}")
    for k in ks or []:
        if not 1 <= k <= dataset.description.num_items:
            raise ConfigError(f"--k {k}: give cut-offs of 1 to {dataset.description.num_items}, the number of items.")
    if bootstrap < 0:
        raise ConfigError(f"--bootstrap {bootstrap}: give 1 or more resamples, or 0 for no intervals.")
    asked_for = {"protocols": protocols and list(protocols), "ks": ks and [int(k) for k in ks]}
    return {"eval": {key: value for key, value in asked_for.items() if value}, "resamples": bootstrap}


def work(world: "World", run: str, split: str, which: str, fallback: bool, ranking: dict[str, Any]) -> dict[str, Any]:
    """What each process does."""
    from recmill.checkpoints import loading as checkpoint
    from recmill.training.evaluate import evaluate_split

    directory, config = open_trained_run(run)
    dataset = open_matching_dataset(config)
    found = trained_checkpoint(directory, which, dataset, world, fallback)
    section = config.settings.eval.model_copy(update=ranking["eval"])
    config = replace(config, settings=config.settings.model_copy(update={"eval": section}))
    source = build_source(config, dataset, world.rank, world.size)
    model = build_sharded(config, dataset, world)
    checkpoint.load(found, model)
    task, extras = task_module(config), {}
    if model_module(config).KIND == "histories":
        extras = {"resamples": ranking["resamples"], "train_counts": source.train_counts()}
    metrics = task.new_metrics(section, **extras)
    return evaluate_split(model, task, source, split, metrics, config.settings, world)
