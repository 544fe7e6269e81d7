"""Save checkpoints while training continues: the loop waits for a copy, a thread writes, digests and commits it."""

import contextlib
import logging
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints import format as on_disk
from recmill.checkpoints.format import FileFacts, Origin, Position, RowChange, State
from recmill.checkpoints.incremental import TouchedRows, collect_changes, has_table_rows, quantize_rows
from recmill.checkpoints.loading import state_of
from recmill.config.sections import CheckpointSection
from recmill.errors import ResourceError, UserError, as_user_error
from recmill.failpoints import reach
from recmill.files.digests import digest
from recmill.files.timestamps import utc_now
from recmill.hardware.memory import available_memory_bytes
from recmill.launch.watchdog import Heartbeat
from recmill.tables.torchrec_internals import is_sharded, local_shards, map_shards
from recmill.training.guards import is_finite
from recmill.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = timedelta(hours=6)  # a slow disk is no hang
_COPY_MARGIN = 1.1
_WAITING = "waiting for a checkpoint to be written"


class _Base(NamedTuple):
    """A full checkpoint that later ones hold changes of."""

    name: str
    manifest_digest: str


@dataclass
class _Save:
    """A checkpoint to write. A full one has no base, no rows and no changes."""

    position: Position
    started: float
    tensors: dict[str, Tensor]  # those of the model and the optimizer, or copies
    rows: dict[str, Tensor] = field(default_factory=dict)  # copies of changed rows, and their ids
    changes: list[RowChange] = field(default_factory=list)
    base: _Base | None = None
    stall_seconds: float | None = None  # how long training waited; None: until the end
    bytes: int = 0  # over all ranks


class Saver:
    """Saves on all ranks, which call each method together.

    The thread has its own process group, so its collectives never mix with those of training.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        origin: Origin,
        section: CheckpointSection,
        world: World,
        heartbeat: Heartbeat,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._directory = directory
        self._model = model
        self._optimizer = optimizer
        self._origin = origin
        self._section = section
        self._world = world
        self._heartbeat = heartbeat
        self._on_commit = on_commit
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if dist.is_initialized() else None
        self._touched = TouchedRows(model, optimizer) if section.full_every > 1 else None
        self._base: _Base | None = None  # the last full checkpoint of this process
        self._saves_since_full = 0
        self._buffers: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._is_waited_for = False
        self._error: Exception | None = None
        self.committed_step: int | None = None

    def save(self, position: Position) -> None:
        """Start to save, and return when the tensors may change again. Errors are raised later."""
        self._wait()
        reach("ckpt.begin", position.step)
        save = self._new_save(position)
        in_background = self._section.background and self._has_memory_for_copy(save.tensors | save.rows)
        if in_background:
            save.tensors = self._copy(save.tensors)
        reach("ckpt.copied", position.step)
        if in_background:
            save.stall_seconds = time.monotonic() - save.started
        self._thread = threading.Thread(target=self._write, args=(save,), name="saving", daemon=True)
        self._thread.start()
        if not in_background:
            self._wait()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def handle_failure(self) -> None:
        """Raise the error of a failed save, or log it if checkpoint.on_error says so."""
        self._wait()
        error, self._error = self._error, None
        if error is None:
            return
        if self._section.on_error == "stop" or not isinstance(error, ResourceError):
            raise error
        log.error("no checkpoint: %s Training continues, as checkpoint.on_error says.", error)

    def finish(self) -> None:
        """Wait for the last save. Its failure is an error, whatever checkpoint.on_error says."""
        self._wait()
        if self._error:
            raise self._error

    def _new_save(self, position: Position) -> _Save:
        """Gather what to save: changed rows if a full checkpoint of this process is recent enough, else everything."""
        started = time.monotonic()
        state = state_of(self._model, self._optimizer)
        if self._touched and self._base and self._saves_since_full < self._section.full_every:
            rows, changes = collect_changes(state, self._touched, self._world.rank, self._section.row_bits)
            others = {key: value for key, value in state.items() if not has_table_rows(key, value)}
            return _Save(position, started, others, rows, changes, self._base)
        if self._touched:
            self._touched.clear()
        return _Save(position, started, state)

    def _wait(self) -> None:
        if self._thread:
            self._is_waited_for = True
            self._heartbeat.beat(_WAITING)
            self._thread.join()
            self._is_waited_for = False
            self._thread = None

    def _has_memory_for_copy(self, tensors: dict[str, Tensor]) -> bool:
        """Return whether every rank has; else all save their tensors themselves and wait. Later copies reuse memory."""
        needed = max(_local_bytes(tensors.values()) - _local_bytes(self._buffers), 0)
        available = available_memory_bytes() // self._world.local_size
        (lacking,) = self._world.sum([float(needed * _COPY_MARGIN > available)])
        if lacking and self._world.is_main:
            fact = "a copy of the tables needs %.1f GB and %.1f GB are free: training waits for this checkpoint"
            log.warning(fact, needed / 1e9, available / 1e9)
        return not lacking

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        buffers = iter(self._buffers)
        used: list[Tensor] = []

        def copy(values: Tensor) -> Tensor:
            buffer = next(buffers, None)
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype)
            used.append(buffer.copy_(values.detach()))
            return buffer

        copies = {key: map_shards(value, copy) for key, value in tensors.items()}
        if len(used) >= len(self._buffers):  # keep those of a full checkpoint for the next full one
            self._buffers = used
        return copies

    # The methods below run in the thread.

    def _write(self, save: _Save) -> None:
        partial = on_disk.partial_path(self._directory, save.position.step)
        save.tensors = save.tensors | save.rows
        try:
            self._on_all_ranks(save, lambda: self._check_finite(save))
            save.bytes = sum(self._on_all_ranks(save, lambda: self._bytes_to_write(save)))
            self._on_all_ranks(save, lambda: self._begin(save))
            self._write_shards(save, partial)
            files = self._on_all_ranks(save, lambda: self._file_facts(partial, save.position))
            changes = [change for own in self._on_all_ranks(save, lambda: save.changes) for change in own]
            committed, *_ = self._on_all_ranks(save, lambda: self._commit(save, partial, changes, files))
            assert committed is not None
            self.committed_step = save.position.step
            self._base = save.base or committed
            self._saves_since_full = self._saves_since_full + 1 if save.base else 1
        except Exception as error:  # noqa: BLE001 - raised by handle_failure() or finish(), in the main thread
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # give the space back
            self._base = None  # rows touched since then may be lost: the next checkpoint must be full
            self._error = self._as_save_error(error, save)

    def _as_save_error(self, error: Exception, save: _Save) -> Exception:
        """Convert disk errors to ResourceError; a lost process or a defect stays as it is."""
        if isinstance(error, OSError):
            return self._not_written(error.strerror or str(error), save)
        return as_user_error(error) or error

    def _on_all_ranks(self, save: _Save, action: Callable[[], T]) -> list[T]:
        """Return the results of all ranks, in order. If `action` fails on one rank, raise its error on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
            self._beat()
        except Exception as problem:  # noqa: BLE001 - raised below, on all ranks
            error = self._as_save_error(problem, save)
            if not isinstance(error, UserError):  # other ranks may not be able to unpickle it
                error = RuntimeError(f"rank {self._world.rank} could not save:\n{traceback.format_exc()}")
        everyone: list[Any] = [(result, error)]
        if self._world.size > 1:
            everyone = [None] * self._world.size
            dist.all_gather_object(everyone, (result, error), group=self._group)
        for _, first in everyone:
            if first is not None:
                raise first
        return [result for result, _ in everyone]

    def _check_finite(self, save: _Save) -> None:
        for key, value in save.tensors.items():
            if not all(is_finite(shard.values) for shard in local_shards(value)):
                raise UserError(
                    f"After step {save.position.step:,} {key.removeprefix('model.')} holds values that are not finite "
                    f"numbers (on rank {self._world.rank}). It was not saved: the checkpoints on disk are from before. "
                    "Train again with lower optim.dense.lr and optim.tables.lr."
                )

    def _bytes_to_write(self, save: _Save) -> int:
        """Quantize rows where the config says so, and return the bytes that this rank writes."""
        for change in save.changes:
            if change.bits == 8:
                save.tensors[change.values] = quantize_rows(save.tensors[change.values])
        own = {key for change in save.changes for key in (change.ids, change.values)}
        written = (
            value for key, value in save.tensors.items() if is_sharded(value) or self._world.is_main or key in own
        )
        return _local_bytes(written)

    def _begin(self, save: _Save) -> None:
        if self._world.is_main:
            partial = on_disk.begin(self._directory, save.position.step)
            if save.bytes > shutil.disk_usage(partial).free:
                raise self._not_written("No space left on device", save)
        reach("ckpt.shards", save.position.step)

    def _not_written(self, fact: str, save: _Save) -> ResourceError:
        free = "an unknown number"
        with contextlib.suppress(OSError):  # the directory itself may be gone
            existing = self._directory if self._directory.exists() else self._directory.parent
            free = f"{shutil.disk_usage(existing).free:,}"
        return ResourceError(
            f"{self._directory}: a checkpoint could not be written ({fact}). It needs {save.bytes:,} bytes, {free} "
            "are free. Earlier checkpoints are untouched. Make room or choose another disk, then run the same command "
            "again."
        )

    def _write_shards(self, save: _Save, partial: Path) -> None:
        """Write and sync the files of all ranks."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                writer = dcp.FileSystemWriter(partial, sync_files=True, overwrite=False)
                dcp.save(save.tensors, storage_writer=writer, process_group=self._group)
        except dcp.CheckpointException as error:
            fact = next((str(failure[0]) for failure in error.failures.values()), str(error))
            raise self._not_written(fact, save) from error  # a full disk may appear as 'unexpected pos'

    def _file_facts(self, partial: Path, position: Position) -> dict[str, FileFacts]:
        """Read back what this rank wrote."""
        reach("ckpt.written", position.step)
        files = [*partial.glob(f"__{self._world.rank}_*")]
        if self._world.is_main:
            files.append(partial / ".metadata")
        return {file.name: on_disk.file_facts(file, self._beat) for file in files}

    def _beat(self) -> None:
        if self._is_waited_for:  # otherwise training beats
            self._heartbeat.beat(_WAITING)

    def _commit(
        self, save: _Save, partial: Path, changes: list[RowChange], files: list[dict[str, FileFacts]]
    ) -> _Base | None:
        """Commit on rank 0, and return the checkpoint as a base of later ones."""
        if not self._world.is_main:
            return None
        step = save.position.step
        name, manifest_digest = save.base or (None, "")
        state = State(save.position, self._origin, utc_now(), name, manifest_digest, changes)
        all_files = {file: facts for own in files for file, facts in own.items()}
        final = on_disk.commit(partial, state, all_files)
        on_disk.prune(self._directory, self._section.keep, self._section.keep_best)
        reach("ckpt.pruned", step)
        size = f"{sum(facts['bytes'] for facts in all_files.values()) / 1e6:,.1f} MB"
        kind = f" of changes since {name}" if name else ""
        waited = "" if save.stall_seconds is None else f", of which training waited {save.stall_seconds:.2f}"
        seconds = time.monotonic() - save.started
        log.info("checkpoint committed step=%d in %.2f s%s: %s, %s%s", step, seconds, waited, final, size, kind)
        with contextlib.suppress(OSError):  # the checkpoint is committed, even if this cannot be noted
            self._on_commit(step)
        return _Base(final.name, digest(final / on_disk.MANIFEST))


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards."""
    return sum(shard.values.nbytes for tensor in tensors for shard in local_shards(tensor))
