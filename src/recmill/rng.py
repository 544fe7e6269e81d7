"""Counter-based random numbers: a value depends only on its key and its counter.

Any process can therefore compute any part of a table, of an epoch's order or of a mask.
"""

import math

import numpy as np
import xxhash

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def stream_key(*parts: int | str) -> np.uint64:
    """Return the 64-bit key of a named stream, such as stream_key(seed, "mask", epoch)."""
    return np.uint64(xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode()))


def bits(key: np.uint64 | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return 64 random bits per counter (splitmix64). `key` may hold one key per counter."""
    with np.errstate(over="ignore"):
        z = counters.astype(np.uint64)
        z *= _GOLDEN
        z += key
        z ^= z >> np.uint64(30)
        z *= _M1
        z ^= z >> np.uint64(27)
        z *= _M2
        z ^= z >> np.uint64(31)
    return z


def uniform(key: np.uint64 | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return uniform float64 values in [0, 1)."""
    return (bits(key, counters) >> np.uint64(11)) * 2.0**-53


def normal(key: np.uint64, counters: np.ndarray) -> np.ndarray:
    """Return normal float64 values with mean 0 and variance 1 (Box-Muller)."""
    doubled = counters.astype(np.uint64) * np.uint64(2)
    radius = np.sqrt(-2.0 * np.log1p(-uniform(key, doubled)))
    return radius * np.cos(2.0 * np.pi * uniform(key, doubled + np.uint64(1)))


def uniform_floats(key: np.uint64, first: int, count: int, bound: float) -> np.ndarray:
    """Return values first..first+count-1 of a uniform float32 stream in [-bound, bound)."""
    pairs = np.arange(first // 2, (first + count + 1) // 2, dtype=np.uint64)
    halves = bits(key, pairs).view(np.uint32)[first % 2 :][:count]
    out = (halves >> np.uint32(8)).astype(np.float32)
    out *= np.float32(bound * 2.0**-23)
    out -= np.float32(bound)
    return out


# Keys of dynamic tables: a permutation of the ids 0..2^62-1 that spreads them evenly over processes.
NUM_KEYS = 2**62
_MASK = np.uint64(NUM_KEYS - 1)
_INVERSES = tuple(np.uint64(pow(int(factor), -1, NUM_KEYS)) for factor in (_M1, _M2))


def keys_of_ids(ids: np.ndarray) -> np.ndarray:
    """Return the key of each id in 0..2^62-1 (int64)."""
    z = ids.astype(np.uint64)
    for factor in (_M1, _M2):
        z ^= z >> np.uint64(31)
        z *= factor
        z &= _MASK
    z ^= z >> np.uint64(31)
    return z.view(np.int64)


def ids_of_keys(keys: np.ndarray) -> np.ndarray:
    """Return the id of each key (int64)."""
    z = keys.astype(np.uint64)
    for inverse in reversed(_INVERSES):
        z ^= z >> np.uint64(31)
        z *= inverse
        z &= _MASK
    z ^= z >> np.uint64(31)
    return z.view(np.int64)


class Permutation:
    """A permutation of range(size), computed by a Feistel network over an almost square grid.

    The grid has up to 2 sqrt(size) + 1 excess cells; a position that lands there is permuted again.
    """

    def __init__(self, size: int, key: np.uint64) -> None:
        self.size = size
        side = math.isqrt(max(size - 1, 0)) + 1
        self._sides = np.uint64(side), np.uint64(-(-size // side))
        self._keys = bits(key, np.arange(4, dtype=np.uint64))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        cells = self._encrypt(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(cells >= self.size)):
            cells[outside] = self._encrypt(cells[outside])
        return cells.astype(np.int64)

    def _encrypt(self, cells: np.ndarray) -> np.ndarray:
        rows, columns = self._sides
        row, column = np.divmod(cells, columns)
        for row_key, column_key in zip(self._keys[:2], self._keys[2:], strict=True):
            row = _shift(row, bits(row_key, column), rows)
            column = _shift(column, bits(column_key, row), columns)
        return row * columns + column


def _shift(positions: np.ndarray, random: np.ndarray, size: np.uint64) -> np.ndarray:
    """Return positions + random steps modulo `size` < 2^32. Overwrites `random`, 64 bits each."""
    random >>= np.uint64(32)
    random *= size
    random >>= np.uint64(32)
    random += positions
    random -= size * (random >= size)
    return random
