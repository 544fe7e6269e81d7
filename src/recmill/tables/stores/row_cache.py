"""A cache of table rows in memory, in front of a file: the Python side of `kernels/rows.cpp`.

One `RowCache` holds the shards of all tables of one width and optimizer. A *key* numbers their rows: row r of shard t
is key `layout.starts[t] + r`. A *slot* holds one row in memory. The *first values* of a row, before it is trained, are
a function of the seed: they are computed when the row is first used, and are not written to the file.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from ctypes import POINTER, c_double, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from recmill.errors import ConfigError, ResourceError, remedy_for
from recmill.failpoints import native_failures
from recmill.hardware.cpu import num_cores
from recmill.kernels.library import load_rows_library
from recmill.tables.spec import VALUE_BYTES
from recmill.tables.stores.row_file import RowFile, open_row_file

Engine = Literal["auto", "io_uring", "threads"]

ENGINES: dict[Engine, int] = {"auto": 0, "io_uring": 1, "threads": 2}
_POINTS = ["store.read", "store.append", "store.compact", "store.snapshot"]
# Sizes of rows.cpp.
_ROW_BYTES, _SLOT_BYTES = 5.125, 29  # besides the values: places, hints, snapshot; slots, queue, hints, nodes
_HEADER_BYTES = 12
_BUFFERS = 2
_CHUNK_BYTES = 256 << 10
_MAX_ALIGNMENT = 4096
_MAX_SEGMENT_BYTES = 8 << 20
_MAX_RECORDS = 2**31 - 2
_MIN_LIVE = 0.7
_SNAPSHOT_SEGMENTS = 2  # of a chunk
_TRACE_SHARE = 4  # of a segment


@dataclass(frozen=True)
class Shard:
    """The rows of one table that this process holds. `stream` and `bound` determine first values: first_values.py."""

    rows: int
    first_row: int
    stream: np.uint64  # rng.stream_key(seed, "table", name)
    bound: float


@dataclass(frozen=True)
class RowLayout:
    """What a cache holds: shards of one width, with `state_columns` values of optimizer state beside each row."""

    shards: tuple[Shard, ...]
    dim: int
    state_columns: int  # 0: SGD, 1: row-wise Adagrad, dim: Adagrad, 2 * dim: Adam and FTRL

    @cached_property
    def starts(self) -> np.ndarray:
        """The key of each shard's first row, and the number of all keys (int64)."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)], dtype=np.int64)

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def value_bytes(self) -> int:
        """Bytes of a row with its optimizer state."""
        return VALUE_BYTES * (self.dim + self.state_columns)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row in memory."""
        return _SLOT_BYTES + self.value_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a row in the file."""
        return _HEADER_BYTES + self.value_bytes


@dataclass(frozen=True)
class CachePlan:
    """How a budget is divided, before anything is allocated."""

    slots: int
    segment_bytes: int
    memory_bytes: int  # every byte that the cache will allocate
    index_bytes: int  # the part of them that is needed for all rows, cached or not


def plan_cache(layout: RowLayout, budget_bytes: int, min_slots: int = 1, max_slots: int | None = None) -> CachePlan:
    """Return how many rows fit in the budget, at most all or `max_slots`.

    Raise ConfigError, with the bytes that are missing, if fewer than `min_slots` (such as the rows of a batch) fit.
    """
    if layout.rows / _MIN_LIVE > _MAX_RECORDS:
        raise ConfigError(
            f"{layout.rows:,} rows of width {layout.dim} on one process are more than a row file can hold "
            f"({int(_MAX_RECORDS * _MIN_LIVE):,}). Use more processes."
        )
    index_bytes = int(layout.rows * _ROW_BYTES) + 1
    slot_bytes = layout.slot_bytes
    fixed_bytes = index_bytes + _buffer_bytes(layout, budget_bytes)
    most = layout.rows if max_slots is None else min(layout.rows, max_slots)
    slots = min(most, max(0, budget_bytes - fixed_bytes) // slot_bytes)
    min_slots = max(1, min(min_slots, layout.rows))
    if slots < min_slots:
        needed = budget_bytes
        while (least := fixed_bytes + min_slots * slot_bytes) > needed:
            needed = _mb(least) << 20
            fixed_bytes = index_bytes + _buffer_bytes(layout, needed)  # a larger budget has larger buffers
        raise ConfigError(
            f"tables.cache_memory_budget_mb: {_mb(budget_bytes)} MB for {layout.rows:,} rows of width {layout.dim} is "
            f"{_mb(needed - budget_bytes)} MB too little: {_mb(index_bytes)} MB for the index of all rows, "
            f"{_mb(fixed_bytes - index_bytes)} MB for buffers, {_mb(min_slots * slot_bytes)} MB for {min_slots:,} "
            f"rows. Set it to at least {_mb(needed)}, or use more processes."
        )
    return CachePlan(slots, _segment_bytes(layout, budget_bytes), fixed_bytes + slots * slot_bytes, index_bytes)


def _mb(size: int) -> int:
    return -(-size // (1 << 20))


def _segment_bytes(layout: RowLayout, budget_bytes: int) -> int:
    size = _MAX_SEGMENT_BYTES
    while size > max(64 << 10, budget_bytes // 32) and size >= 16 * layout.record_bytes:
        size //= 2
    return size


def _buffer_bytes(layout: RowLayout, budget_bytes: int) -> int:
    """Return the bytes of write buffers, a snapshot's chunk, a trace, chunks and read buffers (largest alignment)."""
    segment_bytes = _segment_bytes(layout, budget_bytes)
    chunk = min(_CHUNK_BYTES, segment_bytes) + 3 * _MAX_ALIGNMENT
    segments = (_BUFFERS + _SNAPSHOT_SEGMENTS) * segment_bytes + segment_bytes // _TRACE_SHARE
    return segments + 2 * chunk + _depth(segment_bytes) * (layout.record_bytes + 2 * _MAX_ALIGNMENT)


def _depth(segment_bytes: int) -> int:
    """Return the number of concurrent reads; a small budget has less room for their buffers."""
    return 128 if segment_bytes >= 1 << 20 else 64


class Chunk(NamedTuple):
    """Rows of a snapshot, which has each row once."""

    keys: np.ndarray  # int64 [n], in no order
    weights: np.ndarray  # float32 [n, dim]
    state: np.ndarray  # float32 [n, state_columns]


class Counters(NamedTuple):
    """What happened since the cache was opened. Validation (`read`) and snapshots change none of it."""

    lookups: int  # keys given to pin
    rows: int  # different keys of each pin, added up: hits + misses + first_touches
    misses: int  # rows read from the file, for a hint or for pin
    first_touches: int  # rows computed from the seed
    bytes_read: int
    bytes_written: int
    disk_bytes: int  # now
    live_bytes: int  # now: the records that a compacted file would have
    horizon: int  # now: hinted batches that are still to come
    trained_rows: int  # now: rows that are not first values
    wait_seconds: float  # that pin waited for the file

    @property
    def hits(self) -> int:
        return self.rows - self.misses - self.first_touches


class _Shard(ctypes.Structure):
    _fields_ = [("rows", c_int64), ("first_row", c_int64), ("stream", c_uint64), ("scale", c_float), ("bound", c_float)]


class _Failure(ctypes.Structure):
    _fields_ = [("point", c_int64), ("hit", c_int64), ("action", c_int64)]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("dim", "state_columns", "slots", "num_shards")),
        ("shards", POINTER(_Shard)),
        ("weights", c_void_p),
        ("state", c_void_p),
        *((name, c_int64) for name in ("fd", "is_direct", "alignment", "segment_bytes", "depth", "engine", "threads")),
        *((name, c_int64) for name in ("lookahead", "disk_budget", "seed", "num_failures")),
        ("failures", POINTER(_Failure)),
    ]


class RowCache:
    """Rows of a group of tables: some in memory, the others in a file that no other process can see.

    One thread trains: it calls `pin`, reads and updates the slots, and calls `unpin`. Other threads may meanwhile call
    `hint` and iterate over a snapshot. Call `read` only while nothing is updated. If the disk fails, a ResourceError
    names the file's directory, and every later call fails as well.
    """

    def __init__(
        self,
        layout: RowLayout,
        plan: CachePlan,
        directory: Path,
        *,
        engine: Engine = "auto",
        lookahead: int = 0,
        disk_budget_bytes: int = 0,
        eviction_seed: int = 1,
        slab: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Open the file and start the threads.

        lookahead: how many hinted batches to accept; 0: until their rows are twice the slots. slab: use these arrays
        as `weights` and `state`, such as views of FBGEMM's tensors. disk_budget_bytes: 0 is no limit.
        """
        self._handle = None
        self.layout, self.plan = layout, plan
        self.weights, self.state = slab or (
            np.zeros((plan.slots, layout.dim), np.float32),
            np.zeros((plan.slots, layout.state_columns), np.float32),
        )
        for values, columns in ((self.weights, layout.dim), (self.state, layout.state_columns)):
            assert values.shape == (plan.slots, columns), (values.shape, columns)
            assert values.dtype == np.float32 and values.flags.c_contiguous
        self._library = load_rows_library()
        for function in ("rows_open", "rows_pin", "rows_read", "rows_hint", "rows_memory", "rows_engine", "rows_load"):
            getattr(self._library, function).restype = c_int64
        for function in ("rows_snapshot_begin", "rows_snapshot_next", "rows_advance", "rows_position", "rows_forecast"):
            getattr(self._library, function).restype = c_int64
        self.file = open_row_file(directory)
        options = self._options(self.file, engine, lookahead, disk_budget_bytes, eviction_seed)
        self._handle = c_void_p(self._library.rows_open(ctypes.byref(options)) or None)
        if not self._handle:
            os.close(self.file.fd)
            if engine == "io_uring":
                raise ResourceError("This system does not allow io_uring. Use the engine 'auto'.")
            raise MemoryError(f"cache of {plan.slots:,} rows")

    def _options(
        self, file: RowFile, engine: Engine, lookahead: int, disk_budget_bytes: int, eviction_seed: int
    ) -> _Options:
        layout = self.layout
        bounds = [(np.float32(shard.bound * 2.0**-23), np.float32(shard.bound)) for shard in layout.shards]
        shards = [
            _Shard(shard.rows, shard.first_row, int(shard.stream), *map(float, pair))
            for shard, pair in zip(layout.shards, bounds, strict=True)
        ]
        failures = [_Failure(*numbers) for numbers in native_failures(_POINTS)]
        sizes = layout.dim, layout.state_columns, self.plan.slots, len(shards)
        memory = self.weights.ctypes.data, self.state.ctypes.data
        segment_bytes = self.plan.segment_bytes
        disk = file.fd, file.is_direct, file.alignment, segment_bytes, _depth(segment_bytes), ENGINES[engine]
        return _Options(
            *sizes,
            (_Shard * len(shards))(*shards),
            *memory,
            *disk,
            min(48, 16 * num_cores()),
            lookahead,
            disk_budget_bytes,
            eviction_seed,
            len(failures),
            (_Failure * len(failures))(*failures),
        )

    @property
    def engine(self) -> Engine:
        """What reads the file: io_uring, or threads if the system does not allow it."""
        return "io_uring" if self._call("rows_engine") == ENGINES["io_uring"] else "threads"

    def pin(self, keys: np.ndarray, batch: int = -1, *, for_update: bool = True) -> np.ndarray:
        """Return the slot (int64) of each key (int64, in any order, also repeated). The rows stay there until unpin.

        Waits for rows that are being read. `batch` is the number that this batch's hint had, if there was one: rows
        that only this batch or earlier ones needed lose their protection. `for_update`: the caller changes all rows.
        """
        keys = _as_keys(keys)
        slots = np.empty(len(keys), np.int64)
        self._check(self._call("rows_pin", _address(keys), len(keys), _address(slots), batch, int(for_update)))
        return slots

    def unpin(self) -> None:
        """Unpin all rows: they may be evicted from now on."""
        self._call("rows_unpin")

    def read(self, keys: np.ndarray) -> np.ndarray:
        """Return rows (float32 [n, dim]) for validation: nothing is admitted, evicted or counted."""
        keys = _as_keys(keys)
        rows = np.empty((len(keys), self.layout.dim), np.float32)
        self._check(self._call("rows_read", _address(keys), len(keys), _address(rows)))
        return rows

    def hint(self, batch: int, keys: np.ndarray) -> bool:
        """Announce the keys of an upcoming batch. Batches are hinted in order, without gaps, starting at any number.

        Rows of the nearest batches are loaded in the background. Rows that hinted batches need are the last to be
        evicted, and of them first those that are needed latest. Returns False, and does nothing, if there is no room:
        repeat the call after the next pin. Results never depend on hints.
        """
        keys = _as_keys(keys)
        return bool(self._call("rows_hint", batch, _address(keys), len(keys)))

    def drop_hints(self) -> None:
        """Discard all hints, because the batches will not come or batch numbers start again."""
        self._call("rows_drop_hints")

    def snapshot(self, since: int = 0) -> "Snapshot":
        """Begin a snapshot of all rows that were ever trained, or of those trained or loaded from position `since` on.

        The snapshot has the rows as they are now, even if training changes them while its chunks are read. No row may
        be pinned. Finish or close a snapshot before the next one.
        """
        self._check(self._call("rows_snapshot_begin", since))
        return Snapshot(self, self._call("rows_position"))

    def load(self, keys: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        """Set rows from a checkpoint, before training. May be called repeatedly; the last values of a key are kept."""
        keys = _as_keys(keys)
        weights, state = (np.ascontiguousarray(values, np.float32) for values in (weights, state))
        assert weights.shape == (len(keys), self.layout.dim), weights.shape
        assert state.size == len(keys) * self.layout.state_columns, state.shape
        self._check(self._call("rows_load", _address(keys), len(keys), _address(weights), _address(state)))

    def advance(self) -> int:
        """Begin a new position and return it: rows that were trained or loaded before belong to earlier ones.

        A snapshot does this too. A resumed run loads the full checkpoint, calls `advance`, keeps the result as `since`
        of its next incremental save, and then loads the increments.
        """
        return int(self._call("rows_advance"))

    def counters(self) -> Counters:
        counts = np.empty(len(Counters._fields) - 1, np.int64)
        wait = c_double()
        self._call("rows_counters", _address(counts), ctypes.byref(wait))
        return Counters._make([*counts.tolist(), wait.value])

    def forecast(self, slots: int) -> float:
        """Estimate which share of the rows that were read would have been read if the cache had `slots` instead.

        A sample of the latest batches is simulated. Its memory is that of a snapshot: none may be open.
        """
        now = self._call("rows_forecast", self.plan.slots)
        return self._call("rows_forecast", slots) / now if now else 1.0

    def memory_bytes(self) -> int:
        """Return every byte allocated, with `weights` and `state`."""
        return int(self._call("rows_memory")) + self.weights.nbytes + self.state.nbytes

    def close(self) -> None:
        """Stop the threads and close the file. No other thread may be using the cache."""
        if self._handle:
            self._call("rows_close")
            self._handle = None
            with suppress(OSError):  # of the disk: the file is deleted, so nothing is lost
                os.close(self.file.fd)

    def __enter__(self) -> "RowCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: str, *arguments: Any) -> Any:
        assert self._handle, "the cache is closed"
        values = (c_int64(value) if isinstance(value, int) else value for value in arguments)
        return getattr(self._library, function)(self._handle, *values)

    def _check(self, problem: int) -> None:
        if not problem:
            return
        facts = np.zeros(4, np.int64)
        self._call("rows_problem", _address(facts))
        kind, error, first, second = facts.tolist()
        place = f"{self.file.directory}: the row file"
        if kind == 1:
            raise IndexError(f"key {first} is not in 0..{second - 1}")
        if kind == 2:
            raise ResourceError(
                f"A batch with {first:,} lookups needs more distinct rows than the cache can hold ({second:,}). "
                f"Raise tables.cache_memory_budget_mb, by {_mb((first - second) * self.layout.slot_bytes)} to be sure, "
                "or use smaller batches or more processes."
            )
        if kind in (4, 5):
            verb = {4: "reading", 5: "writing"}[kind]
            failure = OSError(error, os.strerror(error))
            raise ResourceError(
                f"{place}: {verb} at byte {first:,}: {failure.strerror}. {remedy_for(failure)}".rstrip()
            )
        if kind == 6:
            raise ResourceError(
                f"{place} is corrupt at byte {first:,}: a row's checksum is wrong. The row was not used. Resume from "
                "the last checkpoint; if it happens again, use another disk."
            )
        if kind == 7:
            raise ResourceError(
                f"{place} needs {_mb(first):,} MB, but tables.disk_budget_gb allows {second >> 20:,} MB. Raise it."
            )
        if kind == 8:
            raise ResourceError(f"{place} has no record number left, of {first:,}. Use more processes.")
        raise ResourceError(f"{place} is closed.")


class Snapshot:
    """Chunks of rows. `position` is the `since` that selects what was trained after this snapshot."""

    def __init__(self, cache: RowCache, position: int) -> None:
        self.position = position
        self._cache: RowCache | None = cache

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks, each of which is valid until the next one: all of them use the same memory."""
        cache = self._cache
        if not cache:
            return
        layout = cache.layout
        room = max(1, _SNAPSHOT_SEGMENTS * cache.plan.segment_bytes // layout.record_bytes)
        keys = np.empty(room, np.int64)
        weights, state = (np.empty((room, columns), np.float32) for columns in (layout.dim, layout.state_columns))
        while self._cache:
            count = cache._call("rows_snapshot_next", room, _address(keys), _address(weights), _address(state))
            cache._check(int(count < 0))
            if not count:
                self._cache = None
                return
            yield Chunk(keys[:count], weights[:count], state[:count])

    def close(self) -> None:
        """End the snapshot; chunks that were not read are discarded."""
        if self._cache:
            with suppress(AssertionError):
                self._cache._call("rows_snapshot_end")
            self._cache = None


def _as_keys(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys, np.int64)


def _address(values: np.ndarray) -> c_void_p:
    return c_void_p(values.ctypes.data)
