"""Open and build, from a config, the parts that train, evaluate and recommend work with."""

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from recmill import registry
from recmill.checkpoints.choosing import best_path, lost_error
from recmill.checkpoints.format import committed, step_of, step_path
from recmill.config import Config, fingerprint, load_config
from recmill.config.options import given_path
from recmill.config.sections import ALL_TABLES, DYNAMIC_ON_CUDA, SSD_ON_CUDA, DynamicTable
from recmill.config.suggested import own_config, resuming_command, training_command
from recmill.data.opening import Checks, open_dataset
from recmill.data.windows import WindowRules
from recmill.errors import CheckpointError, ConfigError, DataError, ResourceError, UserError, did_you_mean_path
from recmill.hardware.memory import memory_bytes
from recmill.launch import early
from recmill.metrics.binary import Values
from recmill.observe.log import quiet_libraries
from recmill.observe.progress import spinner
from recmill.observe.run_dir import RunDirectory
from recmill.protocols import Metrics, ModelModule, SequenceModelModule, TaskModule
from recmill.schema import SPLITS, ClicksDescription, Dataset, Description
from recmill.tables.libraries import import_libraries
from recmill.tables.spec import Dynamic, Stores, TableSpec

if TYPE_CHECKING:
    from torch import nn

    from recmill.checkpoints.format import Checkpoint
    from recmill.data.clicks import ClickSource
    from recmill.data.histories import HistorySource
    from recmill.data.multi_hot import MultiHot
    from recmill.data.share import Batching
    from recmill.tables.placement import Catalogue, Request
    from recmill.tables.sharding import DistributedModelParallel
    from recmill.world import World

log = logging.getLogger(__name__)

_NOMINAL_ROWS = 2**20


def model_module(config: Config) -> ModelModule:
    return cast(ModelModule, registry.load(registry.MODELS, config.model_name, "model"))


def task_module(config: Config) -> TaskModule:
    return cast(TaskModule, registry.load(registry.TASKS, model_module(config).TASK, "task"))


def window_rules(config: Config) -> WindowRules:
    """Return how a sequence model cuts histories into windows."""
    return cast(SequenceModelModule, model_module(config)).window_rules(config.model)


def table_specs(config: Config, dataset: Dataset) -> list[TableSpec]:
    section = config.settings.tables
    specs = model_module(config).tables(config.model, model_description(config, dataset))
    rules = [section.dynamic_of(spec.name, *spec.features) for spec in specs]
    return [
        replace(spec, rows=found.max_rows, dynamic=Dynamic(**found.model_dump(exclude={"init_rows"})))
        if found
        else spec
        for spec, found in zip(specs, rules, strict=True)
    ]


def model_description(config: Config, dataset: Dataset) -> Description:
    """Return the description from which the model is made.

    Dynamic tables count as having init_rows or at most 2^20 rows, which determines their first values: max_rows may
    change.
    """
    description = dataset.description
    if description.kind != "clicks" or not config.settings.tables.dynamic:
        return description
    rules = dynamic_features(config, dataset)
    sparse = [
        f.model_copy(update={"rows": rules[f.name].init_rows or min(f.rows, _NOMINAL_ROWS)}) if f.name in rules else f
        for f in description.sparse
    ]
    return description.model_copy(update={"sparse": sparse})


def dynamic_features(config: Config, dataset: Dataset) -> dict[str, DynamicTable]:
    """Return the features whose tables are dynamic, with the rules of their table."""
    section = config.settings.tables
    specs = model_module(config).tables(config.model, dataset.description) if section.dynamic else []
    found = {name: section.dynamic_of(spec.name, *spec.features) for spec in specs for name in spec.features}
    return {name: rules for name, rules in found.items() if rules}


def open_matching_dataset(config: Config, verify: Checks = "sizes") -> Dataset:
    """Open the config's dataset and check that the model and the other sections fit it."""
    dataset = open_dataset(config.settings.data.path, verify)
    kind = model_module(config).KIND
    if dataset.description.kind != kind:
        raise ConfigError(
            f"model '{config.model_name}' learns from {kind}, but {dataset.path} holds {dataset.description.kind}. "
            "Change model.name or data.path."
        )
    if dataset.description.kind == "clicks":
        absent = [split for split in SPLITS if not dataset.description.splits.get(split)]
        if absent:
            raise DataError(
                f"{dataset.path} has no rows for {' and '.join(absent)}, and every run is validated and tested. "
                "Prepare it again with --last-day val-first or --val-fraction."
            )
        if config.settings.data.train_on_validation:
            raise ConfigError("'data.train_on_validation' is for histories, and these are clicks. Remove it.")
        _check_evaluation(config, dataset)
    _check_table_names(config, table_specs(config, dataset))
    if config.settings.data.multi_hot.sizes:
        _check_multi_hot(config, dataset)
    return dataset


def _check_evaluation(config: Config, dataset: Dataset) -> None:
    section, description = config.settings.eval, dataset.clicks
    if section.group and section.group not in description.keep:
        kept = f"it keeps {', '.join(description.keep)}" if description.keep else "it keeps none"
        raise ConfigError(
            f"'eval.group': {dataset.path} has no kept column '{section.group}'; {kept}. Name it in keep.columns of "
            "the schema, and prepare the dataset again."
        )
    if section.bootstrap and description.weights:
        raise ConfigError("'eval.bootstrap': rows with weights have no intervals. Remove it.")


def _check_multi_hot(config: Config, dataset: Dataset) -> None:
    section = config.settings.data.multi_hot
    description = dataset.description
    if description.kind != "clicks":
        raise ConfigError("'data.multi_hot.sizes' is for clicks, and these are histories. Remove it.")
    if description.multi_hot:
        raise ConfigError(f"'data.multi_hot.sizes': {dataset.path} holds several ids per row already. Remove it.")
    if len(section.sizes) not in (1, len(description.sparse)):
        names = f"{description.sparse[0].name} to {description.sparse[-1].name}"
        raise ConfigError(
            f"'data.multi_hot.sizes': {len(section.sizes)} numbers for {len(description.sparse)} features, {names}. "
            "Give one for each, or one for all."
        )
    rows = [feature.rows for feature in description.sparse]
    if max(rows) > 2**31:
        raise ConfigError("'data.multi_hot.sizes' makes 32-bit ids, and a table has more rows than that. Remove it.")
    needed = sum(4 * count * ids for count, ids in zip(rows, section.ids_per_row(rows), strict=True) if ids > 1)
    if needed > memory_bytes():
        raise ResourceError(
            f"'data.multi_hot.sizes': every process keeps {needed / 1e9:,.1f} GB of ids that belong together, and this "
            f"machine has {memory_bytes() / 1e9:,.1f} GB. Store them with the data: recmill prepare criteo --multi-hot."
        )


def _check_table_names(config: Config, tables: list[TableSpec]) -> None:
    """Check the keys of [sharding.tables] and [tables.stores]: each names a table, or one of its features."""
    users = {table.name: dict.fromkeys((table.name, *table.features)) for table in tables}
    known = {name for names in users.values() for name in names}
    problems = []
    for key, given in (
        ("sharding.tables", config.settings.sharding.tables),
        ("tables.stores", config.settings.tables.stores),
        ("tables.dynamic", config.settings.tables.dynamic.keys() - {ALL_TABLES}),
    ):
        problems += [f"'{key}': {registry.unknown('table', name, known)}" for name in given if name not in known]
        for names in users.values():
            if len(twice := [name for name in names if name in given]) > 1:
                problems.append(f"'{key}': '{twice[0]}' and '{twice[1]}' are one table: name it once.")
    problems += [
        f"'tables.dynamic': '{table.name}' has the padding id {table.padding_id}, and a dynamic table can have none."
        for table in tables
        if table.dynamic and table.padding_id is not None
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def batching_of(config: Config, rank: int, size: int) -> "Batching":
    """Return how the samples of the config's dataset become batches of this rank."""
    from recmill.data.share import Batching

    settings, data = config.settings, config.settings.data
    if data.remainder == "torchrec" and settings.train.global_batch_size % size:
        raise ConfigError(
            f"data.remainder = 'torchrec' with {size} processes: train.global_batch_size = "
            f"{settings.train.global_batch_size:,} must be a multiple of {size}. Change one of them."
        )
    return Batching(
        order=data.order,
        seed=settings.train.seed,
        train_batch_size=settings.train.global_batch_size,
        eval_batch_size=settings.eval.global_batch_size,
        rank=rank,
        size=size,
        max_batches={split: getattr(data, f"limit_{split}_batches") for split in SPLITS},
        drop_last=data.drop_last,
        remainder=data.remainder,
    )


def build_source(config: Config, dataset: Dataset, rank: int, size: int) -> "ClickSource | HistorySource":
    """Build the source of this rank's batches."""
    settings, data = config.settings, config.settings.data
    batching = batching_of(config, rank, size)
    if isinstance(dataset.description, ClicksDescription):
        from recmill.data.clicks import ClickSource
        from recmill.models import two_tower

        if isinstance(config.model, two_tower.Config):
            from recmill.data.retrieval import RetrievalSource

            of_items = two_tower.item_features(config.model, dataset.clicks)
            rules = click_rules(config, dataset)
            return RetrievalSource(dataset, batching, config.model.item_id, of_items, *rules)
        with_row_keys = getattr(config.model, "needs_row_keys", False)
        return ClickSource(
            dataset, batching, *click_rules(config, dataset), with_row_keys=with_row_keys, group=settings.eval.group
        )
    from recmill.data.histories import HistorySource

    protocols: list[str] = list(settings.eval.protocols)
    return HistorySource(
        dataset, batching, window_rules(config), protocols, train_on_validation=data.train_on_validation
    )


def click_rules(config: Config, dataset: Dataset) -> tuple["MultiHot | None", Collection[str], dict[str, int]]:
    """Return how rows of clicks become batches: added ids, features with dynamic tables, and padding ids by feature."""
    from recmill.data.multi_hot import MultiHot

    section = config.settings.data.multi_hot
    padding = {
        feature: table.padding_id
        for table in table_specs(config, dataset)
        for feature in table.features
        if table.padding_id is not None
    }
    rows = [feature.rows for feature in dataset.clicks.sparse]
    sizes = section.ids_per_row(rows) if section.sizes else []
    multi_hot = MultiHot(rows, sizes, section.distribution, section.seed) if sizes else None
    return multi_hot, dynamic_features(config, dataset), padding


def build_sharded(config: Config, dataset: Dataset, world: "World", run: Path = Path()) -> "DistributedModelParallel":
    """Build the model with its tables sharded over the ranks, before their rows have values. All ranks take part.

    Rows of cached tables are kept in the directory `run`, unless the config names another one.
    """
    from recmill.kernels.library import load_library
    from recmill.nn.batch_norm import share_statistics
    from recmill.tables.sharding import shard
    from recmill.tables.stores.row_file import check_row_directory

    settings = config.settings
    network = build_network(config, dataset)
    if world.size > 1:
        share_statistics(network, world.sum_tensor)
    request = table_request(config, dataset, world.size, world.device.type, run)
    if request.stores.in_files:
        check_row_directory(request.stores.directory)
    kernels = load_library() if settings.train.kernels == "auto" and world.device.type == "cpu" else None
    if request.cached and kernels is None:
        what = "tables.store = 'cached_ssd'" if request.stores.in_files else "tables.dynamic"
        raise ResourceError(f"{what} needs our C++ kernels, which cannot be used here: see above.")
    return shard(network, request, settings.optim.tables, world, kernels)


def build_network(config: Config, dataset: Dataset) -> "nn.Module":
    """Build the model with its tables on device 'meta'. Dense layers have their first values."""
    import torch

    from recmill.tables.libraries import import_all
    from recmill.tables.torchrec_internals import WithoutMetaValues

    def build() -> "nn.Module":
        # So that dense layers are the same on every rank and for every world size.
        torch.manual_seed(config.settings.train.seed)
        with WithoutMetaValues():
            return model_module(config).build(config.model, model_description(config, dataset), torch.device("meta"))

    try:
        network = build()
    except NotImplementedError:  # a plug-in computes on device "meta", with what import_libraries left out
        import_all()
        network = build()
    check_tables_attribute(network)
    return network


def check_tables_attribute(network: "nn.Module") -> None:
    """Raise UserError unless the network has an attribute `tables`, by which its tables are found."""
    if not hasattr(network, "tables"):
        kinds = ("embedding_bag_configs", "embedding_configs")  # of TorchRec's collections
        others = [name for name, child in network.named_children() if any(hasattr(child, kind) for kind in kinds)]
        remedy = f"Rename `{others[0]}`." if others else "Is your attribute called `tables`?"
        raise UserError(f"The network has no attribute `tables`, which must hold its tables. {remedy}")


def table_request(config: Config, dataset: Dataset, world_size: int, device_type: str, run: Path = Path()) -> "Request":
    """Return the tables to place on `world_size` ranks, and what training does with them."""
    from recmill.tables.placement import Request
    from recmill.training.optim import DENSE_STATE

    settings = config.settings
    tables = table_specs(config, dataset)
    return Request(
        tables=tables,
        types={table.name: settings.sharding.type_of(table.name, *table.features) for table in tables},
        optimizer=settings.optim.tables.name,
        batch_size_per_rank=-(-settings.train.global_batch_size // world_size)
        + (settings.data.remainder == "torchrec"),
        ids_per_row=_ids_per_row(config, dataset, tables),
        dense_state=DENSE_STATE[settings.optim.dense.name],
        catalogue=_catalogue(config, dataset),
        stores=stores_of(config, tables, run, device_type),
        forward_precision=settings.sharding.forward_precision,
        backward_precision=settings.sharding.backward_precision,
    )


def stores_of(config: Config, tables: list[TableSpec], run: Path, device_type: str) -> Stores:
    """Return where the rows of each table live. Raise ConfigError for what this device does not have."""
    section = config.settings.tables
    by_table = {table.name: str(section.store_of(table.name, *table.features)) for table in tables}
    on_gpu = device_type == "cuda"
    if on_gpu and "cached_ssd" in by_table.values():
        raise ConfigError(f"tables.store = 'cached_ssd' on CUDA: {SSD_ON_CUDA}")
    if on_gpu and section.dynamic:
        raise ConfigError(f"tables.dynamic on CUDA: {DYNAMIC_ON_CUDA}")
    if on_gpu and "cached_host_mem" in by_table.values() and not section.cache_memory_budget_mb:
        raise ConfigError(
            "tables.store = 'cached_host_mem' on CUDA needs tables.cache_memory_budget_mb, the memory of each GPU for "
            "its cache. Set it."
        )
    directory = Path(section.path) if section.path else run
    return Stores(
        by_table=by_table,
        budget_bytes=section.cache_memory_budget_mb << 20,
        directory=directory,
        lookahead=None if section.lookahead == "auto" else section.lookahead,
        disk_budget_bytes=int(section.disk_budget_gb * (1 << 30)),
        seed=config.settings.train.seed,
    )


def _ids_per_row(config: Config, dataset: Dataset, tables: list[TableSpec]) -> dict[str, int]:
    """Return for each feature how many ids a row has at most."""
    if dataset.description.kind == "histories":
        return {table.feature: window_rules(config).max_length for table in tables}
    features = dataset.description.sparse
    ids_per_row = dataset.description.ids_per_row
    if config.settings.data.multi_hot.sizes:
        ids_per_row = config.settings.data.multi_hot.ids_per_row([feature.rows for feature in features])
    return {feature.name: ids for feature, ids in zip(features, ids_per_row, strict=True)}


def _catalogue(config: Config, dataset: Dataset) -> "Catalogue | None":
    """Return the items that every step scores; None if there are none, or if it looks up only a sample of them."""
    from recmill.models.sequence_model import SequenceModelConfig
    from recmill.tables.placement import Catalogue

    if dataset.description.kind != "histories" or not isinstance(config.model, SequenceModelConfig):
        return None
    is_tied = config.model.head == "tied"
    if is_tied and getattr(config.model, "loss", "softmax") != "softmax":
        return None
    return Catalogue(dataset.description.num_items, config.model.embedding_dim, is_tied)


def new_metrics(
    config: Config, source: "ClickSource | HistorySource", with_popularity: bool, resamples: int = 0
) -> Metrics:
    """Create the metrics of one evaluation, with intervals from `resamples`; those of rankings also for popularity."""
    from recmill.data.histories import HistorySource
    from recmill.tasks import ctr, next_item

    if isinstance(source, HistorySource) and with_popularity:
        return next_item.new_metrics(config.settings.eval, resamples, source.train_counts())
    if not isinstance(source, HistorySource) and task_module(config) is ctr:
        return ctr.new_metrics(config.settings.eval, resamples, source.negatives)
    return task_module(config).new_metrics(config.settings.eval, resamples)


def open_directory(path: str | Path) -> RunDirectory:
    run = RunDirectory(given_path(path, "RUN"))
    if not run.path.exists():
        raise CheckpointError(
            f"{run.path}: no such directory. {did_you_mean_path(path)}RUN is the directory that `recmill train` was "
            "given as --run."
        )
    if not run.config_file.is_file():
        if own_config(run.path):
            raise CheckpointError(f"{run.path} is a prepared dataset. Train on it: {training_command(run.path)}.")
        inside = sorted(run.path.glob("*/config.toml"))
        remedy = (
            f"It holds runs: name one, like {inside[0].parent}."
            if inside
            else f"Train first: recmill train CONFIG --run {path}."
        )
        raise CheckpointError(f"{run.path}: no config.toml, so this is no run directory. {remedy}")
    return run


def open_trained_run(path: str | Path) -> tuple[RunDirectory, Config]:
    run = open_trained_directory(path)
    return run, load_config(run.config_file)


def open_trained_directory(path: str | Path) -> RunDirectory:
    """Open the directory of a run that has a checkpoint, whether its config can be used here or not."""
    run = open_directory(path)
    saved_step = run.saved_step()
    if not committed(run.checkpoints):
        raise lost_error(run.checkpoints, saved_step) or CheckpointError(
            f"{path}: no complete checkpoint yet. Train first: {resuming_command(run.path)}."
        )
    return run


def check_which(checkpoint: str | None) -> None:
    if checkpoint not in ("newest", "best", None):
        raise ConfigError(f"checkpoint '{checkpoint}': use the 'newest' or the 'best'.")


def open_start(text: str | Path) -> tuple[RunDirectory, str]:
    """Open the run of RUN, RUN@best or RUN@STEP, and return it with 'newest', 'best' or the step.

    A directory that has such a name itself is the run.
    """
    path, at, which = str(text).rpartition("@")
    if not at or Path(text).is_dir() or not (which == "best" or which.isdecimal()):
        return open_trained_directory(text), "newest"
    run = open_trained_directory(path)
    kept = committed(run.checkpoints)
    if which == "best" and best_path(run.checkpoints) is None:
        raise not_kept(run, which)
    if which != "best" and int(which) not in map(step_of, kept):
        steps = ", ".join(f"{step_of(path):,}" for path in kept)
        raise CheckpointError(f"{run.path}: no checkpoint of step {int(which):,}. There are: {steps}.")
    return run, which


def not_kept(run: RunDirectory, which: str) -> CheckpointError:
    return CheckpointError(
        f"{run.checkpoints}: no {which} checkpoint. Only a run with checkpoint.keep_best = true keeps the best one; "
        "use the newest."
    )


def named_in_results(step: int) -> Values:
    """Return what names a checkpoint of a run beside its metrics."""
    return {"step": step, "checkpoint": f"checkpoints/{step_path(Path(), step).name}"}


def unsharded_network(
    run: RunDirectory, config: Config, dataset: Dataset, which: str | None, fallback: bool
) -> "tuple[nn.Module, Path]":
    """Load a trained network on CPU, for use without training, and return it with the path of its checkpoint."""
    with spinner("importing torch"):
        import_libraries(in_own_process=early.is_command)
        import torch

        from recmill.checkpoints.loading import load
        from recmill.tables.stores.row_file import check_row_directory
        from recmill.tables.table_lookup import RowsOnDisk
        from recmill.tables.torchrec_internals import WithoutMetaValues
        from recmill.world import World

    alone = World(0, 1, 0, 1, torch.device("cpu"))
    with quiet_libraries():
        tables = table_specs(config, dataset)
        stores = stores_of(config, tables, run.path, alone.device.type)
        if stores.in_files:
            check_row_directory(stores.directory)
        is_on_disk = bool(stores.in_files) and len(tables) == 1 and dataset.description.kind == "histories"
        with WithoutMetaValues():
            device = torch.device("meta") if is_on_disk else alone.device
            network = model_module(config).build(config.model, dataset.description, device)
        if is_on_disk:  # the table may be larger than memory
            network.tables = RowsOnDisk(tables[0], stores)
            network.cached_specs = tables  # type: ignore[assignment]
        with trained_checkpoint(run, which, config, dataset, alone, fallback) as found:
            load(found, network)
    return network.eval(), found.path


@contextmanager
def trained_checkpoint(
    run: RunDirectory, which: str | None, config: Config, dataset: Dataset, world: "World", fallback: bool = False
) -> "Iterator[Checkpoint]":
    """Find the newest or the best checkpoint of a run, and keep it from being pruned within the block.

    By default it is the one that training tests: the best if the run keeps it. It must have been trained
    with `config` on `dataset`. All ranks take part.
    """
    from recmill.checkpoints.loading import find_checkpoint

    with ExitStack() as hold:
        saved_step = run.saved_step()
        find = partial(find_checkpoint, run.checkpoints, world=world, fallback=fallback, hold=hold)
        found = None
        if which == "best" or (which is None and config.settings.checkpoint.keep_best):
            found = find("best", saved_step=saved_step)
        if found is None and which != "best":
            found = find("newest", saved_step=saved_step)
            best = found.position.best_step if found and which is None and config.settings.checkpoint.keep_best else 0
            if found and world.is_main and best not in (0, found.position.step):
                fact = f"the best checkpoint, of step {best:,}, is not there"
                log.warning("%s: %s: falling back to the newest, %s", run.checkpoints, fact, found.path.name)
        if found is None:
            raise not_kept(run, which or "newest")
        check_same_run(found, config, dataset)
        yield found


def check_same_run(found: "Checkpoint", config: Config, dataset: Dataset) -> None:
    """Raise CheckpointError if another run wrote the checkpoint: one with another config or other data."""
    origin = found.state.origin
    if origin.dataset != dataset.fingerprint:
        raise CheckpointError(
            f"{found.path} was trained on other data than {dataset.path} holds now. "
            "Put the old data back (the same recipe and seed give the same bytes), or choose another --run."
        )
    train = config.settings.train
    ours = (fingerprint(config), train.seed, train.global_batch_size)
    if (origin.config, origin.seed, origin.global_batch_size) != ours:
        raise CheckpointError(
            f"{found.path} was made with another config than this run's (seed {origin.seed}, global batches of "
            f"{origin.global_batch_size:,}). Choose another --run, or start a new run from it: --init-from RUN."
        )
