"""Digests of files."""

from collections.abc import Callable
from pathlib import Path

import xxhash

BLOCK_BYTES = 1 << 22


def digest(path: Path, on_block: Callable[[], None] = lambda: None) -> str:
    """Return the xxh3_128 digest of a file; `on_block` is called after every BLOCK_BYTES."""
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            on_block()
    return state.hexdigest()
