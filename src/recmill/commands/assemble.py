"""Config -> the parts that train, evaluate and recommend work with."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from recmill import registry
from recmill.config import Config, load_config
from recmill.errors import CheckpointError, ConfigError, DataError, ResourceError
from recmill.hardware.memory import memory_bytes
from recmill.observe.run_dir import RunDirectory
from recmill.schema import SPLITS, Dataset, open_dataset
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    from recmill.checkpoints.format import Checkpoint, Origin
    from recmill.world import World


def open_matching_dataset(config: Config, verify: Any = "sizes") -> Dataset:
    """The config's dataset, which must be of the kind that its model learns from."""
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
    _check_sharded_names(config, dataset)
    if config.settings.data.multi_hot.sizes:
        _check_multi_hot(config, dataset)
    return dataset


def _check_multi_hot(config: Config, dataset: Dataset) -> None:
    description, sizes = dataset.description, config.settings.data.multi_hot.sizes
    if description.kind != "clicks":
        raise ConfigError("'data.multi_hot' is for clicks, and these are histories. Remove it.")
    if description.multi_hot:
        raise ConfigError(f"'data.multi_hot.sizes': {dataset.path} holds several ids per row already. Remove it.")
    if len(sizes) not in (1, len(description.sparse)):
        names = f"{description.sparse[0].name} to {description.sparse[-1].name}"
        raise ConfigError(
            f"'data.multi_hot.sizes': {len(sizes)} numbers for {len(description.sparse)} features, {names}. "
            "Give one for each, or one for all."
        )
    rows = [feature.rows for feature in description.sparse]
    if max(rows) > 2**31:
        raise ConfigError("'data.multi_hot' makes 32-bit ids, and a table has more rows than that. Remove it.")
    ids_per_row = config.settings.data.multi_hot.ids_per_row(rows)
    needed = sum(4 * count * ids for count, ids in zip(rows, ids_per_row, strict=True) if ids > 1)
    if needed > memory_bytes():
        raise ResourceError(
            f"'data.multi_hot': every process keeps {needed / 1e9:,.1f} GB of ids that go together, and this machine "
            f"has {memory_bytes() / 1e9:,.1f} GB. Store them with the data: recmill prepare criteo --multi-hot."
        )


def _check_sharded_names(config: Config, dataset: Dataset) -> None:
    tables = model_module(config).tables(config.model, dataset.description)
    known = {table.name: table for table in tables} | {table.feature: table for table in tables}
    names = config.settings.sharding.tables
    problems = [f"'sharding.tables': {registry.unknown('table', n, known)}" for n in names if n not in known]
    problems += [
        f"'sharding.tables': '{t.name}' and '{t.feature}' are one table: name it once."
        for t in tables
        if t.name != t.feature and t.name in names and t.feature in names
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def model_module(config: Config) -> ModuleType:
    return registry.load(registry.MODELS, config.model_name, "model")


def task_module(config: Config) -> ModuleType:
    return registry.load(registry.TASKS, model_module(config).TASK, "task")


def build_source(config: Config, dataset: Dataset, rank: int, size: int) -> Any:
    """This rank's batches."""
    from recmill.data.share import Limits

    settings, data = config.settings, config.settings.data
    limits = Limits(data.limit_train_batches, data.limit_val_batches, data.limit_test_batches, data.drop_last)
    common: dict[str, Any] = {
        "limits": limits,
        "order": settings.data.order,
        "seed": settings.train.seed,
        "train_batch_size": settings.train.global_batch_size,
        "eval_batch_size": settings.eval.global_batch_size,
        "rank": rank,
        "size": size,
    }
    if dataset.description.kind == "clicks":
        from recmill.data.clicks import ClickSource

        return ClickSource(dataset, multi_hot=_multi_hot(config, dataset), **common)
    from recmill.data.histories import HistorySource, WindowRules

    window_rules = WindowRules(**model_module(config).window_rules(config.model))
    return HistorySource(
        dataset,
        window_rules=window_rules,
        protocols=list(settings.eval.protocols),
        train_on_validation=data.train_on_validation,
        **common,
    )


def _multi_hot(config: Config, dataset: Dataset) -> Any:
    from recmill.data.multi_hot import MultiHot

    asked_for = config.settings.data.multi_hot
    if not asked_for.sizes:
        return None
    assert dataset.description.kind == "clicks"
    rows = [feature.rows for feature in dataset.description.sparse]
    return MultiHot(rows, asked_for.ids_per_row(rows), asked_for.distribution, asked_for.seed)


def build_sharded(config: Config, dataset: Dataset, world: "World") -> Any:
    """The model with its tables cut over the ranks, their rows not yet set. All ranks take part."""
    import torch

    from recmill.kernels.native import native
    from recmill.tables.placement import Request
    from recmill.tables.sharding import shard

    module, settings = model_module(config), config.settings
    torch.backends.cuda.matmul.allow_tf32 = settings.train.tf32
    torch.manual_seed(settings.train.seed)  # dense layers: the same on every rank and for every world size
    network = module.build(config.model, dataset.description, torch.device("meta"))
    tables = module.tables(config.model, dataset.description)
    request = Request(
        tables=tables,
        types={table.name: settings.sharding.type_of(table.name, table.feature) for table in tables},
        optimizer=settings.optim.tables.name,
        kernels=registry.load(registry.STORES, settings.tables.store, "store").COMPUTE_KERNELS,
        batch_size_per_rank=-(-settings.train.global_batch_size // world.size),
        ids_per_row=_ids_per_row(config, dataset, tables),
    )
    use_ours = settings.train.kernels == "auto" and world.device.type == "cpu"
    return shard(network, request, settings.optim.tables, world, native() if use_ours else None)


def _ids_per_row(config: Config, dataset: Dataset, tables: list[TableSpec]) -> dict[str, int]:
    """By feature, at most."""
    if dataset.description.kind == "clicks":
        features = dataset.description.sparse
        multi_hot = dataset.description.multi_hot or [1] * len(features)
        if config.settings.data.multi_hot.sizes:
            multi_hot = config.settings.data.multi_hot.ids_per_row([feature.rows for feature in features])
        return {feature.name: ids for feature, ids in zip(features, multi_hot, strict=True)}
    max_length = model_module(config).window_rules(config.model)["max_length"]
    return {table.feature: max_length for table in tables}


def open_run(path: str | Path) -> tuple[RunDirectory, Config]:
    run = RunDirectory(path)
    if not run.config_file.is_file():
        raise CheckpointError(f"{run.path}: no config.toml, so this is no run directory. Train first: recmill train.")
    return run, load_config(run.config_file)


def open_trained_run(path: str | Path) -> tuple[RunDirectory, Config]:
    run, config = open_run(path)
    if not run.has_checkpoint():
        raise CheckpointError(
            f"{path}: no complete checkpoint yet. Train first: recmill train {run.config_file} --run {path}."
        )
    return run, config


def check_which(checkpoint: str) -> None:
    if checkpoint not in ("newest", "best"):
        raise ConfigError(f"checkpoint '{checkpoint}': use the 'newest' or the 'best'.")


def trained_checkpoint(
    run: RunDirectory, which: str, dataset: Dataset, world: "World", fallback: bool = False
) -> "Checkpoint":
    """The newest or the best, of a model that learnt from `dataset`. All ranks take part."""
    from recmill.checkpoints.loading import found_for_all

    found = found_for_all(run.checkpoints, which, world, fallback)
    if found is None:
        raise CheckpointError(
            f"{run.path}: no {which} checkpoint. Only a run with checkpoint.keep_best = true keeps the best one; "
            "use the newest."
        )
    check_same_data(found, dataset)
    return found


def check_same_data(found: "Checkpoint", dataset: Dataset) -> None:
    if found.state.origin.dataset != dataset.fingerprint:
        raise CheckpointError(
            f"{found.path} was trained on other data than what is now in {dataset.path}. "
            "Put the old data back (the same recipe and seed give the same bytes), or choose another --run."
        )


def check_same_config(found: "Checkpoint", now: "Origin") -> None:
    if found.state.origin.config != now.config:
        raise CheckpointError(
            f"{found.path} was made with another config than this run's (of seed {found.state.origin.seed}, global "
            f"batches of {found.state.origin.global_batch_size:,}). Choose another --run, or start a new one from it: "
            "--init-from RUN."
        )
