"""Checkpoints that are whole or not there, open at any world size, and run no code when read.

A step is saved into a hidden directory, digested, synced and only then renamed to `step-N`: a kill at any moment
leaves the checkpoints before it as they were.
"""

import io
import json
import logging
import os
import pickle
import re
import shutil
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torchrec.optim.keyed import CombinedOptimizer

from recmill.errors import CheckpointError, ResourceError
from recmill.schema import digest
from recmill.world import World

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
STATE = "state.json"


@dataclass(frozen=True)
class Position:
    """Where training stands: `step` steps done, the next batch is `batch` of `epoch`.

    The loss since the last report, how validation went and the scale of float16 come along, so that a resumed run
    does what an unbroken one would.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    best: float | None = None  # of the validations so far
    best_step: int = 0
    worse_evals: int = 0  # since then
    loss_scale: float = 0.0  # 0: none yet
    steps_at_scale: int = 0

    @property
    def is_best(self) -> bool:
        return 0 < self.best_step == self.step

    def judged(self, value: float | None) -> "Position":
        """After a validation at this step; None: it had no value."""
        if value is not None and (self.best is None or value > self.best):
            return replace(self, best=value, best_step=self.step, worse_evals=0)
        return replace(self, worse_evals=self.worse_evals + 1)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    position: Position
    dataset: str  # fingerprint of what it was trained on


def save(
    directory: Path,
    model: nn.Module,
    optimizer: CombinedOptimizer,
    position: Position,
    dataset: str,
    keep: int,
    world: World,
    keep_best: bool = False,
) -> None:
    """All ranks take part; rank 0 commits."""
    started = time.monotonic()
    final = _path(directory, position.step)
    partial = directory / f".saving-{final.name}"
    if world.is_main:
        directory.mkdir(exist_ok=True)
        for left in directory.glob(".saving-*"):  # by a killed save
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
    world.broadcast(None)  # nobody writes before the directory is there
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
    except dcp.CheckpointException as error:
        shutil.rmtree(partial, ignore_errors=True)  # give the space back
        raise ResourceError(
            f"{partial}: a checkpoint could not be written ({_reason(error)}). The ones before it are untouched. "
            "Is the disk full? Free some space, then run the same command again."
        ) from error
    if world.is_main:
        _commit(partial, final, {"position": asdict(position), "dataset": dataset})
        kept = best(directory) if keep_best else None
        for old in committed(directory)[:-keep]:
            if old != kept:
                shutil.rmtree(old)
        log.info("checkpoint committed: step %s in %.1f s, %s", f"{position.step:,}", time.monotonic() - started, final)
    world.broadcast(None)  # nobody goes on, or leaves, before it is committed


def _reason(error: "dcp.CheckpointException") -> str:
    """torch wraps what each rank raised; a full disk may appear as 'unexpected pos'."""
    return next((str(failure[0]) for failure in error.failures.values()), str(error))


def _commit(partial: Path, final: Path, state: dict[str, Any]) -> None:
    _write_synced(partial / STATE, json.dumps(state, indent=1))
    files = {f.name: {"bytes": f.stat().st_size, "xxh3": digest(f)} for f in sorted(partial.iterdir())}
    _write_synced(partial / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1))
    _sync_directory(partial)
    shutil.rmtree(final, ignore_errors=True)  # the same step, saved before and then resumed from
    os.rename(partial, final)
    _sync_directory(final.parent)


def committed(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    steps = {
        path.parent: re.fullmatch(r"step-(\d+)", path.parent.name) for path in directory.glob(f"step-*/{MANIFEST}")
    }
    ours = {path: int(step[1]) for path, step in steps.items() if step}  # not a copy that somebody named step-10-best
    return sorted(ours, key=ours.__getitem__)


def newest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint, its manifest and every digest checked; None if there is none at all."""
    found = committed(directory)
    return verified(found[-1]) if found else None


def best(directory: Path) -> Path | None:
    """That of the best validation of all, as the newest tells; None if it was not kept."""
    paths = committed(directory)
    wanted = _path(directory, _read(paths[-1]).position.best_step) if paths else None
    return wanted if wanted in paths else None


def found_for_all(directory: Path, which: str, world: World) -> Checkpoint | None:
    """Chosen and checked by rank 0: another process may be saving or pruning meanwhile. All ranks take part."""
    if not world.is_main:
        return world.broadcast(None)
    path = best(directory) if which == "best" else next(reversed(committed(directory)), None)
    return world.broadcast(verified(path) if path else None)


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path, Position(**state["position"]), state["dataset"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable state ({error!r}). {_remedy(path)}") from error


def verified(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file}: missing. {_remedy(path)}")
            if file.stat().st_size != expected["bytes"]:
                raise CheckpointError(
                    f"{file}: {file.stat().st_size:,} bytes, expected {expected['bytes']:,}. {_remedy(path)}"
                )
            if digest(file) != expected["xxh3"]:
                raise CheckpointError(f"{file}: its content changed since it was saved. {_remedy(path)}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: unreadable manifest ({error!r}). {_remedy(path)}") from error
    return _read(path)


def _remedy(path: Path) -> str:
    return f"Remove {path} to go on from the checkpoint before it, or copy it again from where it was whole."


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: CombinedOptimizer | None = None) -> None:
    """Into any sharding and world size. Without an optimizer: weights only. A plain network needs no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if optimizer is not None and _has_dense_state(checkpoint.path):
            _create_dense_state(optimizer)
        state: dict[str, Any] = {"model": model.state_dict()}
        if optimizer is not None:
            state["optim"] = optimizer.state_dict()
        try:
            dcp.load(state, storage_reader=SafeReader(checkpoint.path), no_dist=not dist.is_initialized())
        except (RuntimeError, ValueError, dcp.CheckpointException) as error:
            raise CheckpointError(
                f"{checkpoint.path} does not fit this model: {str(error).strip().splitlines()[-1]}. "
                "Was it made with another config?"
            ) from error
        model.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optim"])


def _has_dense_state(path: Path) -> bool:
    """Not of SGD, and not before the first update: float16 may leave out any number of steps."""
    return any(key.startswith("optim.state.dense.") for key in SafeReader(path).read_metadata().state_dict_metadata)


def _create_dense_state(optimizer: CombinedOptimizer) -> None:
    """Adam's moments exist only after a first step: one with zero gradients makes room for the saved ones."""
    for _, part in optimizer.optimizers:
        if hasattr(part, "init_state"):
            part.init_state()


class SafeReader(dcp.FileSystemReader):
    """torch reads `.metadata` with plain pickle, which runs whatever the file says. This one admits data only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _DataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise CheckpointError(f"{path}: {error}. Do not load checkpoints from people you do not trust.") from error
        if any(isinstance(value, BytesStorageMetadata) for value in metadata.state_dict_metadata.values()):
            raise CheckpointError(f"{path}: holds pickled objects, not tensors alone. Do not load it.")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _DataUnpickler(pickle.Unpickler):
    """Only the classes that describe tensors and where they are stored."""

    _CLASSES = frozenset(
        [
            ("pathlib", "PosixPath"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self._CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is not data")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
