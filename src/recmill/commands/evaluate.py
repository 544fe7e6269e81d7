"""`recmill evaluate`: the metrics of a run's best or newest checkpoint. Changes nothing in the run directory."""

import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Procs, Verify, Which, dataset_checks, flag, new_parquet
from recmill.config import Config
from recmill.config.load import metric_problems
from recmill.config.options import checked_options
from recmill.config.sections import PROTOCOLS, DenseOptim, OptimSection, Section, TablesOptim, is_protocol
from recmill.data.frames import Kind, converted
from recmill.data.names import Names
from recmill.environment import process_environment
from recmill.errors import ConfigError
from recmill.files.atomic import new_file
from recmill.launch.local import is_launched_with, run_job
from recmill.metrics.binary import Values
from recmill.metrics.own import Metrics
from recmill.metrics.ranking import MAX_RESAMPLES, RankingMetrics
from recmill.observe.run_dir import RunDirectory
from recmill.schema import Dataset
from recmill.tables.libraries import import_libraries

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from recmill.data.frames import AnyFrame
    from recmill.data.histories import HistorySource
    from recmill.world import World

log = logging.getLogger(__name__)

Split = Literal["val", "test"]


class Options(Section):
    split: Split = flag("test", "What to evaluate on.")
    checkpoint: Which = None
    fallback: Fallback = False
    protocols: list[str] | None = flag(
        None, "How sequence models rank targets: full, pop<N>, uni<N>, with commas.  [default: the run's]", "--protocol"
    )
    ks: list[int] | None = flag(None, "Cut-offs of ranking metrics, like 1,5,10.  [default: the run's]", "--k")
    metrics: list[str] | None = flag(
        None, "Further metrics, with commas: modules like my_package.accuracy.  [default: the run's]"
    )
    bootstrap: int = flag(0, "95 % intervals, from N resamples of the users or rows.", metavar="N")
    procs: Procs = 1
    verify: Verify = None
    per_user_file: str | None = flag(
        None, "Parquet file to write: user, item, and the item's rank by protocol.", "--per-user", metavar="FILE"
    )


class EvaluateOptions(TypedDict, total=False):
    """The fields of `Options`, for type checkers."""

    split: Split
    checkpoint: Literal["newest", "best"] | None
    fallback: bool
    protocols: list[str] | None
    ks: int | list[int] | None
    metrics: list[str] | None
    bootstrap: int
    procs: int
    verify: bool | None
    per_user_file: str | None


@overload
def evaluate(run: str | Path, *, per_user: Literal[False] = False, **options: Unpack[EvaluateOptions]) -> Metrics: ...
@overload
def evaluate(
    run: str | Path,
    *,
    per_user: Literal[True],
    frame: Literal["polars"] = "polars",
    **options: Unpack[EvaluateOptions],
) -> "pl.DataFrame": ...
@overload
def evaluate(
    run: str | Path, *, per_user: Literal[True], frame: Literal["pandas"], **options: Unpack[EvaluateOptions]
) -> "pd.DataFrame": ...
@overload
def evaluate(
    run: str | Path, *, per_user: Literal[True], frame: Literal["arrow"], **options: Unpack[EvaluateOptions]
) -> "pa.Table": ...
@checked_keywords
def evaluate(
    run: str | Path, *, per_user: bool = False, frame: Kind = "polars", **options: Unpack[EvaluateOptions]
) -> "Metrics | AnyFrame":
    """Return {"auroc": 0.79, "logloss": ...}, the same values for any number of processes, and which checkpoint it was.

    The checkpoint is named by "step" and "checkpoint", its path in the run directory. By default it is the one that
    training tested: the best by validation with checkpoint.keep_best, otherwise the newest.

    Options are those of `recmill evaluate --help`, with underscores: evaluate("runs/dlrm", split="val", procs=2);
    `protocols` is a list, `ks` a list or a number. Sequence models have "popularity/full/ndcg@10", ... as well: what
    ranking by popularity reaches. `bootstrap=N` adds 95 % intervals, from "low/auroc" to "high/auroc".

    With `per_user`, sequence models return a frame ("polars", "pandas" or "arrow") instead: one row per user, with the
    held-out item, and "full/rank", ...: its rank by protocol, from 1.
    """
    if per_user:
        return _per_user(run, frame, options)
    if isinstance(ks := options.get("ks"), int):
        options = {**options, "ks": [ks]}
    checked = checked_options("evaluate", Options, dict(options))
    directory, config = assemble.open_trained_run(run)
    if process_environment().rank == 0:
        log.info("evaluating %s on split %s", run, checked.split)
    dataset = assemble.open_matching_dataset(config, dataset_checks(checked.verify))
    _check_metrics(config, dataset, checked)
    for problem in metric_problems(checked.metrics or [], assemble.model_module(config).TASK):
        raise ConfigError(f"--metrics: {problem}")
    if checked.per_user_file:
        checked = checked.model_copy(update={"per_user_file": str(new_parquet(checked.per_user_file, "--per-user"))})
    section = config.settings.train
    if is_launched_with(checked.procs):
        import_libraries(in_own_process=True)
        from recmill.world import joined_world

        with joined_world(section.device, section.join_seconds) as world:
            return Metrics(_evaluate(world, directory, config, dataset, checked))
    arguments = {
        "device": section.device,
        "join_seconds": section.join_seconds,
        "run": str(directory.path.absolute()),
        "options": checked.model_dump(),
    }
    return Metrics(run_job("evaluate", arguments, checked.procs))


def _per_user(run: str | Path, frame: Kind, options: EvaluateOptions) -> "AnyFrame":
    import polars as pl

    if process_environment().is_launched:
        raise ConfigError("per_user=True is for a program of one process. Use per_user_file under a launcher.")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "users.parquet"
        options["per_user_file"] = str(file)
        evaluate(run, **options)
        return converted(pl.read_parquet(file, glob=False), frame)


def _check_metrics(config: Config, dataset: Dataset, options: Options) -> None:
    """Raise ConfigError if the run's model cannot be evaluated as the options say."""
    if not 0 <= options.bootstrap <= MAX_RESAMPLES:
        raise ConfigError(
            f"--bootstrap {options.bootstrap}: give 1 to {MAX_RESAMPLES:,} resamples, or 0 for no intervals."
        )
    if dataset.description.kind != "histories":
        if options.bootstrap and dataset.clicks.weights:
            raise ConfigError("--bootstrap: rows with weights have no intervals. Leave it out.")
        ranking: dict[str, Any] = {"protocol": options.protocols, "per-user": options.per_user_file}
        if assemble.model_module(config).TASK == "ctr":
            ranking["k"] = options.ks
        for name, value in ranking.items():
            if value:
                raise ConfigError(f"--{name} is for sequence models, and '{config.model_name}' is none. Leave it out.")
        return
    for protocol in options.protocols or []:
        if not is_protocol(protocol):
            raise ConfigError(f"--protocol '{protocol}': give {PROTOCOLS}.")
    for k in options.ks or []:
        if not 1 <= k <= dataset.description.num_items:
            raise ConfigError(f"--k {k}: give cut-offs of 1 to {dataset.description.num_items}, the number of items.")


def work(world: "World", run: str, options: dict[str, Any]) -> Values:
    """Evaluate in one of the launcher's processes."""
    directory, config = assemble.open_trained_run(run)
    return _evaluate(world, directory, config, assemble.open_matching_dataset(config), Options(**options))


def _evaluate(world: "World", run: RunDirectory, config: Config, dataset: Dataset, options: Options) -> Values:
    from recmill.checkpoints.loading import load
    from recmill.data.histories import HistorySource
    from recmill.launch.watchdog import Heartbeat
    from recmill.training.evaluate import evaluate_split
    from recmill.training.parts import Parts
    from recmill.training.precision import set_tf32

    set_tf32(config.settings.train)
    ranking = {"protocols": options.protocols, "ks": options.ks, "metrics": options.metrics}
    section = config.settings.eval.model_copy(update={key: value for key, value in ranking.items() if value})
    with assemble.trained_checkpoint(run, options.checkpoint, config, dataset, world, options.fallback) as found:
        # No optimizer state is needed.
        stateless = OptimSection(dense=DenseOptim(name="sgd"), tables=TablesOptim(name="sgd"))
        config = replace(config, settings=config.settings.model_copy(update={"eval": section, "optim": stateless}))
        source = assemble.build_source(config, dataset, world.rank, world.size)
        model = assemble.build_sharded(config, dataset, world, run.path)
        load(found, model)
    parts = Parts(model, assemble.task_module(config), source, world, config.settings.data.prefetch, Heartbeat())
    metrics = assemble.new_metrics(config, source, with_popularity=True, resamples=options.bootstrap)
    if isinstance(metrics, RankingMetrics):
        metrics.keeps_ranks = options.per_user_file is not None
    values = evaluate_split(parts, options.split, metrics) | assemble.named_in_results(found.position.step)
    if options.per_user_file:
        assert isinstance(source, HistorySource) and isinstance(metrics, RankingMetrics)
        _write_users(Path(options.per_user_file), source, metrics, options.split, world)
    return values


def _write_users(file: Path, source: "HistorySource", metrics: RankingMetrics, split: str, world: "World") -> None:
    """Write the rank of every user's target on rank 0. All ranks take part."""
    import numpy as np
    import polars as pl

    parts = world.gather((*source.targets(split), metrics.all_ranks()))
    if parts is None:
        return
    users, items = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
    ranks = {name: np.concatenate([part[2][name] for part in parts]) + 1 for name in metrics.protocols}
    names = {what: Names(source.path / f"{what}s.parquet", what).originals for what in ("user", "item")}
    frame = pl.DataFrame(
        {
            "user": names["user"].gather(users).cast(str),
            "item": names["item"].gather(items - 1).cast(str),
            **{f"{name}/rank": values for name, values in ranks.items()},
        }
    )
    with new_file(file) as partial:
        frame[np.argsort(users)].write_parquet(partial)
