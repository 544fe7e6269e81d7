"""Checkpoints on disk: whole or not there, each file with its digest. No torch, so that they can be listed at once.

    step-00000120/  MANIFEST.json (last written: every file's bytes and digest)  state.json  .metadata  *.distcp

A step is written into `.saving-step-N`, synced, and only then renamed to `step-N`: a kill at any moment leaves the
checkpoints before it as they were.
"""

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from recmill.errors import CheckpointError
from recmill.failpoints import reach
from recmill.files.atomic import sync_directory
from recmill.files.digests import digest
from recmill.launch.watchdog import beat

log = logging.getLogger(__name__)

MANIFEST, STATE = "MANIFEST.json", "state.json"
_FORMAT = 2
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Position:
    """Where training stands: `step` steps done, the next batch is `batch` of `epoch`.

    The loss since the last report, how validation went and the scale of float16 come along, so that a resumed run
    does what an unbroken one would. Order, masks and dropout are functions of the seed and these numbers.
    """

    __pydantic_config__ = _STRICT

    step: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    batch: NonNegativeInt = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    best: float | None = None  # of the validations so far
    best_step: NonNegativeInt = 0
    worse_evals: NonNegativeInt = 0  # since then
    loss_scale: float = 0.0  # 0: none yet
    steps_at_scale: NonNegativeInt = 0

    @property
    def is_best(self) -> bool:
        return 0 < self.best_step == self.step

    def judged(self, value: float | None) -> "Position":
        """After a validation at this step; None: it had no value."""
        if value is not None and (self.best is None or value > self.best):
            return replace(self, best=value, best_step=self.step, worse_evals=0)
        return replace(self, worse_evals=self.worse_evals + 1)


@dataclass(frozen=True)
class Origin:
    """What a checkpoint was made by. Random numbers need the seed alone: they are counted, not drawn from a stream."""

    __pydantic_config__ = _STRICT

    config: str  # fingerprint of all keys that make it another run
    dataset: str  # fingerprint of what it was trained on
    seed: NonNegativeInt
    global_batch_size: NonNegativeInt
    world_size: NonNegativeInt
    versions: dict[str, str]


@dataclass(frozen=True)
class RowChange:
    """Where changed rows of one tensor are: `ids` and `values` name tensors of the same checkpoint."""

    __pydantic_config__ = _STRICT

    key: str  # of the whole tensor, in the full checkpoint
    ids: str
    values: str
    column: NonNegativeInt  # of the first value
    bits: int


@dataclass(frozen=True)
class State:
    """All that is not a tensor."""

    __pydantic_config__ = _STRICT

    position: Position
    origin: Origin
    saved_at: str
    base: str | None = None  # the full checkpoint that `changes` are to be applied to
    base_manifest: str = ""  # its digest
    changes: list[RowChange] = field(default_factory=list)


_AS_STATE = TypeAdapter(State)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: State

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def base(self) -> Path | None:
        return self.path.parent / self.state.base if self.state.base else None


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def committed(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    steps = {
        path.parent: re.fullmatch(r"step-(\d+)", path.parent.name) for path in directory.glob(f"step-*/{MANIFEST}")
    }
    ours = {path: int(step[1]) for path, step in steps.items() if step}  # not a copy that somebody named step-10-best
    return sorted(ours, key=ours.__getitem__)


def begin(directory: Path, step: int) -> Path:
    """A new hidden directory for this step; what killed saves and removals left goes."""
    if not directory.exists():
        directory.mkdir()
        sync_directory(directory.parent)
    torn = [path for path in directory.glob("step-*") if path.name[5:].isdigit() and not (path / MANIFEST).exists()]
    for left in [*directory.glob(".saving-*"), *torn]:
        shutil.rmtree(left, ignore_errors=True)
    partial = directory / f".saving-{path_of(directory, step).name}"
    partial.mkdir()
    return partial


def commit(partial: Path, state: State, files: dict[str, dict[str, Any]]) -> Path:
    """`files`: name -> bytes and digest of every file that is there. The manifest comes last, then the name."""
    step = state.position.step
    text = json.dumps(asdict(state), indent=1)
    _write_synced(partial / STATE, text, step)
    files = {**files, STATE: facts_of(partial / STATE)}
    reach("ckpt.before_manifest", step)
    manifest = {"format": _FORMAT, "files": dict(sorted(files.items()))}
    _write_synced(partial / MANIFEST, json.dumps(manifest, indent=1), step)
    sync_directory(partial)
    reach("ckpt.before_rename", step)
    final = path_of(partial.parent, step)
    if final.exists():  # this step was saved before; training then went back to an earlier one
        if _is_good(final) and read(final).state.base == state.base:
            shutil.rmtree(partial)
            return final
        set_aside(final)
    os.rename(partial, final)
    sync_directory(final.parent)
    reach("ckpt.committed", step)
    return final


def prune(directory: Path, keep: int, keep_best: bool) -> None:
    """All but the newest, the best, and the full ones that these need; none before a newer one is seen to be whole."""
    paths = committed(directory)
    verified(paths[-1], digests=False)  # its digests were just read back from the disk
    kept = {*paths[-keep:], *([best(directory)] if keep_best else [])}
    kept |= {_base_of(path) for path in kept if path}
    for old in paths:
        if old not in kept:
            (old / MANIFEST).unlink()  # first, or a kill would leave half of one that looks whole
            shutil.rmtree(old)


def _base_of(path: Path) -> Path | None:
    try:
        return read(path).base
    except CheckpointError:
        return None  # an old one that is damaged must not stop a new one


def facts_of(file: Path, on_block: Callable[[], None] = lambda: None) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3": digest(file, on_block)}


def _beat_reading() -> None:
    """Reading a large file is no hang; in another thread it says nothing of the main one."""
    if threading.current_thread() is threading.main_thread():
        beat("reading a checkpoint")


def best(directory: Path) -> Path | None:
    """That of the best validation of all, as the newest tells; None if it was not kept."""
    paths = committed(directory)
    wanted = path_of(directory, read(paths[-1]).position.best_step) if paths else None
    return wanted if wanted in paths else None


def chosen(directory: Path, which: str, fallback: bool = False) -> Checkpoint | None:
    """The newest or the best, every digest checked; None if there is none. `fallback`: or the newest that is whole."""
    candidates = committed(directory)[::-1]
    if which == "best":
        path = best(directory)
        if path is None:
            return None
        candidates = [path, *candidates]
    problem: CheckpointError | None = None
    for path in candidates:
        try:
            found = verified(path)
        except CheckpointError as error:
            if not fallback:
                raise
            problem = problem or error
            log.warning("%s", error)
            continue
        if problem:
            log.warning("falling back to %s, the newest checkpoint that is whole", path)
        return found
    if problem:
        raise CheckpointError(f"no checkpoint in {directory} is whole. The newest: {problem}")
    return None


def set_aside(path: Path) -> None:
    """Out of the way, but not destroyed."""
    target = path.with_name(f"bad-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(path, target)
    log.warning("%s is of no more use: it is now %s", path.name, target)


def read(path: Path) -> Checkpoint:
    try:
        state = _AS_STATE.validate_json((path / STATE).read_bytes())
        if state.base is not None and not re.fullmatch(r"step-\d+", state.base):
            raise ValueError(f"base {state.base!r}")
    except (ValidationError, ValueError, OSError) as error:
        fact = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(f"{path / STATE}: unreadable state ({fact}). {_remedy(path)}") from error
    return Checkpoint(path, state)


def verified(path: Path, digests: bool = True) -> Checkpoint:
    """Every file as its manifest says, of the full checkpoint below it as well; an error names the file that is not."""
    try:
        return _verified(path, digests)
    except OSError as error:  # a bad sector, say
        place = error.filename or path
        raise CheckpointError(f"{place}: cannot be read ({error.strerror}). {_remedy(path)}") from error


def _verified(path: Path, digests: bool) -> Checkpoint:
    _verify_files(path, digests)
    found = read(path)
    if found.base:
        if not (found.base / MANIFEST).is_file():
            raise CheckpointError(f"{path} holds changes of {found.base}, which is not there. {_remedy(path)}")
        if digest(found.base / MANIFEST) != found.state.base_manifest:
            raise CheckpointError(f"{path} holds changes of another {found.base} than is there now. {_remedy(path)}")
        _verify_files(found.base, digests)
    return found


def _verify_files(path: Path, digests: bool) -> None:
    manifest = path / MANIFEST
    try:
        content = json.loads(manifest.read_bytes())
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{manifest}: format {content['format']!r}, and this recmill reads {_FORMAT}. Use the recmill that "
                "made it."
            )
        listed = {name: (int(facts["bytes"]), str(facts["xxh3"])) for name, facts in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{manifest}: unreadable manifest ({error!r}). {_remedy(path)}") from error
    for name in {STATE, ".metadata"} - listed.keys():
        raise CheckpointError(f"{manifest}: does not list {name}. {_remedy(path)}")
    for name, (size, expected) in listed.items():
        file = path / name
        if file.parent != path or not file.is_file() or file.is_symlink():
            raise CheckpointError(f"{file}: missing. {_remedy(path)}")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: {file.stat().st_size:,} bytes, expected {size:,}. {_remedy(path)}")
        if digests and digest(file, _beat_reading) != expected:
            raise CheckpointError(f"{file}: its content changed since it was saved. {_remedy(path)}")
    for file in path.iterdir():
        if file.name not in listed and file.name != MANIFEST:
            raise CheckpointError(f"{file}: not part of this checkpoint. {_remedy(path)}")


def _is_good(path: Path) -> bool:
    try:
        verified(path)
    except CheckpointError:
        return False
    return True


def _remedy(path: Path) -> str:
    return (
        "Copy it again from where it was whole, or go on from the newest checkpoint that is whole with --fallback "
        f"(recmill checkpoint verify {path.parent.parent} shows all)."
    )


def _write_synced(path: Path, text: str, step: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        reach("ckpt.sync", step)
        os.fsync(file.fileno())
