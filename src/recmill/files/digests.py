"""Digests of files."""

from collections.abc import Callable
from pathlib import Path

import xxhash


def digest(path: Path, on_block: Callable[[], None] = lambda: None) -> str:
    """Return the xxh3_128 digest of a file; `on_block` is called after every 4 MB."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
            on_block()
    return state.hexdigest()
