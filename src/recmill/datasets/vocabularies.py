"""Vocabularies of raw ids: counted in bounded memory, then looked up through hash tables."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from recmill.datasets.click_log import LogBlock, ParsedLog
from recmill.datasets.parallel import compiled
from recmill.datasets.writing import NpyWriter

MISSING, RARE, FIRST_ID = 0, 1, 2  # contiguous ids: no id, an id outside of the vocabulary, the first of the vocabulary
_BYTES_PER_COUNTED = 64  # key, count and first row of an id, while they are sorted and merged
_BYTES_PER_SLOT = 8
_FILLED_AT_ONCE = 1 << 20
_KEY_SHIFT = np.uint64(32)


@dataclass(frozen=True)
class LogRows:
    """Rows start..stop of a log; the first of them is row `number` of all rows that are counted."""

    log: ParsedLog
    start: int
    stop: int
    number: int


@dataclass(frozen=True)
class Counting:
    """How ids are counted and numbered: ids that occur less than `min_frequency` times are left out.

    `memory` bytes suffice for any number of rows: counts that do not fit are written to `scratch`.
    """

    order: Literal["frequency", "first-seen"]
    min_frequency: int
    missing_is_zero: bool  # a missing id counts as raw id 0
    memory: int
    scratch: Path

    @property
    def ids_at_once(self) -> int:
        return max(self.memory // _BYTES_PER_COUNTED, 1 << 12)


_Slab = list[tuple[int, np.ndarray, np.ndarray]]  # blocks of a column: number of the first row, ids, is counted

# Counts are records in ascending order of raw ids; first-seen order also needs the row where an id occurs first.
_BY_FREQUENCY = np.dtype([("key", np.uint32), ("count", np.int64)], align=True)
_BY_FIRST_ROW = np.dtype([("key", np.uint32), ("count", np.int64), ("first", np.int64)], align=True)


def _merged(runs: list[np.ndarray]) -> np.ndarray:
    """Add up the counts of equal ids. Runs come in row order, so the first of equal ids was seen first."""
    records = np.concatenate(runs)
    records = records[np.argsort(records["key"], kind="stable")]
    starts = _run_starts(records["key"])
    merged = records[starts]
    if len(records):
        merged["count"] = np.add.reduceat(records["count"], starts)
    return merged


def _between(run: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the counts of raw ids low..high."""
    return _read(run, bisect_left(run["key"], low), bisect_left(run["key"], high))


def _read(values: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return values[start:stop]; a file is read without mapping it, because mapped pages count as our memory."""
    if not isinstance(values, np.memmap):
        return values[start:stop]
    row_items = values.shape[1] if values.ndim == 2 else 1
    offset = values.offset + int(start) * row_items * values.dtype.itemsize
    assert values.filename
    read = np.fromfile(values.filename, values.dtype, (stop - start) * row_items, offset=offset)
    return read.reshape(stop - start, *values.shape[1:])


def write_vocabulary(path: Path, rows: list[LogRows], column: int, max_ids: int, counting: Counting) -> int:
    """Count a column and write (raw id, contiguous id) uint32 [n, 2], in ascending order of raw ids. Return n.

    Contiguous ids start at 2: by descending frequency, ties by raw id, or by first occurrence. Only the first
    `max_ids` are kept.
    """
    runs = _counted(rows, column, counting)
    slices = _slices(runs, counting)
    rank = _first_seen_ranks if counting.order == "first-seen" else _frequency_ranks
    total_rows = rows[-1].number + rows[-1].stop - rows[-1].start
    kept = min(sum(len(counts) for counts in slices()), max_ids)
    with NpyWriter(path, np.uint32, (kept, 2)) as file:
        for counts, ranks in zip(slices(), rank(slices, total_rows), strict=True):
            is_kept = ranks < max_ids
            file.append(np.stack([counts["key"][is_kept], ranks[is_kept] + FIRST_ID], axis=1))
    for file_path in counting.scratch.glob(f"run-{column}-*"):
        file_path.unlink()
    return kept


def _counted(rows: list[LogRows], column: int, counting: Counting) -> list[np.ndarray]:
    """Return sorted runs of about `ids_at_once` rows each: in memory if there is only one, otherwise in files."""
    count = _counts_with_first if counting.order == "first-seen" else _counts
    runs: list[np.ndarray] = []
    for run in filter(len, map(count, _slabs(rows, column, counting))):
        if len(runs) == 1:
            runs[0] = _spilled(runs[0], counting.scratch / f"run-{column}-0")
        runs.append(_spilled(run, counting.scratch / f"run-{column}-{len(runs)}") if runs else run)
    return runs or [np.empty(0, _BY_FIRST_ROW)]


def _slabs(rows: list[LogRows], column: int, counting: Counting) -> Iterator[_Slab]:
    """Yield about `ids_at_once` rows at a time."""
    slab: _Slab = []
    count = 0
    for part in rows:
        for first, ids, missing in part.log.read_column(column, part.start, part.stop):
            if slab and count + len(ids) > counting.ids_at_once:
                yield slab
                slab, count = [], 0
            is_counted = missing & np.uint32(0 if counting.missing_is_zero else 1 << column) == 0
            slab.append((part.number + first - part.start, ids, is_counted))
            count += len(ids)
    if slab:
        yield slab


def _counts(slab: _Slab) -> np.ndarray:
    keys = np.concatenate([ids[is_counted] for _, ids, is_counted in slab])
    keys.sort()
    starts = _run_starts(keys)
    counts = np.empty(len(starts), _BY_FREQUENCY)
    counts["key"] = keys[starts]
    counts["count"] = np.diff(starts, append=len(keys))
    return counts


def _counts_with_first(slab: _Slab) -> np.ndarray:
    """Sort by id, then row, packed into one word: the first of equal ids is the one that was seen first."""
    first_row = slab[0][0]
    words = []
    for row, ids, is_counted in slab:
        offsets = np.arange(row - first_row, row - first_row + len(ids), dtype=np.uint64)
        words.append((ids.astype(np.uint64) << _KEY_SHIFT | offsets)[is_counted])
    packed = np.concatenate(words)
    packed.sort()
    halves = packed.view(np.uint32)  # offset, id, offset, id, ...
    starts = _run_starts(halves[1::2])
    counts = np.empty(len(starts), _BY_FIRST_ROW)
    counts["key"] = halves[1::2][starts]
    counts["count"] = np.diff(starts, append=len(packed))
    counts["first"] = halves[::2][starts].astype(np.int64) + first_row
    return counts


def _run_starts(sorted_keys: np.ndarray) -> np.ndarray:
    is_start = np.ones(len(sorted_keys), bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def _spilled(run: np.ndarray, path: Path) -> np.ndarray:
    path.write_bytes(run.data)
    return np.memmap(path, run.dtype, mode="r")


def _slices(runs: list[np.ndarray], counting: Counting) -> Callable[[], Iterator[np.ndarray]]:
    """Return a function that yields the merged counts in slices of ascending raw ids, without the rare ids."""
    longest = max(runs, key=len)["key"]
    num_slices = 1 if len(runs) == 1 else -(-sum(map(len, runs)) // counting.ids_at_once)
    inner = [int(longest[len(longest) * i // num_slices]) for i in range(1, num_slices)]
    edges = [0, *inner, 2**32]

    def slices() -> Iterator[np.ndarray]:
        for low, high in pairwise(edges):
            counts = runs[0]
            if len(runs) > 1:
                counts = _merged([_between(run, low, high) for run in runs])
            is_kept = counts["count"] >= counting.min_frequency
            yield counts if is_kept.all() else counts[is_kept]

    return slices


def _frequency_ranks(slices: Callable[[], Iterator[np.ndarray]], total_rows: int) -> Iterator[np.ndarray]:
    """Yield the rank of each id by frequency, without sorting all ids at once.

    It is the number of ids that are more frequent, plus the number of equally frequent ids before it.
    """
    frequencies, sizes = np.empty(0, np.int64), np.empty(0, np.int64)
    for counts in slices():
        merged = np.concatenate([frequencies, counts["count"]])
        weights = np.concatenate([sizes, np.ones(len(counts["count"]), np.int64)])
        frequencies, inverse = np.unique(merged, return_inverse=True)
        sizes = np.bincount(inverse, weights, minlength=len(frequencies)).astype(np.int64)
    next_rank = np.concatenate([np.cumsum(sizes[::-1])[::-1][1:], [0]]) if len(sizes) else sizes
    for counts in slices():
        group = np.searchsorted(frequencies, counts["count"])
        order = np.argsort(group, kind="stable")
        sizes_here = np.bincount(group, minlength=len(frequencies))
        within = np.arange(len(group)) - np.repeat(np.cumsum(sizes_here) - sizes_here, sizes_here)
        ranks = np.empty(len(group), np.int64)
        ranks[order] = next_rank[group[order]] + within
        next_rank = next_rank + sizes_here
        yield ranks


def _first_seen_ranks(slices: Callable[[], Iterator[np.ndarray]], total_rows: int) -> Iterator[np.ndarray]:
    """Yield the rank of each id by first occurrence.

    Each row where an id occurs first sets a bit: the rank of an id is the number of bits before its own.
    """
    words = np.zeros(total_rows // 64 + 1, np.uint64)
    for counts in slices():
        np.bitwise_or.at(words, counts["first"] >> 6, np.uint64(1) << (counts["first"] & 63).astype(np.uint64))
    before = np.concatenate([[0], np.cumsum(np.bitwise_count(words), dtype=np.int64)])
    for counts in slices():
        bit = np.uint64(1) << (counts["first"] & 63).astype(np.uint64)
        below = np.bitwise_count(words[counts["first"] >> 6] & (bit - np.uint64(1)))
        yield before[counts["first"] >> 6] + below


class Vocabularies:
    """Raw ids -> contiguous ids of all columns, through hash tables. Tables that do not fit in memory form rounds."""

    def __init__(self, paths: list[Path], missing_is_zero: bool) -> None:
        self._paths = paths
        self._missing_is_zero = missing_is_zero
        self.sizes = [len(np.load(path, mmap_mode="r")) for path in paths]

    def rounds(self, memory: int) -> "list[LookupRound]":
        """Return rounds such that every id of every column is mapped in exactly one of them."""
        rounds = []
        most_slots = max(memory // _BYTES_PER_SLOT, 1 << 12)
        parts: list[tuple[int, int, int]] = []
        used = 0
        for column, size in enumerate(self.sizes):
            num_parts = -(-_num_slots(size) // most_slots)
            for part in range(num_parts):
                low, high = size * part // num_parts, size * (part + 1) // num_parts
                slots = _num_slots(high - low)
                if parts and used + slots > most_slots:
                    rounds.append(LookupRound(self._paths, parts, self._missing_is_zero))
                    parts, used = [], 0
                parts.append((column, low, high))
                used += slots
        return [*rounds, LookupRound(self._paths, parts, self._missing_is_zero)]


def _num_slots(ids: int) -> int:
    """Return a power of two of which at most three quarters will be used."""
    return 1 << max(4, (ids * 4 // 3).bit_length())


class LookupRound:
    """Hash tables of columns, or of parts of columns: (column, low, high), a range of the vocabulary's rows.

    They are built when they are first used.
    """

    def __init__(self, paths: list[Path], parts: list[tuple[int, int, int]], missing_is_zero: bool) -> None:
        self._paths = paths
        self._parts = parts
        self._missing_is_zero = missing_is_zero
        self._lock = threading.Lock()
        self._tables: tuple[np.ndarray, ...] | None = None

    def map(self, block: LogBlock, out: np.ndarray) -> None:
        """Fill `out` [n, num_sparse] where the ids belong to this round. Several threads may call it."""
        with self._lock:
            self._tables = self._tables or self._build()
        _map(self._tables, block.ids, block.missing, self._missing_is_zero, out)

    def free(self) -> None:
        self._tables = None

    def _build(self) -> tuple[np.ndarray, ...]:
        """Return (all tables end to end, their offsets, shifts of their hashes, columns, ranges of raw ids)."""
        sizes = [_num_slots(high - low) for _, low, high in self._parts]
        offsets = np.cumsum([0, *sizes])
        shifts = np.array([32 - (size.bit_length() - 1) for size in sizes], dtype=np.uint64)
        edges = np.zeros((len(sizes), 2), np.uint64)
        tables = np.zeros(offsets[-1], np.uint64)
        for index, (column, low, high) in enumerate(self._parts):
            pairs = np.load(self._paths[column], mmap_mode="r")
            lowest = 0 if low == 0 else int(pairs[low, 0])
            edges[index] = (lowest, 2**32 if high == len(pairs) else int(pairs[high, 0]))
            slots = tables[offsets[index] : offsets[index + 1]]
            for start in range(low, high, _FILLED_AT_ONCE):
                _fill(slots, shifts[index], _read(pairs, start, min(start + _FILLED_AT_ONCE, high)))
        return tables, offsets, shifts, np.array([column for column, _, _ in self._parts]), edges


@compiled
def _slot_of(key, shift):
    """Return the slot by Fibonacci hashing: the top bits of a product."""
    return np.int64((np.uint64(key) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)) >> shift)


@compiled
def _fill(slots, shift, pairs):
    mask = len(slots) - 1
    for row in range(len(pairs)):
        slot = _slot_of(pairs[row, 0], shift)
        while slots[slot] != 0:
            slot = (slot + 1) & mask
        slots[slot] = (np.uint64(pairs[row, 0]) << np.uint64(32)) | np.uint64(pairs[row, 1])


@compiled
def _map(tables, ids, missing, missing_is_zero, out):
    slots, offsets, shifts, columns, edges = tables
    rows = len(missing)
    tile = 512  # rows of `out` that stay in the cache while all columns are written
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        for index in range(len(columns)):
            column = columns[index]
            offset = offsets[index]
            mask = offsets[index + 1] - offset - 1
            low = edges[index, 0]
            high = edges[index, 1]
            for row in range(start, stop):
                key = np.uint64(ids[column, row])
                if key < low or key >= high:
                    continue
                if not missing_is_zero and (missing[row] >> np.uint32(column)) & np.uint32(1):
                    out[row, column] = MISSING
                    continue
                slot = _slot_of(key, shifts[index])
                found = slots[offset + slot]
                while found != 0 and (found >> np.uint64(32)) != key:
                    slot = (slot + 1) & mask
                    found = slots[offset + slot]
                out[row, column] = RARE if found == 0 else np.int64(found & np.uint64(0xFFFFFFFF))
