"""Raw ids -> rows of tables by modulo or by hash, without a vocabulary."""

import numpy as np

from recmill.datasets.click_log import LogBlock
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


_CHUNK = 1 << 14  # ids: their intermediate values stay in a core's cache


def hash64(block: LogBlock) -> np.ndarray:
    """Return int64 [n, num_sparse]: Spark's xxhash64(id as 8 hexadecimal digits, column), which skips a missing id."""
    out = np.empty(block.ids.shape, np.uint64)
    for column, (ids, is_missing) in enumerate(zip(block.ids, block.is_missing, strict=True)):
        mixed_in = np.uint64((column * int(_P1)) % 2**64)
        for first in range(0, len(ids), _CHUNK):
            part = slice(first, first + _CHUNK)
            lane = _rotated(_hexadecimal(ids[part]) * _P2, 31) * _P1
            text = _mixed(_rotated(lane ^ _SEED_OF_TEXT, 27) * _P1 + _P4)
            state = np.where(is_missing[part], _SPARKS_SEED, text) + (_P5 + np.uint64(4))
            out[column, part] = _mixed(_rotated(state ^ mixed_in, 23) * _P2 + _P3)
    return out.view(np.int64).T


def _hexadecimal(ids: np.ndarray) -> np.ndarray:
    """Return the 8 digits of each uint32 as the bytes of a uint64: one digit per byte, first the most significant."""
    digits = ids.astype(np.uint64)
    for shift, kept in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        digits = (digits | digits << np.uint64(shift)) & np.uint64(kept)
    is_letter = (digits + np.uint64(0x0606060606060606)) >> np.uint64(4) & np.uint64(0x0101010101010101)
    digits += np.uint64(0x3030303030303030) + is_letter * np.uint64(ord("a") - ord("0") - 10)
    return digits.byteswap()


def _rotated(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(33))) * _P2
    x = (x ^ (x >> np.uint64(29))) * _P3
    return x ^ (x >> np.uint64(32))
