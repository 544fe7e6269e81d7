"""Find checkpoints and load them into a model and its optimizer, whatever the sharding and the world size."""

import logging
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Checkpoint, OnBlock, choose, committed, set_aside
from recmill.checkpoints.incremental import apply_changes, has_table_rows
from recmill.checkpoints.safe_reader import SafeReader, read_into
from recmill.errors import CheckpointError, UserError
from recmill.tables.torchrec_internals import flat_state, table_of
from recmill.world import World

log = logging.getLogger(__name__)

Sizes = dict[str, tuple[int, ...]]  # by key


def find_checkpoint(
    directory: Path,
    which: str,
    world: World,
    fallback: bool = False,
    set_aside_newer: bool = False,
    on_block: OnBlock = lambda: None,
) -> Checkpoint | None:
    """Choose and verify a checkpoint on rank 0, as another process may be saving or pruning. All ranks take part.

    `set_aside_newer`: rename newer checkpoints, which are corrupt, so that training can write these steps again.
    `on_block` is called while rank 0 reads files.
    """
    result: Checkpoint | UserError | None = None
    if world.is_main:
        try:
            result = choose(directory, which, fallback, on_block)
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
    """Return everything that is trained, by key: the tensors themselves, sharded or not, and no copies."""
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optim"] = optimizer.state_dict()
    return flat_state(state)


def load(
    checkpoint: Checkpoint, model: nn.Module, optimizer: CombinedOptimizer | None = None, allow_partial: bool = False
) -> None:
    """Load into any sharding and world size. Without an optimizer: weights only.

    All ranks take part; a plain network needs no process group.
    `allow_partial`: keep the values of tensors that have another size here or are not in the checkpoint, and log them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = _sizes(checkpoint)
        if optimizer is not None and any(key.startswith("optim.state.dense.") for key in saved):
            _create_dense_state(optimizer)
        state = state_of(model, optimizer)
        ours = _on_any_rank({key: tuple(value.size()) for key, value in state.items()})
        if optimizer is None:
            saved = {key: size for key, size in saved.items() if key.startswith("model.")}
        different = differences(saved, ours)
        if different:
            _report_differences(checkpoint, different, allow_partial)
        fitting = {key: value for key, value in state.items() if saved.get(key) == ours[key]}
        if different:
            fitting = _without_orphaned_states(fitting)
            _reset_dense_state(optimizer, fitting)
        _read(checkpoint, fitting)


def _read(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    alone = not dist.is_initialized()
    if not checkpoint.base:
        read_into(state, checkpoint.path, alone)
        return
    rows = {key: value for key, value in state.items() if has_table_rows(key, value)}
    others = {key: value for key, value in state.items() if key not in rows}
    read_into(rows, checkpoint.base, alone)
    read_into(others, checkpoint.path, alone)
    apply_changes(checkpoint, state)


def _report_differences(checkpoint: Checkpoint, different: list[str], allow_partial: bool) -> None:
    lines = "\n".join(f"  {line}" for line in different)
    if not allow_partial:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model:\n{lines}\nWas it made with another config or dataset? Start a "
            "new run from what fits: recmill train ... --init-from RUN --allow-partial."
        )
    log.warning("not loaded from %s:\n%s", checkpoint.path, lines)


def _on_any_rank(sizes: Sizes) -> Sizes:
    """Merge the sizes of all ranks: a rank has optimizer states only for tables of which it holds a shard."""
    if not dist.is_initialized():
        return sizes
    everyone: list[Sizes] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sizes)
    return {key: size for own in everyone for key, size in own.items()}


def differences(saved: Sizes, ours: Sizes) -> list[str]:
    """Describe each tensor that differs in one line; an optimizer state only if its parameter does not differ."""
    lines: dict[str, str] = {}
    for key in sorted(saved.keys() | ours.keys(), key=lambda key: (key.startswith("optim."), key)):
        if saved.get(key) == ours.get(key):
            continue
        name = _name(key)
        if any(name.endswith(f" of {earlier}") for earlier in lines):
            continue
        found, wanted = (_size_text(sizes.get(key), name) for sizes in (saved, ours))
        lines[name] = f"{name}: {found} in the checkpoint, {wanted} here"
    return list(lines.values())


def _name(key: str) -> str:
    """Name a tensor for people, such as 'table item', 'layer top.0.weight' or 'momentum1 of table item'."""
    table = table_of(key)
    if key.startswith("model."):
        return f"table {table}" if table else f"layer {key.removeprefix('model.')}"
    if table:
        return f"{key.rsplit('.', 1)[1]} of table {table}"
    layer, _, state = re.sub(r"^optim\.state\.dense\.", "", key).rpartition(".")
    return f"{state} of layer {layer}"


def _size_text(size: Iterable[int] | None, name: str) -> str:
    if size is None:
        return "not"
    numbers = [f"{number:,}" for number in size]
    return f"{numbers[0]} rows of {numbers[1]}" if name.startswith("table ") else f"[{', '.join(numbers)}]"


def _sizes(checkpoint: Checkpoint) -> Sizes:
    """Return the sizes of all tensors; an incremental checkpoint gets those of table rows from its base."""
    own = {key: size for key, size in _stored_sizes(checkpoint.path).items() if key.startswith(("model.", "optim."))}
    if not checkpoint.base:
        return own
    return {key: size for key, size in _stored_sizes(checkpoint.base).items() if table_of(key) and size} | own


def _stored_sizes(path: Path) -> Sizes:
    described = SafeReader(path).read_metadata().state_dict_metadata
    return {key: tuple(value.size) for key, value in described.items()}


def _without_orphaned_states(fitting: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out optimizer states whose parameter is not loaded: a count of steps has the same size everywhere."""
    weights = [key.removeprefix("model.") for key in fitting if key.startswith("model.")]
    owned = tuple(f"optim.state.{part}.{name}." for part in ("dense", "tables") for name in weights)
    return {key: value for key, value in fitting.items() if key.startswith(("model.", *owned))}


def _create_dense_state(optimizer: CombinedOptimizer) -> None:
    """Take a step with zero gradients, because Adam's moments exist only after a first one; undo its effects."""
    (dense,) = [part for name, part in optimizer.optimizers if name == "dense"]
    before = [parameter.detach().clone() for parameter in dense.params.values()]
    dense.init_state()
    for parameter, values in zip(dense.params.values(), before, strict=True):
        parameter.detach().copy_(values)  # weight decay moved them


def _reset_dense_state(optimizer: CombinedOptimizer | None, fitting: dict[str, Tensor]) -> None:
    """Set the optimizer states of layers that are not loaded to 0, as if they had never been trained."""
    dense = [part for name, part in optimizer.optimizers if name == "dense"] if optimizer else []
    for part in dense:
        for key, parameter in part.params.items():
            for value in part.state[parameter].values() if f"model.{key}" not in fitting else []:
                value.zero_()
