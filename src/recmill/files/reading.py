"""Small files that somebody else may have changed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 26


def read_small(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Read a regular file. Raise ValueError for anything else: a device may never end, a pipe never begin."""
    if not path.is_file() or path.stat().st_size > max_bytes:
        path.lstat()  # raises FileNotFoundError
        raise ValueError(f"not a file of at most {max_bytes:,} bytes")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a small file of JSON, or raise ValueError."""
    try:
        return json.loads(read_small(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json_of(path: Path, kind: type) -> Any:
    """Return the list or mapping that a small file of JSON holds; an empty one if it does not."""
    with suppress(OSError, ValueError):
        if isinstance(value := read_json(path), kind):
            return value
    return kind()
