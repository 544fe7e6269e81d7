"""Raw ids -> rows of tables: vocabularies counted in bounded memory, and the rules that need none."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from recmill.datasets.criteo.log import NUM_SPARSE, LogBlock, ParsedLog
from recmill.datasets.parallel import compiled
from recmill.datasets.writing import NpyWriter

MISSING, RARE, FIRST_ID = 0, 1, 2  # contiguous ids
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
class Counts:
    """Raw ids in rising order, how often each occurs, and the row where each occurs first (or nothing)."""

    keys: np.ndarray
    counts: np.ndarray
    first: np.ndarray

    @staticmethod
    def merged(parts: "list[Counts]") -> "Counts":
        keys = np.concatenate([part.keys for part in parts])
        counts, first = np.concatenate([p.counts for p in parts]), np.concatenate([p.first for p in parts])
        order = np.argsort(keys, kind="stable")  # runs come in row order, so the first of equal keys was seen first
        keys = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else order
        counts = np.add.reduceat(counts[order], starts) if len(keys) else counts
        return Counts(keys[starts], counts, first[order][starts] if len(first) else first)

    def between(self, low: int, high: int) -> "Counts":
        start, stop = np.searchsorted(self.keys, [low, high])
        return Counts(*(_read(values, start, stop) for values in (self.keys, self.counts, self.first)))


def _read(values: np.ndarray, start: int, stop: int) -> np.ndarray:
    """values[start:stop]; of a file by plain reading, because mapped pages count as memory of ours."""
    if not isinstance(values, np.memmap):
        return values[start:stop]
    row_bytes = values.dtype.itemsize * (values.shape[1] if values.ndim == 2 else 1)
    assert values.filename
    read = np.fromfile(
        values.filename, values.dtype, (stop - start) * row_bytes // values.dtype.itemsize,
        offset=values.offset + int(start) * row_bytes,
    )  # fmt: skip
    return read.reshape(stop - start, *values.shape[1:])


def write_vocabulary(
    path: Path,
    rows: list[LogRows],
    column: int,
    *,
    order: str,
    min_frequency: int,
    max_ids: int,
    missing_is_zero: bool,
    memory: int,
    scratch: Path,
) -> int:
    """Count a column and write (raw id, our id) uint32 [n, 2], in rising order of raw ids. Returns n.

    Ours start at 2: by falling frequency, ties by value; or by first occurrence (`order` first-seen). Only the first
    `max_ids` are kept. `memory` bytes are enough for any number of rows: counts that do not fit go to `scratch`.
    """
    at_once = max(memory // _BYTES_PER_COUNTED, 1 << 12)
    runs = _counted(rows, column, order == "first-seen", missing_is_zero, at_once, scratch)
    pieces = _pieces(runs, at_once, min_frequency)
    rank = _first_seen_ranks if order == "first-seen" else _frequency_ranks
    total_rows = rows[-1].number + rows[-1].stop - rows[-1].start
    kept = min(sum(len(piece.keys) for piece in pieces()), max_ids)
    with NpyWriter(path, np.uint32, (kept, 2)) as file:
        for piece, ranks in zip(pieces(), rank(pieces, total_rows), strict=True):
            is_kept = ranks < max_ids
            file.append(np.stack([piece.keys[is_kept], ranks[is_kept] + FIRST_ID], axis=1))
    for file_path in scratch.glob(f"run-{column}-*.npy"):
        file_path.unlink()
    return kept


def _counted(
    rows: list[LogRows], column: int, with_first: bool, missing_is_zero: bool, at_once: int, scratch: Path
) -> list[Counts]:
    """Sorted runs, one per `at_once` rows: in memory if there is one, else files."""
    runs: list[Counts] = []
    for slab in _slabs(rows, column, with_first, missing_is_zero, at_once):
        run = _counts_with_first(slab) if with_first else _counts(slab.ids)
        if len(runs) == 1:
            runs[0] = _spilled(runs[0], scratch / f"run-{column}-0")
        runs.append(_spilled(run, scratch / f"run-{column}-{len(runs)}") if runs else run)
    return runs or [_counts(np.empty(0, np.uint32))]


@dataclass(frozen=True)
class _Slab:
    """Ids of consecutive rows, without the missing ones; each one's row is `first_row` + its offset (uint32)."""

    ids: np.ndarray
    offsets: np.ndarray
    first_row: int


def _slabs(
    rows: list[LogRows], column: int, with_offsets: bool, missing_is_zero: bool, at_once: int
) -> Iterator[_Slab]:
    """About `at_once` rows at a time; none without any id."""
    ids_parts: list[np.ndarray] = []
    offset_parts: list[np.ndarray] = []
    first_row = count = 0

    def slab() -> _Slab:
        return _Slab(
            np.concatenate(ids_parts), np.concatenate(offset_parts) if with_offsets else ids_parts[0], first_row
        )

    for part in rows:
        for first, ids, missing in part.log.read_column(column, part.start, part.stop):
            row = part.number + first - part.start
            if count + len(ids) > at_once:
                if any(map(len, ids_parts)):
                    yield slab()
                ids_parts, offset_parts, count = [], [], 0
            first_row = first_row if count else row
            is_kept = slice(None) if missing_is_zero else missing & np.uint32(1 << column) == 0
            ids_parts.append(ids[is_kept])
            if with_offsets:
                offset_parts.append(np.arange(row - first_row, row - first_row + len(ids), dtype=np.uint32)[is_kept])
            count += len(ids)
    if any(map(len, ids_parts)):
        yield slab()


def _counts(keys: np.ndarray) -> Counts:
    keys.sort()
    starts = _run_starts(keys)
    return Counts(keys[starts], np.diff(starts, append=len(keys)), np.empty(0, np.int64))


def _counts_with_first(slab: _Slab) -> Counts:
    """Sorted by id, then row, as one word: the first of equal ids is the one that was seen first."""
    packed = slab.ids.astype(np.uint64)
    packed <<= _KEY_SHIFT
    packed |= slab.offsets
    packed.sort()
    halves = packed.view(np.uint32)  # offset, id, offset, id, ...
    starts = _run_starts(halves[1::2])
    first = halves[::2][starts].astype(np.int64) + slab.first_row
    return Counts(halves[1::2][starts], np.diff(starts, append=len(packed)), first)


def _run_starts(sorted_keys: np.ndarray) -> np.ndarray:
    is_start = np.ones(len(sorted_keys), bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def _spilled(run: Counts, stem: Path) -> Counts:
    arrays = []
    for name, values in (("keys", run.keys), ("counts", run.counts), ("first", run.first)):
        path = Path(f"{stem}-{name}.npy")
        with NpyWriter(path, values.dtype.type, values.shape) as file:
            file.append(values)
        arrays.append(np.load(path, mmap_mode="r") if len(values) else values)
    return Counts(*arrays)


def _pieces(runs: list[Counts], at_once: int, min_frequency: int) -> Callable[[], Iterator[Counts]]:
    """The merged counts in pieces of rising raw ids, without the rare ones; may be asked for several times."""
    total = sum(len(run.keys) for run in runs)
    longest = max(runs, key=lambda run: len(run.keys)).keys
    num_pieces = 1 if len(runs) == 1 else -(-total // at_once)
    inner = [int(longest[len(longest) * i // num_pieces]) for i in range(1, num_pieces)]
    edges = [0, *inner, 2**32]

    def pieces() -> Iterator[Counts]:
        for low, high in pairwise(edges):
            piece = Counts.merged([run.between(low, high) for run in runs]) if len(runs) > 1 else runs[0]
            is_kept = piece.counts >= min_frequency
            if not is_kept.all():
                first = piece.first[is_kept] if len(piece.first) else piece.first
                piece = Counts(piece.keys[is_kept], piece.counts[is_kept], first)
            yield piece

    return pieces


def _frequency_ranks(pieces: Callable[[], Iterator[Counts]], total_rows: int) -> Iterator[np.ndarray]:
    """Without sorting all ids at once: how many are more frequent, plus how many of equal frequency came before."""
    frequencies, sizes = np.empty(0, np.int64), np.empty(0, np.int64)
    for piece in pieces():
        merged = np.concatenate([frequencies, piece.counts])
        weights = np.concatenate([sizes, np.ones(len(piece.counts), np.int64)])
        frequencies, inverse = np.unique(merged, return_inverse=True)
        sizes = np.bincount(inverse, weights, minlength=len(frequencies)).astype(np.int64)
    next_rank = np.concatenate([np.cumsum(sizes[::-1])[::-1][1:], [0]]) if len(sizes) else sizes
    for piece in pieces():
        group = np.searchsorted(frequencies, piece.counts)
        order = np.argsort(group, kind="stable")
        sizes_here = np.bincount(group, minlength=len(frequencies))
        within = np.arange(len(group)) - np.repeat(np.cumsum(sizes_here) - sizes_here, sizes_here)
        ranks = np.empty(len(group), np.int64)
        ranks[order] = next_rank[group[order]] + within
        next_rank = next_rank + sizes_here
        yield ranks


def _first_seen_ranks(pieces: Callable[[], Iterator[Counts]], total_rows: int) -> Iterator[np.ndarray]:
    """A bit for each row where an id occurs first: the rank of an id is the number of bits before its own."""
    words = np.zeros(total_rows // 64 + 1, np.uint64)
    for piece in pieces():
        np.bitwise_or.at(words, piece.first >> 6, np.uint64(1) << (piece.first & 63).astype(np.uint64))
    before = np.concatenate([[0], np.cumsum(np.bitwise_count(words), dtype=np.int64)])
    for piece in pieces():
        bit = np.uint64(1) << (piece.first & 63).astype(np.uint64)
        below = np.bitwise_count(words[piece.first >> 6] & (bit - np.uint64(1)))
        yield before[piece.first >> 6] + below


class Vocabularies:
    """Raw ids -> contiguous ids for all columns, by hash tables. Tables that do not fit in memory come in rounds."""

    def __init__(self, paths: list[Path], missing_is_zero: bool) -> None:
        self._paths, self._missing_is_zero = paths, missing_is_zero
        self.sizes = [len(np.load(path, mmap_mode="r")) for path in paths]

    def rounds(self, memory: int) -> "list[LookupRound]":
        """Every id of every column is found in exactly one round."""
        found = []
        most = max(memory // _BYTES_PER_SLOT, 1 << 12)
        columns: list[tuple[int, int, int]] = []
        used = 0
        for column, size in enumerate(self.sizes):
            slots = _num_slots(size)
            parts = -(-slots // most)
            for part in range(parts):
                low, high = size * part // parts, size * (part + 1) // parts
                slots = _num_slots(high - low)
                if columns and used + slots > most:
                    found.append(LookupRound(self._paths, columns, self._missing_is_zero))
                    columns, used = [], 0
                columns.append((column, low, high))
                used += slots
        return [*found, LookupRound(self._paths, columns, self._missing_is_zero)]


def _num_slots(ids: int) -> int:
    """A power of two, at most three quarters of it used."""
    return 1 << max(4, (ids * 4 // 3).bit_length())


class LookupRound:
    """Hash tables for some columns, or parts of columns (low..high of the vocabulary's rising raw ids).

    They are built when they are first used.
    """

    def __init__(self, paths: list[Path], parts: list[tuple[int, int, int]], missing_is_zero: bool) -> None:
        self._paths, self._parts, self._missing_is_zero = paths, parts, missing_is_zero
        self._lock = threading.Lock()
        self._tables: tuple[np.ndarray, ...] | None = None

    def map(self, block: LogBlock, out: np.ndarray) -> None:
        """Fill `out` [n, 26] for the ids that this round knows of. May be called by several threads."""
        with self._lock:
            self._tables = self._tables or self._build()
        _map(*self._tables, block.ids, block.missing, self._missing_is_zero, out)

    def forget(self) -> None:
        self._tables = None

    def _build(self) -> tuple[np.ndarray, ...]:
        """(all tables end to end, where each starts, its hash's shift, its column, the raw ids it decides)."""
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
    """Fibonacci hashing: the top bits of a product."""
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
def _map(slots, offsets, shifts, columns, edges, ids, missing, missing_is_zero, out):
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


def modulo(block: LogBlock, sizes: np.ndarray) -> np.ndarray:
    """int64 [n, 26]: 0 is missing, 1..size-1 the raw id by modulo."""
    ids = (block.ids % (sizes - 1)[:, None].astype(np.uint32)).astype(np.int64) + 1
    ids[is_missing(block)] = MISSING
    return ids.T


def modulo_as_torchrec(block: LogBlock, sizes: np.ndarray) -> np.ndarray:
    """int64 [n, 26]: missing counts as raw id 0, as in TorchRec's loader."""
    return (block.ids % sizes[:, None]).astype(np.int64).T


def modulo_as_oneflow(block: LogBlock, size: int) -> np.ndarray:
    """int64 [n, 26]: column c has ids from size * c on, and its missing one is the first of column c + 1."""
    offsets = size * np.arange(NUM_SPARSE)[:, None]
    ids = block.ids.astype(np.int64) % size + offsets
    return np.where(is_missing(block), offsets + size, ids).T


def is_missing(block: LogBlock) -> np.ndarray:
    """bool [26, n]."""
    return (block.missing >> np.arange(NUM_SPARSE, dtype=np.uint32)[:, None]) & np.uint32(1) != 0


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_SPARKS_SEED = np.uint64(42)


def hash64(block: LogBlock) -> np.ndarray:
    """int64 [n, 26]: Spark's xxhash64(id as 8 hexadecimal digits, column), which passes over an id that is missing."""
    with np.errstate(over="ignore"):
        nibbles = (block.ids[..., None] >> np.arange(28, -4, -4, dtype=np.uint32)) & np.uint32(15)
        letters = nibbles.astype(np.uint8)
        letters += np.where(letters < 10, np.uint8(48), np.uint8(87))
        lane = letters.view(np.uint64)[..., 0]
        text = _rotated((_SPARKS_SEED + _P5 + np.uint64(8)) ^ (_rotated(lane * _P2, 31) * _P1), 27) * _P1 + _P4
        state = np.where(is_missing(block), _SPARKS_SEED, _mixed(text)) + _P5 + np.uint64(4)
        column = np.arange(NUM_SPARSE, dtype=np.uint64)[:, None]
        state = _rotated(state ^ (column * _P1), 23) * _P2 + _P3
        return _mixed(state).view(np.int64).T


def _rotated(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(33))) * _P2
    x = (x ^ (x >> np.uint64(29))) * _P3
    return x ^ (x >> np.uint64(32))
