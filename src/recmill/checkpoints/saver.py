"""Saving while training goes on: the loop waits for a copy, a thread writes, digests and commits it."""

import contextlib
import logging
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints import format as saved
from recmill.checkpoints.format import Origin, Position, RowChange, State
from recmill.checkpoints.incremental import TouchedRows, as_bytes, is_rows, pieces, taken_changes
from recmill.checkpoints.loading import state_of
from recmill.config.sections import CheckpointSection
from recmill.errors import ResourceError, UserError, as_user_error
from recmill.failpoints import reach
from recmill.files.digests import digest
from recmill.hardware.memory import available_memory_bytes
from recmill.launch.watchdog import SAVING, beat
from recmill.observe.run_dir import now
from recmill.training.guards import is_finite
from recmill.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = timedelta(hours=6)  # a slow disk is no hang
_ROOM_FOR_COPY = 1.1


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of this rank's pieces."""
    return sum(piece.values.nbytes for tensor in tensors for piece in pieces(tensor))


class Saver:
    """All ranks call alike. The thread has a process group of its own, so it never meets the training's collectives."""

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        origin: Origin,
        section: CheckpointSection,
        world: World,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._directory, self._model, self._optimizer = directory, model, optimizer
        self._origin, self._section, self._world, self._on_commit = origin, section, world, on_commit
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if dist.is_initialized() else None
        self._touched = TouchedRows(model, optimizer) if section.full_every > 1 else None
        self._base: tuple[str, str] | None = None  # the last full checkpoint of this process: its name and digest
        self._since_full = 0
        self._buffers: list[Tensor] = []
        self.committed_step: int | None = None
        self._needed = 0  # bytes of the checkpoint that is being written
        self._thread: threading.Thread | None = None
        self._is_waited_for = False
        self._error: Exception | None = None

    def save(self, position: Position) -> None:
        """Returns when the state may change again; an error of it comes later, from `settle()`."""
        self._wait()
        reach("ckpt.begin", position.step)
        started = time.monotonic()
        state = state_of(self._model, self._optimizer)
        rows: dict[str, Tensor] = {}
        changes: list[RowChange] = []
        if self._touched and self._base and self._since_full < self._section.full_every:
            rows, changes = taken_changes(state, self._touched, self._world.rank, self._section.row_bits)
            state = {key: value for key, value in state.items() if not is_rows(key, value)}
            base = self._base
        else:
            base = None
            if self._touched:
                self._touched.clear()
        in_background = self._section.background and self._has_room_for({**state, **rows})
        if in_background:
            state = self._copied(state)
        reach("ckpt.copied", position.step)
        stall = time.monotonic() - started
        arguments = ({**state, **rows}, changes, base, position, started, stall if in_background else None)
        self._thread = threading.Thread(target=self._write, args=arguments, name=SAVING, daemon=True)
        self._thread.start()
        if not in_background:
            self._wait()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def settle(self) -> None:
        """After a failure, all ranks together: an error, or, where the config allows it, a line in the log."""
        self._wait()
        error, self._error = self._error, None
        if error is None:
            return
        if self._section.on_error == "stop" or not isinstance(error, ResourceError):
            raise error
        log.error("no checkpoint: %s Training goes on, as checkpoint.on_error says.", error)

    def finish(self) -> None:
        """At the end a checkpoint that could not be saved is always an error."""
        self._wait()
        if self._error:
            raise self._error

    def _wait(self) -> None:
        if self._thread:
            self._is_waited_for = True
            beat("waiting for a checkpoint to be written")
            self._thread.join()
            self._is_waited_for = False
            self._thread = None

    def _has_room_for(self, state: dict[str, Any]) -> bool:
        """On every rank, or all save the tensors themselves and wait. Only the first copy takes memory."""
        needed = max(_bytes(state.values()) - _bytes(self._buffers), 0)
        available = available_memory_bytes() // self._world.local_size
        (lacking,) = self._world.sum([float(needed * _ROOM_FOR_COPY > available)])
        if lacking and self._world.is_main:
            fact = "a copy of the tables needs %.1f GB and %.1f GB are free: training waits for this checkpoint"
            log.warning(fact, needed / 1e9, available / 1e9)
        return not lacking

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        buffers = iter(self._buffers)
        used: list[Tensor] = []

        def copy(values: Tensor) -> Tensor:
            buffer = next(buffers, None)
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype)
            used.append(buffer.copy_(values.detach()))
            return buffer

        copies: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, ShardedTensor):
                shards = [Shard(copy(shard.tensor), shard.metadata) for shard in value.local_shards()]
                copies[key] = ShardedTensor._init_from_local_shards_and_global_metadata(
                    shards, sharded_tensor_metadata=value.metadata(), process_group=value._process_group
                )
            else:
                copies[key] = copy(value)
        if len(used) >= len(self._buffers):  # those of a full one stay, for the next full one
            self._buffers = used
        return copies

    # Below: the thread.

    def _write(
        self,
        state: dict[str, Any],
        changes: list[RowChange],
        base: tuple[str, str] | None,
        position: Position,
        started: float,
        stall: float | None,
    ) -> None:
        partial = self._directory / f".saving-{saved.path_of(self._directory, position.step).name}"
        try:
            self._together(lambda: self._check(state, position))
            self._needed = sum(self._together(lambda: self._bytes_to_write(state, changes)))
            self._together(lambda: self._begin(position))
            self._write_shards(state, partial)
            files = self._together(lambda: self._digests(partial, position))
            all_changes = [change for part in self._together(lambda: changes) for change in part]
            name, manifest = base or (None, "")
            facts = State(position, self._origin, now(), name, manifest, all_changes)
            (committed, *_) = self._together(lambda: self._commit(partial, facts, files, started, stall))
            assert committed is not None
            self.committed_step = position.step
            self._base, self._since_full = (committed, 1) if base is None else (base, self._since_full + 1)
        except Exception as error:  # noqa: BLE001 - told by settle(), in the main thread
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # give the space back
            self._base = None  # rows since then may be known to nobody: the next one is full
            self._error = self._told(error)

    def _told(self, error: Exception) -> Exception:
        """What a disk can cause is a user's to mend; all else stays what it is: a partner that died, or a defect."""
        if isinstance(error, OSError):
            return self._not_written(error.strerror or str(error))
        return as_user_error(error) or error

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result, in rank order; if one fails, its error on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
            self._beat()
        except Exception as problem:  # noqa: BLE001 - raised below, on all ranks
            error = self._told(problem)
            if not isinstance(error, UserError):  # others may not be able to read it
                error = RuntimeError(f"rank {self._world.rank} could not save:\n{traceback.format_exc()}")
        everyone: list[Any] = [(result, error)]
        if self._world.size > 1:
            everyone = [None] * self._world.size
            dist.all_gather_object(everyone, (result, error), group=self._group)
        for _, first in everyone:
            if first is not None:
                raise first
        return [result for result, _ in everyone]

    def _check(self, state: dict[str, Any], position: Position) -> None:
        for key, value in state.items():
            if not all(is_finite(piece.values) for piece in pieces(value)):
                raise UserError(
                    f"After step {position.step:,} {key.removeprefix('model.')} holds values that are not finite "
                    f"numbers (on rank {self._world.rank}). It was not saved: the checkpoints on disk are from before. "
                    "Train again with lower optim.dense.lr and optim.tables.lr."
                )

    def _bytes_to_write(self, state: dict[str, Any], changes: list[RowChange]) -> int:
        for change in changes:
            if change.bits == 8:
                state[change.values] = as_bytes(state[change.values])
        own = {name for change in changes for name in (change.ids, change.values)}
        mine = (k for k, v in state.items() if isinstance(v, ShardedTensor) or self._world.is_main or k in own)
        return _bytes(state[key] for key in mine)

    def _begin(self, position: Position) -> None:
        if self._world.is_main:
            partial = saved.begin(self._directory, position.step)
            if self._needed > shutil.disk_usage(partial).free:
                raise self._not_written("No space left on device")
        reach("ckpt.shards", position.step)

    def _not_written(self, fact: str) -> ResourceError:
        free = "an unknown number"
        with contextlib.suppress(OSError):  # it may be the place itself that is gone
            place = self._directory if self._directory.exists() else self._directory.parent
            free = f"{shutil.disk_usage(place).free:,}"
        return ResourceError(
            f"{self._directory}: a checkpoint could not be written ({fact}). It needs {self._needed:,} bytes, {free} "
            "are free. The ones before it are untouched. Make room or choose another disk, then run the same command "
            "again."
        )

    def _write_shards(self, state: dict[str, Any], partial: Path) -> None:
        """Every rank its own files, synced."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                writer = dcp.FileSystemWriter(partial, sync_files=True, overwrite=False)
                dcp.save(state, storage_writer=writer, process_group=self._group)
        except dcp.CheckpointException as error:
            fact = next((str(failure[0]) for failure in error.failures.values()), str(error))
            raise self._not_written(fact) from error  # a full disk may appear as 'unexpected pos'

    def _digests(self, partial: Path, position: Position) -> dict[str, Any]:
        """Of what this rank wrote, read back from the files."""
        reach("ckpt.written", position.step)
        names = [*partial.glob(f"__{self._world.rank}_*"), *([partial / ".metadata"] if self._world.is_main else [])]
        return {file.name: saved.facts_of(file, self._beat) for file in names}

    def _beat(self) -> None:
        if self._is_waited_for:  # otherwise training has beats of its own
            beat("waiting for a checkpoint to be written")

    def _commit(
        self, partial: Path, state: State, files: list[dict[str, Any]], started: float, stall: float | None
    ) -> tuple[str, str] | None:
        if not self._world.is_main:
            return None
        step = state.position.step
        final = saved.commit(partial, state, {name: facts for part in files for name, facts in part.items()})
        saved.prune(self._directory, self._section.keep, self._section.keep_best)
        reach("ckpt.pruned", step)
        kind = f"{sum(part['bytes'] for own in files for part in own.values()) / 1e6:,.1f} MB"
        kind += f" of changes since {state.base}" if state.base else ""
        waited = "" if stall is None else f", of which training waited {stall:.2f}"
        seconds = time.monotonic() - started
        log.info("checkpoint committed step=%d in %.2f s%s: %s, %s", step, seconds, waited, final, kind)
        with contextlib.suppress(OSError):  # it is committed, whatever happens to a note of it
            self._on_commit(step)
        return final.name, digest(final / saved.MANIFEST)
