"""Vocabularies of raw ids: counted in bounded memory, then looked up through hash tables."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from recmill.datasets.click_log import LogBlock, ParsedLog
from recmill.datasets.compiled import compiled
from recmill.datasets.writing import NpyWriter

MISSING, RARE, FIRST_ID = 0, 1, 2  # contiguous ids: no id, an id outside of the vocabulary, the first of the vocabulary
_BYTES_PER_COUNTED_ID = 64  # key, count and first row of an id, while they are sorted and merged
_BYTES_PER_SLOT = 8
_FILLED_AT_ONCE = 1 << 20

# Counts are records in ascending order of raw ids; first-seen order also needs the row where an id occurs first.
_BY_FREQUENCY = np.dtype([("key", np.uint32), ("count", np.int64)], align=True)
_BY_FIRST_ROW = np.dtype([("key", np.uint32), ("count", np.int64), ("first", np.int64)], align=True)

_Blocks = list[tuple[int, np.ndarray, np.ndarray]]  # of a column: (number of the first row, ids, which are counted)
_Slices = Callable[[], Iterator[np.ndarray]]


@dataclass(frozen=True)
class LogRows:
    """Rows start..stop of a log, which are counted after `offset` rows of other logs."""

    log: ParsedLog
    start: int
    stop: int
    offset: int


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
        return max(self.memory // _BYTES_PER_COUNTED_ID, 1 << 12)


def write_vocabulary(path: Path, rows: list[LogRows], column: int, max_ids: int, counting: Counting) -> int:
    """Count a column and write (raw id, contiguous id) uint32 [n, 2], in ascending order of raw ids. Return n.

    Contiguous ids start at 2: by descending frequency, ties by raw id, or by first occurrence. Only the first
    `max_ids` are kept.
    """
    slices = _slices(_sorted_runs(rows, column, counting), counting)
    num_rows = rows[-1].offset + rows[-1].stop - rows[-1].start
    all_ranks = _frequency_ranks(slices) if counting.order == "frequency" else _first_seen_ranks(slices, num_rows)
    kept = min(sum(map(len, slices())), max_ids)
    with NpyWriter(path, np.uint32, (kept, 2)) as file:
        for counts, ranks in zip(slices(), all_ranks, strict=True):
            is_kept = ranks < max_ids
            file.append(np.stack([counts["key"][is_kept], ranks[is_kept] + FIRST_ID], axis=1))
    for run_file in counting.scratch.glob(f"run-{column}-*"):
        run_file.unlink()
    return kept


def _sorted_runs(rows: list[LogRows], column: int, counting: Counting) -> list[np.ndarray]:
    """Return the counts of about `ids_at_once` rows each: in memory if there is one run, otherwise in files."""
    count = _counts_with_first if counting.order == "first-seen" else _counts
    runs: list[np.ndarray] = []
    for run in filter(len, map(count, _read_blocks(rows, column, counting))):
        if len(runs) == 1:
            runs[0] = _spilled(runs[0], counting.scratch / f"run-{column}-0")
        runs.append(_spilled(run, counting.scratch / f"run-{column}-{len(runs)}") if runs else run)
    return runs or [np.empty(0, _BY_FIRST_ROW)]


def _read_blocks(rows: list[LogRows], column: int, counting: Counting) -> Iterator[_Blocks]:
    """Yield blocks of about `ids_at_once` rows together."""
    blocks: _Blocks = []
    num_rows = 0
    for part in rows:
        for first, ids, missing in part.log.read_column(column, part.start, part.stop):
            if blocks and num_rows + len(ids) > counting.ids_at_once:
                yield blocks
                blocks = []
                num_rows = 0
            is_counted = missing & np.uint32(0 if counting.missing_is_zero else 1 << column) == 0
            blocks.append((part.offset + first - part.start, ids, is_counted))
            num_rows += len(ids)
    if blocks:
        yield blocks


def _counts(blocks: _Blocks) -> np.ndarray:
    keys = np.concatenate([ids[is_counted] for _, ids, is_counted in blocks])
    keys.sort()
    starts = _starts_of_equal(keys)
    counts = np.empty(len(starts), _BY_FREQUENCY)
    counts["key"] = keys[starts]
    counts["count"] = np.diff(starts, append=len(keys))
    return counts


def _counts_with_first(blocks: _Blocks) -> np.ndarray:
    """Sort by id, then row, packed into one word: the first of equal ids is the one that was seen first."""
    first_row = blocks[0][0]
    words = []
    for row, ids, is_counted in blocks:
        offsets = np.arange(row - first_row, row - first_row + len(ids), dtype=np.uint64)
        words.append((ids.astype(np.uint64) << np.uint64(32) | offsets)[is_counted])
    packed = np.concatenate(words)
    packed.sort()
    halves = packed.view(np.uint32)  # offset, id, offset, id, ...
    starts = _starts_of_equal(halves[1::2])
    counts = np.empty(len(starts), _BY_FIRST_ROW)
    counts["key"] = halves[1::2][starts]
    counts["count"] = np.diff(starts, append=len(packed))
    counts["first"] = halves[::2][starts].astype(np.int64) + first_row
    return counts


def _starts_of_equal(sorted_keys: np.ndarray) -> np.ndarray:
    """Return the position of the first of each group of equal keys."""
    is_start = np.ones(len(sorted_keys), bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def _spilled(run: np.ndarray, path: Path) -> np.ndarray:
    path.write_bytes(run.data)
    return np.memmap(path, run.dtype, mode="r")


def _slices(runs: list[np.ndarray], counting: Counting) -> _Slices:
    """Return a function that yields the merged counts in slices of ascending raw ids, without the rare ids."""
    longest = max(runs, key=len)["key"]
    num_slices = 1 if len(runs) == 1 else -(-sum(map(len, runs)) // counting.ids_at_once)
    edges = [0, *(int(longest[len(longest) * i // num_slices]) for i in range(1, num_slices)), 2**32]

    def slices() -> Iterator[np.ndarray]:
        for low, high in pairwise(edges):
            counts = runs[0] if len(runs) == 1 else _merged(runs, low, high)
            is_kept = counts["count"] >= counting.min_frequency
            yield counts if is_kept.all() else counts[is_kept]

    return slices


def _merged(runs: list[np.ndarray], low: int, high: int) -> np.ndarray:
    """Add up the counts of raw ids low..high. Runs are in row order, so the first of equal ids was seen first."""
    ranges = [(run, bisect_left(run["key"], low), bisect_left(run["key"], high)) for run in runs]
    records = np.concatenate([_read(run, start, stop) for run, start, stop in ranges])
    records = records[np.argsort(records["key"], kind="stable")]
    starts = _starts_of_equal(records["key"])
    merged = records[starts]
    if len(records):
        merged["count"] = np.add.reduceat(records["count"], starts)
    return merged


def _read(values: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return values[start:stop]; a file is read without mapping it, because mapped pages count as our memory."""
    if not isinstance(values, np.memmap):
        return values[start:stop]
    row_items = values.shape[1] if values.ndim == 2 else 1
    offset = values.offset + int(start) * row_items * values.dtype.itemsize
    assert values.filename
    read = np.fromfile(values.filename, values.dtype, (stop - start) * row_items, offset=offset)
    return read.reshape(stop - start, *values.shape[1:])


def _frequency_ranks(slices: _Slices) -> Iterator[np.ndarray]:
    """Yield the rank of each id by frequency, without sorting all ids at once.

    It is the number of ids that are more frequent, plus the number of equally frequent ids before it.
    """
    num_ids: Counter[int] = Counter()  # by frequency
    for counts in slices():
        found, num_found = np.unique(counts["count"], return_counts=True)
        num_ids.update(dict(zip(found.tolist(), num_found.tolist(), strict=True)))
    descending = np.array(sorted(num_ids, reverse=True), np.int64)
    next_rank = np.cumsum([0, *(num_ids[frequency] for frequency in descending.tolist())])
    for counts in slices():
        group = np.searchsorted(-descending, -counts["count"])
        order = np.argsort(group, kind="stable")
        group_sizes = np.bincount(group, minlength=len(next_rank))
        within_group = np.arange(len(group)) - np.repeat(np.cumsum(group_sizes) - group_sizes, group_sizes)
        ranks = np.empty(len(group), np.int64)
        ranks[order] = next_rank[group[order]] + within_group
        next_rank = next_rank + group_sizes
        yield ranks


def _first_seen_ranks(slices: _Slices, num_rows: int) -> Iterator[np.ndarray]:
    """Yield the rank of each id by first occurrence.

    Each row where an id occurs first sets a bit: the rank of an id is the number of bits before its own.
    """
    words = np.zeros(num_rows // 64 + 1, np.uint64)
    for counts in slices():
        np.bitwise_or.at(words, counts["first"] >> 6, np.uint64(1) << (counts["first"] & 63).astype(np.uint64))
    before = np.concatenate([[0], np.cumsum(np.bitwise_count(words), dtype=np.int64)])
    for counts in slices():
        bit = np.uint64(1) << (counts["first"] & 63).astype(np.uint64)
        below = np.bitwise_count(words[counts["first"] >> 6] & (bit - np.uint64(1)))
        yield before[counts["first"] >> 6] + below


def lookup_rounds(paths: list[Path], missing_is_zero: bool, memory: int) -> "list[LookupRound]":
    """Return rounds such that each id of each column is mapped in exactly one of them, in `memory` bytes each.

    `paths` are the vocabularies of the columns; one that is too large for a round is divided.
    """
    rounds = []
    most_slots = max(memory // _BYTES_PER_SLOT, 1 << 12)
    parts: list[tuple[int, int, int]] = []
    used = 0
    for column, path in enumerate(paths):
        size = len(np.load(path, mmap_mode="r"))
        num_parts = -(-_num_slots(size) // most_slots)
        for low, high in pairwise(size * part // num_parts for part in range(num_parts + 1)):
            slots = _num_slots(high - low)
            if parts and used + slots > most_slots:
                rounds.append(LookupRound(paths, parts, missing_is_zero))
                parts = []
                used = 0
            parts.append((column, low, high))
            used += slots
    return [*rounds, LookupRound(paths, parts, missing_is_zero)]


def _num_slots(ids: int) -> int:
    """Return a power of two of which at most three quarters will be used."""
    return 1 << max(4, (ids * 4 // 3).bit_length())


class LookupRound:
    """Raw ids -> contiguous ids through hash tables, which are built at the first use.

    Each table is for (column, low, high): rows low..high of the vocabulary of a column.
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
        """Return (slots of all tables, offsets of the tables, shifts of their hashes, columns, ranges of raw ids)."""
        sizes = [_num_slots(high - low) for _, low, high in self._parts]
        offsets = np.cumsum([0, *sizes])
        shifts = np.array([32 - (size.bit_length() - 1) for size in sizes], dtype=np.uint64)
        edges = np.zeros((len(sizes), 2), np.uint64)
        slots = np.zeros(offsets[-1], np.uint64)
        for index, (column, low, high) in enumerate(self._parts):
            pairs = np.load(self._paths[column], mmap_mode="r")
            lowest = 0 if low == 0 else int(pairs[low, 0])
            edges[index] = (lowest, 2**32 if high == len(pairs) else int(pairs[high, 0]))
            table = slots[offsets[index] : offsets[index + 1]]
            for start in range(low, high, _FILLED_AT_ONCE):
                _fill(table, shifts[index], _read(pairs, start, min(start + _FILLED_AT_ONCE, high)))
        return slots, offsets, shifts, np.array([column for column, _, _ in self._parts]), edges


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
