"""A checkpoint's tensors into a model and its optimizer, whatever the sharding and the world size."""

import logging
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Checkpoint, chosen, committed, set_aside
from recmill.checkpoints.incremental import apply_changes, is_rows, table_of
from recmill.checkpoints.safe_reader import SafeReader, read_into
from recmill.errors import CheckpointError, UserError
from recmill.world import World

log = logging.getLogger(__name__)

Sizes = dict[str, tuple[int, ...]]


def found_for_all(
    directory: Path, which: str, world: World, fallback: bool = False, tidy: bool = False
) -> Checkpoint | None:
    """Chosen and checked by rank 0: another process may be saving or pruning meanwhile. All ranks take part.

    `tidy`: what is newer than the one to go on from, and so damaged, is set aside.
    """
    found: Checkpoint | UserError | None = None
    if world.is_main:
        try:
            found = chosen(directory, which, fallback)
        except UserError as error:
            found = error
        if tidy and isinstance(found, Checkpoint):
            paths = committed(directory)
            for path in paths[paths.index(found.path) + 1 :]:
                set_aside(path)
    found = world.broadcast(found)
    if isinstance(found, UserError):
        raise found
    return found


def state_of(model: nn.Module, optimizer: CombinedOptimizer | None) -> dict[str, Any]:
    """Key -> tensor, sharded or not, of everything that is trained: the tensors themselves, not copies."""
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optim"] = optimizer.state_dict()
    return flatten_state_dict(state)[0]


def load(
    checkpoint: Checkpoint, model: nn.Module, optimizer: CombinedOptimizer | None = None, allow_partial: bool = False
) -> None:
    """Into any sharding and world size. Without an optimizer: weights only. A plain network needs no process group.

    `allow_partial`: what has another size here, or is not there, stays as it is, with a line in the log.
    """
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = _sizes(checkpoint)
        if optimizer is not None and any(key.startswith("optim.state.dense.") for key in saved):
            _create_dense_state(optimizer)
        state = state_of(model, optimizer)
        ours = _on_any_rank({key: tuple(value.size()) for key, value in state.items()})
        if optimizer is None:
            saved = {key: size for key, size in saved.items() if key.startswith("model.")}
        if different := differences(saved, ours):
            if not allow_partial:
                raise CheckpointError(
                    f"{checkpoint.path} does not fit this model:\n"
                    + "\n".join(f"  {line}" for line in different)
                    + "\nWas it made with another config or dataset? Give a new run what fits of it: recmill train "
                    "... --init-from RUN --allow-partial."
                )
            log.warning("not taken from %s:\n%s", checkpoint.path, "\n".join(f"  {line}" for line in different))
        fitting = {key: value for key, value in state.items() if saved.get(key) == ours[key]}
        if different:
            fitting = _without_states_of_others(fitting)
            _forget_dense_state(optimizer, fitting)
        if checkpoint.base:
            read_into({key: value for key, value in fitting.items() if is_rows(key, value)}, checkpoint.base, alone)
            read_into({key: value for key, value in fitting.items() if not is_rows(key, value)}, checkpoint.path, alone)
            apply_changes(checkpoint, fitting)
        else:
            read_into(fitting, checkpoint.path, alone)


def _on_any_rank(sizes: Sizes) -> Sizes:
    """A rank knows the optimizer's state of the tables that it has a piece of, and no other."""
    if not dist.is_initialized():
        return sizes
    everyone: list[Sizes] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sizes)
    return {key: size for own in everyone for key, size in own.items()}


def differences(saved: Sizes, ours: Sizes) -> list[str]:
    """In people's words, one line each; of an optimizer's state only where its parameter is the same."""
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
    """model.tables.embeddings.item.weight -> table item; optim....item.momentum1 -> momentum1 of table item."""
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
    """Of every tensor that it stands for: with changes of rows, these are the full one's and all else is its own."""
    own = {key: size for key, size in _stored(checkpoint.path).items() if key.startswith(("model.", "optim."))}
    if not checkpoint.base:
        return own
    return {key: size for key, size in _stored(checkpoint.base).items() if table_of(key) and size} | own


def _stored(path: Path) -> Sizes:
    described = SafeReader(path).read_metadata().state_dict_metadata
    return {key: tuple(value.size) for key, value in described.items()}


def _without_states_of_others(fitting: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state goes with its parameter: its count of steps would fit anywhere."""
    weights = [key.removeprefix("model.") for key in fitting if key.startswith("model.")]
    owned = tuple(f"optim.state.{part}.{name}." for part in ("dense", "tables") for name in weights)
    return {key: value for key, value in fitting.items() if key.startswith(("model.", *owned))}


def _create_dense_state(optimizer: CombinedOptimizer) -> None:
    """Adam's moments exist only after a first step: one with zero gradients makes room for the saved ones."""
    (dense,) = [part for name, part in optimizer.optimizers if name == "dense"]
    before = [parameter.detach().clone() for parameter in dense.params.values()]
    dense.init_state()
    for parameter, values in zip(dense.params.values(), before, strict=True):
        parameter.detach().copy_(values)  # weight decay moves them all the same


def _forget_dense_state(optimizer: CombinedOptimizer | None, fitting: dict[str, Any]) -> None:
    """Of layers that are not taken: all 0, as if they had never been trained."""
    for name, part in optimizer.optimizers if optimizer else []:
        if name == "dense":
            for key, parameter in part.params.items():
                if f"model.{key}" not in fitting:
                    for value in part.state[parameter].values():
                        value.zero_()
