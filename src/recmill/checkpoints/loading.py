"""Find checkpoints and load them into a model and its optimizer, whatever the sharding and the world size."""

import logging
import warnings
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill import rng
from recmill.checkpoints.cached_loading import load_into_caches
from recmill.checkpoints.choosing import choose
from recmill.checkpoints.format import Checkpoint, OnBlock, SavedTable, committed, set_aside
from recmill.checkpoints.incremental import apply_changes, has_table_rows, write_rows
from recmill.checkpoints.row_files import saved_rows
from recmill.checkpoints.safe_reader import described_tensors, read_into
from recmill.errors import CheckpointError, UserError
from recmill.tables.first_values import fill_shard
from recmill.tables.spec import TableSpec
from recmill.tables.table_lookup import cached_tables
from recmill.tables.torchrec_internals import flat_state, local_shards, table_of
from recmill.world import World

log = logging.getLogger(__name__)

_MAX_SHOWN = 10  # differences between a checkpoint and a model
Sizes = dict[str, tuple[int, ...]]  # by key


def find_checkpoint(
    directory: Path,
    which: str,
    world: World,
    fallback: bool = False,
    set_aside_newer: bool = False,
    on_block: OnBlock = lambda: None,
    saved_step: int = 0,
    hold: ExitStack | None = None,
) -> Checkpoint | None:
    """Choose and verify a checkpoint on rank 0, because files may change meanwhile. All ranks take part.

    `set_aside_newer` renames newer checkpoints, which are corrupt, so that training can write these steps again.
    `saved_step` and `hold`: see `choose`.
    """
    result: Checkpoint | UserError | None = None
    if world.is_main:
        try:
            result = choose(directory, which, fallback, on_block, saved_step, hold)
        except UserError as error:
            result = error
        if set_aside_newer and isinstance(result, Checkpoint):
            paths = committed(directory)
            for path in paths[paths.index(result.path) + 1 :]:
                set_aside(path)
    result = world.broadcast(result)
    if isinstance(result, UserError):
        raise result
    return result


def state_of(model: nn.Module, optimizer: CombinedOptimizer | None) -> dict[str, Tensor]:
    """Return all tensors of the model and the optimizer by key, without copying them."""
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optim"] = optimizer.state_dict()
    return flat_state(state)


def load(
    checkpoint: Checkpoint, model: nn.Module, optimizer: CombinedOptimizer | None = None, allow_partial: bool = False
) -> None:
    """Load a checkpoint into any sharding and world size; only its weights if there is no optimizer.

    All ranks take part; a plain network needs no process group.
    With `allow_partial`, tensors that are missing in the checkpoint or have another size there are logged and kept.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {key: tuple(tensor.size) for key, tensor in described_tensors(checkpoint).items()}
        if optimizer is not None and any(key.startswith("optim.state.dense.") for key in saved):
            _create_dense_state(optimizer)
        state = state_of(model, optimizer)
        in_caches = saved_tables(model, state)
        in_files = {key: (t.rows, *state[key].size()[1:]) for t in in_caches for key in (t.key, *t.state_keys)}
        ours = _on_any_rank({key: tuple(value.size()) for key, value in state.items()} | in_files)
        if optimizer is None:
            saved = {key: size for key, size in saved.items() if key.startswith("model.")}
        fitting = {key: value for key, value in state.items() if saved.get(key) == ours[key]}
        if different := _differences(saved, ours):
            if not allow_partial:
                raise CheckpointError(
                    f"{checkpoint.path} does not fit this model:\n{different}\nWas it made with another config or "
                    "dataset? Start a new run from what fits: recmill train ... --init-from RUN --allow-partial."
                )
            log.warning("not loaded from %s:\n%s", checkpoint.path, different)
            fitting = _without_orphaned_states(fitting)
            if optimizer is not None:
                _reset_dense_state(optimizer, fitting)
        in_caches = saved_tables(model, fitting)
        keys = {table.name: (table.key, table.state_keys) for table in in_caches}
        load_into_caches(checkpoint, cached_tables(model), keys)
        _read(checkpoint, without_tables(fitting, in_caches))


def saved_tables(model: nn.Module, state: dict[str, Tensor]) -> list[SavedTable]:
    """Describe all cached tables whose rows are among `state`; there they have the sizes of caches."""
    rows = {table_of(key): key for key, value in state.items() if key.startswith("model.") and value.dim()}
    states = defaultdict[str | None, list[str]](list)
    for key, value in state.items():
        if key.startswith("optim.") and value.dim():
            states[table_of(key)].append(key)
    specs: list[TableSpec] = getattr(model, "cached_specs", [])
    return [
        SavedTable(
            spec.name,
            rows[spec.name],
            next(iter(states[spec.name]), ""),
            0 if spec.dynamic else spec.rows,
            spec.init_bound,
            states[spec.name][1:],
        )
        for spec in specs
        if spec.name in rows
    ]


def without_tables(state: dict[str, Tensor], tables: list[SavedTable]) -> dict[str, Tensor]:
    keys = {key for table in tables for key in (table.key, *table.state_keys)}
    return {key: value for key, value in state.items() if key not in keys}


def _read(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    alone = not dist.is_initialized()
    # Not those without a shard here: torch asks CUDA for their device if the group has a backend for it.
    state = {key: value for key, value in state.items() if any(local_shards(value))}
    in_row_files = read_row_files(checkpoint, state)
    in_base = {key: value for key, value in state.items() if checkpoint.base and has_table_rows(key, value)}
    own = {key: value for key, value in state.items() if key not in in_base and key not in in_row_files}
    read_into(own, checkpoint.path, alone)
    if checkpoint.base:
        read_into({key: value for key, value in in_base.items() if key not in in_row_files}, checkpoint.base, alone)
        apply_changes(checkpoint, state)
    if not alone:
        dist.barrier()  # rank 0 holds the checkpoint until every rank has read it


def read_row_files(checkpoint: Checkpoint, state: dict[str, Tensor]) -> set[str]:
    """Read tables of which only rows that are not first values are saved. Return the keys of their tensors."""
    found: set[str] = set()
    for _, file in checkpoint.row_files:
        for table in file.tables:
            stream = rng.stream_key(checkpoint.state.origin.seed, "table", table.name)
            for shard in local_shards(state[table.key]) if table.key in state.keys() - found else []:
                fill_shard(shard, stream, file.dim, table.bound)
            for key in {*table.state_keys} & state.keys() - found:
                for shard in local_shards(state[key]):
                    shard.values.zero_()
            found |= {table.key, *table.state_keys}
    for directory, file in checkpoint.row_files:
        for table, rows, weights, states in saved_rows(directory, file):
            parts = np.split(states, max(1, len(table.state_keys)), axis=1)
            for key, values in zip((table.key, *table.state_keys), (weights, *parts), strict=False):
                for shard in local_shards(state[key]) if key in state else []:
                    of_rows = values[:, 0] if shard.values.dim() == 1 else values
                    write_rows(shard, torch.from_numpy(rows), torch.from_numpy(of_rows), column=0)
    return found


def _on_any_rank(sizes: Sizes) -> Sizes:
    """Merge the sizes of all ranks: a rank has optimizer states only for tables of which it holds a shard."""
    if not dist.is_initialized():
        return sizes
    everyone: list[Sizes] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sizes)
    return {key: size for own in everyone for key, size in own.items()}


def _differences(saved: Sizes, ours: Sizes) -> str:
    """Describe each tensor that differs in one line; an optimizer state only if its parameter does not differ."""
    lines: dict[str, str] = {}
    for key in sorted(saved.keys() | ours.keys(), key=lambda key: (key.startswith("optim."), key)):
        if saved.get(key) == ours.get(key):
            continue
        name = readable_name(key)
        if any(name.endswith(f" of {earlier}") for earlier in lines):
            continue
        found, wanted = (_size_text(sizes.get(key), name) for sizes in (saved, ours))
        lines[name] = f"  {name}: {found} in the checkpoint, {wanted} here"
    more = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    return "\n".join([*list(lines.values())[:_MAX_SHOWN], *more])


def readable_name(key: str) -> str:
    """Name a tensor for people, such as 'table item', 'layer top.0.weight' or 'momentum1 of table item'."""
    table = table_of(key)
    if key.startswith("model."):
        return f"table {table}" if table else f"layer {key.removeprefix('model.')}"
    if table:
        return f"{key.rsplit('.', 1)[1]} of table {table}"
    layer, _, state = key.removeprefix("optim.state.dense.").rpartition(".")
    return f"{state} of layer {layer}"


def _size_text(size: tuple[int, ...] | None, name: str) -> str:
    if size is None:
        return "not"
    numbers = [f"{number:,}" for number in size]
    return f"{numbers[0]} rows of {numbers[1]}" if name.startswith("table ") else f"[{', '.join(numbers)}]"


def _without_orphaned_states(fitting: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out optimizer states whose parameter is not loaded: Adam's step counts fit any parameter."""
    weights = [key.removeprefix("model.") for key in fitting if key.startswith("model.")]
    owned = tuple(f"optim.state.{part}.{name}." for part in ("dense", "tables") for name in weights)
    return {key: value for key, value in fitting.items() if key.startswith(("model.", *owned))}


def _create_dense_state(optimizer: CombinedOptimizer) -> None:
    """Create Adam's moments with a step of zero gradients, and undo its effect on the parameters."""
    dense = dict(optimizer.optimizers)["dense"]
    before = [parameter.detach().clone() for parameter in dense.params.values()]
    dense.init_state()
    for parameter, values in zip(dense.params.values(), before, strict=True):
        parameter.detach().copy_(values)  # weight decay moved them


def _reset_dense_state(optimizer: CombinedOptimizer, fitting: dict[str, Tensor]) -> None:
    """Set the optimizer states of layers that are not loaded to 0, as if they had never been trained."""
    dense = dict(optimizer.optimizers)["dense"]
    for key, parameter in dense.params.items():
        for value in dense.state[parameter].values() if f"model.{key}" not in fitting else []:
            value.zero_()
