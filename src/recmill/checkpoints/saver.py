"""Save checkpoints while training continues: training waits only for a copy, which a thread writes and commits."""

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints import format as on_disk
from recmill.checkpoints.chunks import ChunkedPlanner
from recmill.checkpoints.format import FileFacts, Origin, Position, RowChange, RowFile, SavedTable, State
from recmill.checkpoints.incremental import TouchedRows, collect_changes, has_table_rows, quantize_rows
from recmill.checkpoints.loading import readable_name, saved_tables, state_of, without_tables
from recmill.checkpoints.row_files import NotFiniteError, write_row_file
from recmill.config.sections import CheckpointSection
from recmill.errors import ResourceError, UserError, as_user_error, remedy_for
from recmill.failpoints import reach
from recmill.files.digests import digest
from recmill.files.timestamps import utc_now
from recmill.hardware.memory import available_memory_bytes
from recmill.launch.watchdog import Heartbeat
from recmill.tables.cached_tables import CachedTables, RowNames
from recmill.tables.stores.memory_rows import MemorySnapshot
from recmill.tables.stores.row_cache import RowCache, Snapshot
from recmill.tables.table_lookup import cached_tables
from recmill.tables.torchrec_internals import copy_to_cpu, is_sharded, local_shards
from recmill.world import World, use_device

log = logging.getLogger(__name__)

T = TypeVar("T")
_Base = tuple[str, str]  # name of a full checkpoint, and the digest of its manifest

_TIMEOUT = timedelta(hours=6)  # long, because a slow disk is not a hang
COPY_MARGIN = 1.1
_POLL_SECONDS = 1.0
_REMOVED = "The run directory was removed or renamed while it was in use: restore it, or choose another --run."


class SaveError(RuntimeError):
    """An error of a save that no user can cause. Its note is the traceback of the rank on which it happened."""


@dataclass
class _Save:
    """A checkpoint to write. A full one has no base, no rows and no changes."""

    position: Position
    partial: Path  # directory to write into
    started: float
    tensors: dict[str, Tensor]  # those of the model and the optimizer, or copies
    rows: dict[str, Tensor] = field(default_factory=dict)  # copies of changed rows, and their ids
    changes: list[RowChange] = field(default_factory=list)
    base: _Base | None = None
    snapshots: list[tuple[CachedTables, Snapshot | MemorySnapshot]] = field(default_factory=list)
    names: list[RowNames | None] = field(default_factory=list)  # of the rows of each snapshot
    tables: list[SavedTable] = field(default_factory=list)  # that are cached
    stall_seconds: float | None = None  # how long training waited for the copy; None: it waits until the end
    bytes: int = 0  # over all ranks
    free_bytes: int | None = None  # when it began

    @property
    def in_memory(self) -> list[MemorySnapshot]:
        return [snapshot for _, snapshot in self.snapshots if isinstance(snapshot, MemorySnapshot)]


@dataclass(eq=False)
class Saver:
    """Save checkpoints. All ranks call each method together.

    The thread has its own process group, so its collectives never mix with those of training.
    """

    directory: Path
    model: nn.Module
    optimizer: CombinedOptimizer
    origin: Origin
    section: CheckpointSection
    world: World
    heartbeat: Heartbeat
    on_commit: Callable[[int], None] = lambda step: None
    timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # around each write

    def __post_init__(self) -> None:
        self.committed_step: int | None = None
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if dist.is_initialized() else None
        self._touched = TouchedRows(self.model, self.optimizer) if self.section.full_every > 1 else None
        self._base: _Base | None = None  # the last full checkpoint of this process
        self._saves_since_full = 0
        self._caches = cached_tables(self.model)
        self._positions = [0] * len(self._caches)  # of the caches, at the last full checkpoint
        self._buffers: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._partial = self.directory  # where the thread writes
        self._is_waited_for = False
        self._error: Exception | None = None

    def save(self, position: Position) -> None:
        """Start saving, and return when the tensors may change again. Errors are raised later."""
        self._wait()
        reach("ckpt.begin", position.step)
        save = self._new_save(position)
        in_background = self.section.background and self._has_memory_for_copy(save.tensors | save.rows, save.in_memory)
        if in_background:
            save.tensors = self._copy(save.tensors)
            for snapshot in save.in_memory:
                snapshot.keep()
            save.stall_seconds = time.monotonic() - save.started
        reach("ckpt.copied", position.step)
        self._partial = save.partial
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
        if self.section.on_error == "stop" or not isinstance(error, ResourceError):
            raise error
        log.error("no checkpoint: %s Training continues, as checkpoint.on_error says.", error)

    def finish(self) -> None:
        """Wait for the last save. Its failure is an error, whatever checkpoint.on_error says."""
        self._wait()
        if self._error:
            raise self._error

    def _new_save(self, position: Position) -> _Save:
        """Gather what to save: changed rows if a full checkpoint of this process is recent enough, else everything."""
        partial = on_disk.partial_path(self.directory, position.step)
        state = state_of(self.model, self.optimizer)
        in_caches = saved_tables(self.model, state)
        save = _Save(position, partial, time.monotonic(), without_tables(state, in_caches), tables=in_caches)
        if self._touched and self._base and self._saves_since_full < self.section.full_every:
            bits = self.section.row_bits
            save.rows, save.changes = collect_changes(save.tensors, self._touched, self.world.rank, bits)
            save.tensors = {key: value for key, value in save.tensors.items() if not has_table_rows(key, value)}
            save.base = self._base
        elif self._touched:
            self._touched.clear()
        for cached, since in zip(self._caches, self._positions, strict=True):
            cached.release()
            save.snapshots.append((cached, cached.cache.snapshot(since if save.base else 0)))
            save.names.append(cached.row_names())
        return save

    def _wait(self) -> None:
        if self._thread:
            self._is_waited_for = True
            written = -1
            while self._thread.is_alive():
                before, written = written, _bytes_in(self._partial)
                if written != before:  # by any rank: this one may wait for another
                    self._beat()
                self._thread.join(_POLL_SECONDS)
            self._is_waited_for = False
            self._thread = None

    def _has_memory_for_copy(self, tensors: dict[str, Tensor], rows: Iterable[MemorySnapshot] = ()) -> bool:
        """Return whether every rank has memory for a copy, reusing the buffers of earlier ones. All ranks take part."""
        needed = max(_local_bytes(tensors.values()) - _local_bytes(self._buffers), 0)
        needed += sum(snapshot.bytes for snapshot in rows)
        available = available_memory_bytes() // self.world.local_size
        (lacking,) = self.world.sum([float(needed * COPY_MARGIN > available)])
        if lacking and self.world.is_main:
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

        copies = {key: copy_to_cpu(value, copy) for key, value in tensors.items()}
        if len(used) >= len(self._buffers):  # an incremental copy must not free the buffers of a full one
            self._buffers = used
        return copies

    # The methods below run in the thread.

    def _write(self, save: _Save) -> None:
        with self.timed():
            self._write_and_commit(save)

    def _write_and_commit(self, save: _Save) -> None:
        try:
            use_device(self.world.device)
            save.tensors |= save.rows
            self._on_all_ranks(save, lambda: self._check_finite(save))
            save.bytes = sum(self._on_all_ranks(save, lambda: self._bytes_to_write(save)))
            save.free_bytes, *_ = self._on_all_ranks(save, lambda: self._begin(save))
            self._write_shards(save)
            row_files = [file for own in self._on_all_ranks(save, lambda: self._write_rows(save)) for file in own]
            files = self._on_all_ranks(save, lambda: self._file_facts(save))
            changes_by_rank = self._on_all_ranks(save, lambda: save.changes)
            changes = [change for own in changes_by_rank for change in own]
            committed, *_ = self._on_all_ranks(save, lambda: self._commit(save, changes, files, row_files))
            assert committed is not None  # it is rank 0's
            self.committed_step = save.position.step
            if not save.base:
                self._positions = [snapshot.position for _, snapshot in save.snapshots]
            self._base = save.base or committed
            self._saves_since_full = self._saves_since_full + 1 if save.base else 1
        except BaseException as error:  # noqa: BLE001 - raised by handle_failure() or finish(), in the main thread
            if self.world.is_main:
                shutil.rmtree(save.partial, ignore_errors=True)  # free the space
            for _, snapshot in save.snapshots:
                snapshot.close()
            self._base = None  # marks of touched rows may be lost: the next checkpoint must be full
            self._error = self._as_save_error(error, save)

    def _as_save_error(self, error: BaseException, save: _Save) -> UserError | SaveError:
        """Convert errors of the disk to ResourceError, and others to one that every rank can unpickle."""
        if isinstance(error, SaveError):
            return error
        if isinstance(error, OSError):
            return self._not_written(error, save)
        if known := as_user_error(error):
            return known
        internal = SaveError(f"rank {self.world.rank} could not save ({type(error).__name__}: {error})")
        internal.add_note("".join(traceback.format_exception(error)))
        return internal

    def _on_all_ranks(self, save: _Save, action: Callable[[], T]) -> list[T]:
        """Return the results of all ranks, in order. If `action` fails on one rank, raise its error on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
            self._beat()
        except BaseException as problem:  # noqa: BLE001 - raised below, on all ranks
            error = self._as_save_error(problem, save)
        everyone: list[Any] = [(result, error)]
        if self.world.size > 1:
            everyone = [None] * self.world.size
            dist.all_gather_object(everyone, (result, error), group=self._group)
        for _, first in everyone:
            if first is not None:
                raise first
        return [result for result, _ in everyone]

    def _check_finite(self, save: _Save) -> None:
        for key, value in save.tensors.items():
            if not all(is_finite(shard.values) for shard in local_shards(value)):
                raise self._not_finite(key, save)

    def _not_finite(self, key: str, save: _Save) -> UserError:
        return UserError(
            f"Training diverged: after step {save.position.step:,} {readable_name(key)} holds values that are not "
            f"finite numbers (on rank {self.world.rank}). It was not saved: the checkpoints on disk are older. "
            "Train again with lower optim.dense.lr and optim.tables.lr."
        )

    def _bytes_to_write(self, save: _Save) -> int:
        """Quantize rows where the config says so, and return the bytes that this rank writes."""
        for change in save.changes:
            if change.bits == 8:
                save.tensors[change.values] = quantize_rows(save.tensors[change.values])
        is_main = self.world.is_main  # rank 0 writes the tensors that all ranks hold
        own = [value for key, value in save.tensors.items() if is_main or is_sharded(value) or key in save.rows]
        caches = [cached.cache for cached in self._caches if isinstance(cached.cache, RowCache)]
        in_caches = sum(cache.counters().trained_rows * cache.layout.record_bytes for cache in caches)
        in_caches += sum(snapshot.bytes for snapshot in save.in_memory)
        in_caches += sum(names.bytes for names in save.names if names)
        return _local_bytes(own) + in_caches  # an incremental checkpoint has fewer of these

    def _begin(self, save: _Save) -> int | None:
        """Create the directory on rank 0, and return the bytes that are free there."""
        if self.world.is_main:
            on_disk.begin(save.partial)
            save.free_bytes = shutil.disk_usage(save.partial).free
            if save.bytes > save.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reach("ckpt.shards", save.position.step)
        return save.free_bytes

    def _not_written(self, error: OSError, save: _Save) -> ResourceError:
        file = f"{error.filename}: " if error.filename else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and save.free_bytes is not None
        sizes = f" It needs {save.bytes:,} bytes, {save.free_bytes:,} were free." if is_full else ""
        advice = remedy_for(error) or "Fix that and run the same command again."
        remedy = _REMOVED if error.errno == errno.ENOENT else f"Earlier checkpoints are untouched. {advice}"
        fact = f"a checkpoint could not be written ({file}{error.strerror or error}).{sizes}"
        return ResourceError(f"{self.directory}: {fact} {remedy}")

    def _write_shards(self, save: _Save) -> None:
        """Write and sync the tensors. All ranks take part."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Without copies ahead: DCP would wait for them on the thread's current GPU, even if they are elsewhere.
                writer = _Writer(save.partial, sync_files=True, overwrite=False, per_thread_copy_ahead=0)
                dcp.save(save.tensors, storage_writer=writer, planner=ChunkedPlanner(), process_group=self._group)
        except dcp.CheckpointException as error:  # the same on all ranks
            raise next((failure for failure, _ in error.failures.values()), RuntimeError(str(error))) from error

    def _write_rows(self, save: _Save) -> list[RowFile]:
        """Write this rank's rows of cached tables."""
        written = []
        for number, ((cached, snapshot), names) in enumerate(zip(save.snapshots, save.names, strict=True)):
            by_name = {table.name: table for table in save.tables}
            tables = [by_name[name] for name in cached.names]
            path = save.partial / f"__{self.world.rank}_{number}.rows"
            try:
                written.append(write_row_file(path, cached, snapshot, names, tables, save.position.step))
            except NotFiniteError as error:
                raise self._not_finite(str(error), save) from error
            self._beat()
        return written

    def _file_facts(self, save: _Save) -> dict[str, FileFacts]:
        """Read back what this rank wrote."""
        reach("ckpt.written", save.position.step)
        files = [*save.partial.glob(f"__{self.world.rank}_*")]
        if self.world.is_main:
            files.append(save.partial / ".metadata")
        return {file.name: on_disk.file_facts(file, self._beat) for file in files}

    def _beat(self) -> None:
        if self._is_waited_for:  # otherwise training sends the heartbeats
            self.heartbeat.beat("waiting for a checkpoint to be written")

    def _commit(
        self, save: _Save, changes: list[RowChange], files: list[dict[str, FileFacts]], row_files: list[RowFile]
    ) -> _Base | None:
        """Commit on rank 0, and return the checkpoint as a base of later ones."""
        if not self.world.is_main:
            return None
        step = save.position.step
        base, base_manifest = save.base or (None, "")
        state = State(save.position, self.origin, utc_now(), base, base_manifest, changes, row_files)
        all_files = {file: facts for own in files for file, facts in own.items()}
        final = on_disk.commit(save.partial, state, all_files)
        try:
            on_disk.prune(final, self.section.keep, self.section.keep_best)
        except (OSError, on_disk.PrunedError) as error:
            log.warning("older checkpoints could not be removed, and take up space: %s", error)
        reach("ckpt.pruned", step)
        size = f"{sum(facts['bytes'] for facts in all_files.values()) / 1e6:,.1f} MB"
        kind = f" of changes since {base}" if base else ""
        waited = "" if save.stall_seconds is None else f", of which training waited {save.stall_seconds:.2f}"
        seconds = time.monotonic() - save.started
        fact = f"checkpoint committed step={step} in {seconds:.2f} s{waited}: {final}, {size}{kind}"
        short = f"saved step {step:,} ({'changes only, ' if base else ''}{size}, {seconds:.2f} s)"
        log.info("%s", fact, extra={"console": short})
        with contextlib.suppress(OSError):  # the checkpoint is committed, even if this cannot be noted
            self.on_commit(step)
        return final.name, digest(final / on_disk.MANIFEST)


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Raise what the disk said. torch raises 'unexpected pos' instead, whatever the cause."""
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _bytes_in(directory: Path) -> int:
    with contextlib.suppress(OSError):  # a file may be removed meanwhile
        return sum(file.stat().st_size for file in directory.iterdir())
    return 0


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(shard.values.nbytes for tensor in tensors for shard in local_shards(tensor))


def is_finite(values: Tensor) -> bool:
    """Check the sum first, which needs no memory; look at every value only if the sum overflows."""
    if not values.is_floating_point():
        return True
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
