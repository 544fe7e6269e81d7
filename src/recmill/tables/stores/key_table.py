"""Which ids of a dynamic table have a row of their own: the Python side of `kernels/keys.cpp`.

An id is a number below 2^62. Its *key*, `rng.keys_of_ids`, spreads ids evenly; a process holds a range of keys.

- *Admission*: an id gets a row in the first batch in which its occurrences, that batch included, reach `min_count`; or,
  with `admit_probability`, in the first batch whose toss it wins: a function of the seed, the table, the key and the
  batch. Before that, and in every evaluation, ids without a row use one of SHARED_ROWS rows, chosen by their key.
- *Expiry*: an id that occurs `expire_after_steps` or more batches after it last occurred is new: its count is 0 and its
  row has first values. So it does not matter when the memory of expired ids is freed.
- *First values* are functions of the seed, the table, the key and the column. Those of shared rows are 0.

All of it is independent of the number of processes, whose boundaries never divide the keys of a shared row.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np

from recmill import rng
from recmill.errors import ResourceError
from recmill.kernels.library import load_rows_library
from recmill.tables.spec import Dynamic

SHARED_ROWS = 1024  # also the maximum number of processes
KEYS_PER_SHARED_ROW = rng.NUM_KEYS // SHARED_ROWS
_ENTRY_BYTES = 24  # of keys.cpp
_KEYS_PER_ROW = 4  # ids that wait for admission are remembered too


class KeyShard(NamedTuple):
    """The part of a table that one process holds: a range of keys, and room for the rows of some of them."""

    name: str
    first_key: int
    shared_rows: int
    max_rows: int  # besides shared rows

    @property
    def rows(self) -> int:
        return self.shared_rows + self.max_rows

    @property
    def end_key(self) -> int:
        return self.first_key + self.shared_rows * KEYS_PER_SHARED_ROW


def shard_keys(name: str, rules: Dynamic, part: int, parts: int) -> KeyShard:
    """Return part `part` of a table that is divided into `parts`. Some parts may get more keys than others."""
    blocks = -(-SHARED_ROWS // parts)
    first = min(part * blocks, SHARED_ROWS)
    room = rules.max_rows if parts == 1 else -(-rules.max_rows // parts) + 4 * int(rules.max_rows**0.5)
    return KeyShard(name, first * KEYS_PER_SHARED_ROW, min(blocks, SHARED_ROWS - first), min(room, rules.max_rows))


def keys_per_part(parts: int) -> int:
    return -(-SHARED_ROWS // parts) * KEYS_PER_SHARED_ROW


def index_bytes(shard: KeyShard, rules: Dynamic) -> int:
    """Return the memory that the keys of a shard take at most, beside its rows."""
    size = 1
    while size < 2 * _max_entries(shard, rules):
        size *= 2
    return size * _ENTRY_BYTES * 2 + 4 * shard.max_rows  # while it grows or is swept, it exists twice


def _max_entries(shard: KeyShard, rules: Dynamic) -> int:
    waits = rules.min_count > 1 or rules.expire_after_steps > 0
    return shard.max_rows * (_KEYS_PER_ROW if waits else 1)


class Entries(NamedTuple):
    """What is known about keys, in no order (int64 each)."""

    keys: np.ndarray
    lasts: np.ndarray  # the batch in which a key last occurred
    counts: np.ndarray
    rows: np.ndarray  # of the shard; -1: the key has none yet


class Facts(NamedTuple):
    rows: int  # that ids have now; those of expired ones until they are noticed
    keys: int  # that are remembered now
    admitted: int  # rows that were given to ids since the table was opened
    expired: int  # rows that were taken from ids
    bytes: int


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("first_key", "shared_rows", "bits_per_shared_row", "max_rows", "max_entries")),
        *((name, c_int64) for name in ("min_count", "tosses_coin", "expire_after")),
        ("coin_stream", c_uint64),
        ("coin_limit", c_uint64),
    ]


class KeyTable:
    """The keys of a shard. `clock` counts the batches that the table was trained with."""

    def __init__(self, shard: KeyShard, rules: Dynamic, seed: int) -> None:
        self.shard, self.rules, self.clock = shard, rules, 0
        self.stream = rng.stream_key(seed, "table", shard.name)
        self._library = load_rows_library()
        self._library.keys_open.restype = c_void_p
        for function in ("keys_find", "keys_copy", "keys_load"):
            getattr(self._library, function).restype = c_int64
        options = _Options(
            shard.first_key,
            shard.shared_rows,
            KEYS_PER_SHARED_ROW.bit_length() - 1,
            shard.max_rows,
            _max_entries(shard, rules),
            rules.min_count,
            rules.admit_probability < 1,
            rules.expire_after_steps,
            int(rng.stream_key(seed, "admission", shard.name)),
            int(rules.admit_probability * 2.0**53),
        )
        self.handle = c_void_p(self._library.keys_open(ctypes.byref(options)))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.keys_close(self.handle)

    @property
    def first_shared_row(self) -> int:
        """The number of the shard's first shared row among those of the table."""
        return self.shard.first_key // KEYS_PER_SHARED_ROW

    def train(self, local_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count the keys of the next batch; return the row of each, and the keys and rows that are new."""
        rows, ((new_keys, new_rows),) = train_together([self], local_keys, [0], [len(local_keys)])
        return rows, new_keys, new_rows

    def find(self, local_keys: np.ndarray, *, only_own: bool = False) -> np.ndarray:
        """Return the row of each key for an evaluation; with `only_own` -1 for those without a row of their own."""
        local_keys = np.ascontiguousarray(local_keys, np.int64)
        rows = np.empty(len(local_keys), np.int64)
        numbers = c_int64(len(rows)), c_int64(self.clock), c_int64(only_own)
        self.check(self._call("keys_find", _address(local_keys), *numbers, _address(rows)))
        return rows

    def entries(self) -> Entries:
        """Return what is known about keys that have not expired."""
        clock = c_int64(self.clock)
        count = self._call("keys_copy", clock, *[c_void_p()] * 4)
        found = Entries(*(np.empty(count, np.int64) for _ in range(4)))
        self._call("keys_copy", clock, *map(_address, found))
        return found

    def load(self, entries: Entries, clock: int) -> None:
        """Replace all keys by those of this shard in `entries`. Those whose `rows` are not -1 get a row."""
        is_here = (entries.keys >= self.shard.first_key) & (entries.keys < self.shard.end_key)
        entries = Entries(*(values[is_here] for values in entries))
        self._call("keys_clear")
        self.clock = clock
        keys, lasts, counts, rows = (np.array(values, np.int64) for values in entries)
        arrays = _address(keys), _address(lasts), _address(counts), _address(rows)
        self.check(self._call("keys_load", *arrays, c_int64(len(keys))))

    def first_values(self, keys: np.ndarray, dim: int, bound: float) -> np.ndarray:
        """Return the first values of keys, float32 [n, dim]."""
        out = np.empty((len(keys), dim), np.float32)
        scale, offset = (c_float(float(np.float32(value))) for value in (bound * 2.0**-23, bound))
        numbers = c_int64(len(keys)), c_int64(dim), scale, offset
        keys = np.ascontiguousarray(keys, np.int64)
        self._library.keys_first_values(c_uint64(int(self.stream)), _address(keys), *numbers, _address(out))
        return out

    def facts(self) -> Facts:
        values = np.empty(len(Facts._fields), np.int64)
        self._call("keys_facts", _address(values))
        return Facts(*values.tolist())

    def _call(self, function: str, *arguments: object) -> int:
        return getattr(self._library, function)(self.handle, *arguments)

    def check(self, result: int) -> None:
        if result >= 0:
            return
        name = self.shard.name
        if result == -3:  # ids are checked when they are loaded: this is a defect
            raise IndexError(f"table '{name}': a key is outside the shard, or occurs twice")
        what = "ids that have a row" if result == -1 else "ids that have a row or wait for one"
        limit = self.shard.max_rows if result == -1 else _max_entries(self.shard, self.rules)
        raise ResourceError(
            f"Dynamic table '{name}': there are more than {limit:,} {what} on a process. Raise max_rows in "
            "tables.dynamic, or admit fewer ids (min_count) or forget more (expire_after_steps), and resume the run."
        )


def train_together(
    tables: Sequence[KeyTable], local_keys: np.ndarray, firsts: Sequence[int], ends: Sequence[int]
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Count the keys of the next batch of several tables, in parallel: those from `firsts` to `ends`, by table.

    Keys count from the first one of the table's shard. Return the row of each key, and of each table the keys and rows
    that are new: these rows must get their first values.
    """
    local_keys = np.ascontiguousarray(local_keys, np.int64)
    rows, new_keys, new_rows = local_keys.copy(), np.empty_like(local_keys), np.empty_like(local_keys)
    numbers = np.array([[table.clock for table in tables], firsts, ends, [0] * len(tables)], np.int64)
    handles = (c_void_p * len(tables))(*(table.handle for table in tables))
    arrays = map(_address, (*numbers[:3], local_keys, rows, new_keys, new_rows, numbers[3]))
    load_rows_library().keys_train(handles, c_int64(len(tables)), *arrays)
    found = []
    for table, first, count in zip(tables, firsts, numbers[3].tolist(), strict=True):
        table.check(count)
        table.clock += 1
        found.append((new_keys[first : first + count], new_rows[first : first + count]))
    return rows, found


def _address(values: np.ndarray) -> c_void_p:
    return c_void_p(values.__array_interface__["data"][0])  # in a fifth of the time of `values.ctypes.data`
