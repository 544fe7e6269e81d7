"""The format of checkpoints on disk. This module needs no torch.

    step-00000120/  MANIFEST.json (written last: size and digest of every file)  state.json  .metadata  *.distcp

A checkpoint is written into `.saving-step-N`, synced, and only then renamed to `step-N`: it is complete or absent,
and a kill at any moment leaves earlier checkpoints untouched. To be removed, it is first renamed to `.removing-step-N`.
So a `step-N` without a manifest is corrupt; only hidden names are leftovers of a kill.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from recmill.errors import CheckpointError, UserError, as_user_error
from recmill.failpoints import reach
from recmill.files.atomic import sync_directory, write_synced
from recmill.files.digests import digest
from recmill.files.reading import read_json, read_small

log = logging.getLogger(__name__)

FileFacts = dict[str, Any]  # bytes, xxh3
OnBlock = Callable[[], None]  # called regularly while files are read, so that reading does not look like a hang

MANIFEST = "MANIFEST.json"
STATE = "state.json"
_METADATA = ".metadata"
_FORMATS = 2, 3  # 3: with row files
_STEP_NAME = re.compile(r"step-\d+")


class _Strict:
    """What state.json holds: pydantic refuses other fields and other types."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PrunedError(CheckpointError):
    """A checkpoint that a run removed while it was being read."""


@dataclass(frozen=True)
class Position(_Strict):
    """How far training got: `step` steps are done, and the next batch is `batch` of `epoch`.

    Order, masks and dropout are functions of the seed and these numbers: a resumed run does what an uninterrupted one
    would do.
    """

    step: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    batch: NonNegativeInt = 0
    loss_sum: float = 0.0  # since the last report
    loss_weight: NonNegativeFloat = 0.0
    best: float | None = None  # best validation metric so far
    best_step: NonNegativeInt = 0
    worse_evals: NonNegativeInt = 0  # validations since best_step
    rate_cuts: NonNegativeInt = 0  # how often optim.schedule.name = 'plateau' has lowered the learning rates
    loss_scale: NonNegativeFloat = 0.0  # of float16; 0: not set yet
    steps_at_scale: NonNegativeInt = 0

    @property
    def is_best(self) -> bool:
        return 0 < self.best_step == self.step

    def after_validation(self, value: float | None, patience: int = 0) -> "Position":
        """Return the position after a validation at this step. `value` is None if the metric is undefined.

        The learning rates are cut after each `patience` validations without an improvement; 0: never.
        """
        if value is not None and (self.best is None or value > self.best):
            return replace(self, best=value, best_step=self.step, worse_evals=0)
        worse = self.worse_evals + 1
        return replace(self, worse_evals=worse, rate_cuts=self.rate_cuts + bool(patience and worse % patience == 0))

    def contradiction(self) -> str:
        """Say which numbers contradict each other; empty if none do. A step has at most one validation."""
        if self.best_step + self.worse_evals > self.step:
            return f"step {self.step}, but best_step {self.best_step} and worse_evals {self.worse_evals}"
        if self.rate_cuts > self.step:
            return f"step {self.step}, but rate_cuts {self.rate_cuts}"
        if (self.best is None) != (self.best_step == 0):
            return f"best {self.best}, but best_step {self.best_step}"
        return f"step {self.step}, but steps_at_scale {self.steps_at_scale}" if self.steps_at_scale > self.step else ""


@dataclass(frozen=True)
class Origin(_Strict):
    """What wrote a checkpoint. Random numbers are counter-based: the seed is their only state."""

    config: str  # fingerprint of all keys that may not change on resume
    dataset: str  # fingerprint of the training data
    seed: NonNegativeInt
    global_batch_size: NonNegativeInt
    world_size: PositiveInt
    versions: dict[str, str]


@dataclass(frozen=True)
class RowChange(_Strict):
    """Changed rows of one tensor."""

    key: str  # of the complete tensor, in the full checkpoint
    ids: str  # key of the row numbers, in this checkpoint
    values: str  # key of the rows, in this checkpoint
    column: NonNegativeInt  # of the complete tensor, where `values` begin
    bits: int  # per value


@dataclass(frozen=True)
class SavedTable(_Strict):
    """A table of which only rows that are not first values are saved."""

    name: str
    key: str  # of its rows, as of a complete tensor
    state_key: str  # of their optimizer state; empty if it has none
    rows: NonNegativeInt  # 0: it is dynamic
    bound: NonNegativeFloat  # of first values
    more_state_keys: list[str] = field(default_factory=list)  # of further states, which follow in each row's state

    @property
    def state_keys(self) -> list[str]:
        return [key for key in (self.state_key, *self.more_state_keys) if key]


@dataclass(frozen=True)
class KeyList(_Strict):
    """What is known about the keys of a dynamic table on one process, at the end of its row file."""

    clock: NonNegativeInt  # batches that the table was trained with
    count: NonNegativeInt


@dataclass(frozen=True)
class RowFile(_Strict):
    """A file with rows of tables; `row_files` reads it."""

    name: str
    tables: list[SavedTable]
    dim: PositiveInt
    state_columns: NonNegativeInt
    chunks: list[NonNegativeInt]  # number of rows in each
    keys: dict[str, KeyList] = field(default_factory=dict)  # by dynamic table


@dataclass(frozen=True)
class WrittenRows(_Strict):
    """Rows that were not trained: `row_writing` replaced those of a checkpoint by the rows of a file."""

    table: str
    rows: PositiveInt
    file: str
    xxh3: str  # digest of the file
    checkpoint: str  # that has all other rows


@dataclass(frozen=True)
class State(_Strict):
    """Everything in a checkpoint that is not a tensor."""

    position: Position
    origin: Origin
    saved_at: str
    base: str | None = None  # name of the full checkpoint that `changes` apply to
    base_manifest: str = ""  # digest of its manifest
    changes: list[RowChange] = field(default_factory=list)
    row_files: list[RowFile] = field(default_factory=list)
    written_rows: list[WrittenRows] = field(default_factory=list)


_AS_STATE = TypeAdapter(State)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: State

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def is_copy(self) -> bool:
        """Whether its directory has another name than the one it was committed with."""
        return self.path != step_path(self.path.parent, self.position.step)

    @property
    def base(self) -> Path | None:
        return self.path.parent / self.state.base if self.state.base else None

    @property
    def row_files(self) -> list[tuple[Path, RowFile]]:
        """The row files of the base and then its own, which replace rows of the base."""
        own = [(self.path, file) for file in self.state.row_files]
        return [*read(self.base).row_files, *own] if self.base else own


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def committed(directory: Path) -> list[Path]:
    """Return the checkpoints, oldest first; no copies such as step-10-best.

    Only the rename that commits a checkpoint gives it its name. It may have been damaged since.
    """
    try:
        paths = [path for path in directory.iterdir() if _STEP_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:  # for example a directory of another user
        raise as_user_error(error) or error from error
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def partial_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written before it is committed."""
    return directory / f".saving-{step_path(directory, step).name}"


def begin(partial: Path) -> None:
    """Create the directory to write into, and remove what interrupted saves and removals left."""
    directory = partial.parent
    if not directory.exists():
        directory.mkdir()
        sync_directory(directory.parent)
    for leftover in [*directory.glob(".saving-*"), *directory.glob(".removing-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()


def commit(partial: Path, state: State, files: dict[str, FileFacts]) -> Path:
    """Write the state, then the manifest, then rename. `files` describes the files that are already there."""
    step = state.position.step
    write_synced(partial / STATE, json.dumps(asdict(state), indent=1), lambda: reach("ckpt.sync", step))
    files = {**files, STATE: file_facts(partial / STATE)}
    reach("ckpt.before_manifest", step)
    manifest = {"format": _FORMATS[bool(state.row_files)], "files": dict(sorted(files.items()))}
    write_synced(partial / MANIFEST, json.dumps(manifest, indent=1), lambda: reach("ckpt.sync", step))
    sync_directory(partial)
    reach("ckpt.before_rename", step)
    final = step_path(partial.parent, step)
    if final.exists():  # this step was saved before training resumed from an earlier one
        with contextlib.suppress(CheckpointError):
            if verify(final).state.base == state.base:
                shutil.rmtree(partial)
                return final
        set_aside(final)
    os.rename(partial, final)
    sync_directory(final.parent)
    reach("ckpt.committed", step)
    return final


def prune(newest: Path, keep: int, keep_best: bool) -> None:
    """Remove all but the `keep` newest, the best, their bases, and those that another process is reading.

    First check that the newest is complete. Copies and corrupt checkpoints are neither counted nor removed.
    """
    best_step = verify(newest, digests=False).position.best_step  # its digests were just read back from the disk
    own: list[Checkpoint] = []
    for path in committed(newest.parent):
        with contextlib.suppress(UserError):
            if (path / MANIFEST).exists():
                own.append(_read_own(path))
    kept = {checkpoint.path for checkpoint in own[-keep:]}
    if keep_best:
        kept.add(step_path(newest.parent, best_step))
    for checkpoint in reversed(own):  # newest first: a base is older than the changes that need it
        if (checkpoint.path in kept or not _remove(checkpoint.path)) and checkpoint.base:
            kept.add(checkpoint.base)


def _remove(path: Path) -> bool:
    """Remove a checkpoint, unless another process is reading it. Return whether it was removed."""
    hidden = path.with_name(f".removing-{path.name}")
    with (path / MANIFEST).open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.rename(path, hidden)  # first, or a kill would leave an incomplete one that looks complete
    shutil.rmtree(hidden)
    return True


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep a run from pruning a checkpoint, and so its base, within the block. This needs no permission to write.

    On a file system without locks this does nothing: whoever reads a checkpoint that is gone gets a PrunedError.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would never open otherwise
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def file_facts(file: Path, on_block: OnBlock = lambda: None) -> FileFacts:
    return {"bytes": file.stat().st_size, "xxh3": digest(file, on_block)}


def set_aside(path: Path) -> None:
    """Rename a checkpoint to bad-step-N, so that it is kept but never loaded."""
    target = path.with_name(f"bad-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(path, target)
    log.warning("%s can no longer be used; renamed to %s", path.name, target)


def read(path: Path) -> Checkpoint:
    """Read the state of a checkpoint without checking its files."""
    try:
        state = _AS_STATE.validate_json(read_small(path / STATE))
        if state.base is not None and not _STEP_NAME.fullmatch(state.base):
            raise ValueError(f"base {state.base!r}")
        if contradiction := state.position.contradiction():
            raise ValueError(contradiction)
    except (ValidationError, ValueError) as error:
        fact = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _corrupt(path, f"{path / STATE}: unreadable state ({fact})") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    return Checkpoint(path, state)


def _read_own(path: Path) -> Checkpoint:
    """Read the state of a checkpoint that must be no copy."""
    checkpoint = read(path)
    step = checkpoint.position.step
    if checkpoint.is_copy:
        raise CheckpointError(
            f"{path} holds the checkpoint of step {step:,} (its state.json says so): it is a copy, or was renamed. "
            "Move copies to another directory; the checkpoint of this step is named "
            f"{step_path(path.parent, step).name}."
        )
    return checkpoint


def verify(path: Path, digests: bool = True, on_block: OnBlock = lambda: None) -> Checkpoint:
    """Compare all files, and those of the base, with the manifests. CheckpointError names the first that differs.

    Without `digests`, compare names and sizes, and the digests of the two small files that describe the others.
    """
    try:
        _verify_files(path, digests, on_block)
        checkpoint = _read_own(path)
        if base := checkpoint.base:
            if not (base / MANIFEST).is_file():
                raise _corrupt(path, f"{path} holds changes since {base}, whose {MANIFEST} is missing")
            if digest(base / MANIFEST) != checkpoint.state.base_manifest:
                raise _corrupt(path, f"{path} holds changes since {base}, whose {MANIFEST} is another now")
            _verify_files(base, digests, on_block)
    except OSError as error:  # a bad sector, for example
        raise _unreadable(path, error) from error
    return checkpoint


def _verify_files(path: Path, digests: bool, on_block: OnBlock) -> None:
    manifest = path / MANIFEST
    try:
        content = read_json(manifest)
        if content["format"] not in _FORMATS:
            raise CheckpointError(
                f"{manifest}: format {content['format']!r}, but this version of recmill reads "
                f"{' and '.join(map(str, _FORMATS))}. Use the version that wrote it."
            )
        listed = {name: (int(facts["bytes"]), str(facts["xxh3"])) for name, facts in content["files"].items()}
    except FileNotFoundError as error:
        raise _corrupt(path, f"{manifest}: missing") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(path, f"{manifest}: unreadable manifest ({type(error).__name__}: {error})") from error
    if unlisted := {STATE, _METADATA} - listed.keys():
        raise _corrupt(path, f"{manifest}: does not list {' and '.join(sorted(unlisted))}")
    for name, (size, expected) in listed.items():
        file = path / name
        if file.parent != path or not file.is_file() or file.is_symlink():
            raise _corrupt(path, f"{file}: missing")
        if file.stat().st_size != size:
            raise _corrupt(path, f"{file}: {file.stat().st_size:,} bytes, expected {size:,}")
        if (digests or name in (STATE, _METADATA)) and digest(file, on_block) != expected:
            raise _corrupt(path, f"{file}: its content changed since it was saved")
    for file in path.iterdir():
        if file.name not in listed and file.name != MANIFEST:
            raise _corrupt(path, f"{file}: not part of this checkpoint")


def _unreadable(path: Path, error: OSError) -> UserError:
    known = as_user_error(error)
    if isinstance(error, PermissionError) and known:
        return known
    return _corrupt(path, f"{error.filename or path}: cannot be read ({error.strerror})")


def _corrupt(path: Path, fact: str) -> CheckpointError:
    if not os.path.lexists(path):
        return PrunedError(f"{path} was removed while it was being read. Run the same command again.")
    return CheckpointError(
        f"{fact}. Restore it from an intact copy, or resume from the newest complete checkpoint with --fallback "
        f"(recmill checkpoint verify {path.parent.parent} checks all)."
    )
