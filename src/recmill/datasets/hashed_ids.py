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


def hash64(block: LogBlock) -> np.ndarray:
    """Return int64 [n, num_sparse]: Spark's xxhash64(id as 8 hexadecimal digits, column), which skips a missing id."""
    with np.errstate(over="ignore"):
        nibbles = (block.ids[..., None] >> np.arange(28, -4, -4, dtype=np.uint32)) & np.uint32(15)
        letters = nibbles.astype(np.uint8)
        letters += np.where(letters < 10, np.uint8(48), np.uint8(87))
        lane = letters.view(np.uint64)[..., 0]
        text = _rotated((_SPARKS_SEED + _P5 + np.uint64(8)) ^ (_rotated(lane * _P2, 31) * _P1), 27) * _P1 + _P4
        state = np.where(block.is_missing, _SPARKS_SEED, _mixed(text)) + _P5 + np.uint64(4)
        column = np.arange(len(block.ids), dtype=np.uint64)[:, None]
        state = _rotated(state ^ (column * _P1), 23) * _P2 + _P3
        return _mixed(state).view(np.int64).T


def _rotated(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(33))) * _P2
    x = (x ^ (x >> np.uint64(29))) * _P3
    return x ^ (x >> np.uint64(32))
