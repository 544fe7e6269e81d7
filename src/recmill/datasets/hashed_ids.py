"""Raw ids -> rows of tables by modulo or by hash, without a vocabulary."""

import numpy as np

from recmill.datasets.click_log import LogBlock
from recmill.datasets.compiled import compiled
from recmill.datasets.vocabularies import MISSING


def modulo(block: LogBlock, sizes: np.ndarray) -> np.ndarray:
    """Return int64 [n, num_sparse]: 0 for a missing id, else 1 + raw id % (size - 1)."""
    ids = (block.ids % (sizes - 1)[:, None].astype(np.uint32)).astype(np.int64) + 1
    return np.where(block.is_missing, MISSING, ids).T


def modulo_as_torchrec(block: LogBlock, sizes: np.ndarray) -> np.ndarray:
    """Return int64 [n, num_sparse] as TorchRec's loader does: a missing id counts as raw id 0."""
    return (block.ids % sizes[:, None]).astype(np.int64).T


def modulo_as_oneflow(block: LogBlock, size: int) -> np.ndarray:
    """Return int64 [n, num_sparse]: column c starts at size * c; its missing id is the first id of column c + 1."""
    offsets = size * np.arange(len(block.ids))[:, None]
    ids = block.ids.astype(np.int64) % size + offsets
    return np.where(block.is_missing, offsets + size, ids).T


def hashed_modulo(block: LogBlock, sizes: np.ndarray) -> np.ndarray:
    """Return int64 [n, num_sparse]: 0 for a missing id, else 1 + hash64 % (size - 1)."""
    buckets = (hash64(block).view(np.uint64) % (sizes - 1).astype(np.uint64)).astype(np.int64) + 1
    return np.where(block.is_missing.T, MISSING, buckets)


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_SPARKS_SEED = np.uint64(42)
_SEED_OF_TEXT = np.uint64((42 + int(_P5) + 8) % 2**64)
_CHUNK = 128  # rows: the hashes of all their columns stay in the nearest cache


def hash64(block: LogBlock) -> np.ndarray:
    """Return int64 [n, num_sparse]: Spark's xxhash64(id as 8 hexadecimal digits, column), which skips a missing id."""
    out = np.empty(block.ids.shape[::-1], np.uint64)
    _hash64(block.ids, block.missing, out)
    return out.view(np.int64)


@compiled
def _hash64(ids, missing, out):
    hashes = np.empty(_CHUNK, np.uint64)  # of one column: only stores side by side are done several at once
    for first in range(0, len(out), _CHUNK):
        rows = out[first : first + _CHUNK]
        is_missing = missing[first : first + _CHUNK]
        for column in range(len(ids)):
            numbers = ids[column, first : first + _CHUNK]
            bit = np.uint32(1) << np.uint32(column)
            mixed_in = np.uint64(column) * _P1
            for i in range(len(rows)):
                lane = _rotated(_hexadecimal(numbers[i]) * _P2, 31) * _P1
                text = _mixed(_rotated(lane ^ _SEED_OF_TEXT, 27) * _P1 + _P4)
                state = (_SPARKS_SEED if is_missing[i] & bit else text) + (_P5 + np.uint64(4))
                hashes[i] = _mixed(_rotated(state ^ mixed_in, 23) * _P2 + _P3)
            for i in range(len(rows)):
                rows[i, column] = hashes[i]


@compiled
def _hexadecimal(number):
    """Return the 8 digits of a uint32 as the bytes of a uint64; the first digit is the lowest byte."""
    x = np.uint64(number)
    x = x >> np.uint64(16) | (x & np.uint64(0xFFFF)) << np.uint64(32)
    x = x >> np.uint64(8) & np.uint64(0x000000FF000000FF) | (x & np.uint64(0x000000FF000000FF)) << np.uint64(16)
    x = x >> np.uint64(4) & np.uint64(0x000F000F000F000F) | (x & np.uint64(0x000F000F000F000F)) << np.uint64(8)
    is_letter = (x + np.uint64(0x0606060606060606)) >> np.uint64(4) & np.uint64(0x0101010101010101)
    return x + np.uint64(0x3030303030303030) + is_letter * np.uint64(ord("a") - ord("0") - 10)


@compiled
def _rotated(x, by):
    return x << np.uint64(by) | x >> np.uint64(64 - by)


@compiled
def _mixed(x):
    x = (x ^ x >> np.uint64(33)) * _P2
    x = (x ^ x >> np.uint64(29)) * _P3
    return x ^ x >> np.uint64(32)
