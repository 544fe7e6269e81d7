"""The fields of a plain text: found and hashed in one pass, so that only different values become texts of Polars."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from recmill.kernels.library import ParserLibrary, load_parser

Buffers = deque[Any]  # arrays of uint64 to use again: touching new memory takes as long as the work on it


@dataclass(frozen=True)
class Fields:
    """The fields of some columns of a block of rows, and a frame of other columns."""

    text: bytes
    separator: int
    columns: Sequence[str]
    starts: np.ndarray  # uint32 [column, row]
    hashes: np.ndarray  # uint64 [2, column, row]: two hashes, which tell values apart
    has_long: np.ndarray  # uint8 [column]: whether there are second hashes; otherwise, the first ones suffice
    parser: ParserLibrary
    buffers: "Buffers"
    others: pl.DataFrame = field(default_factory=pl.DataFrame)

    @property
    def height(self) -> int:
        return self.starts.shape[1]

    def gather(self, column: int) -> Callable[[np.ndarray], bytes]:
        """Return a function that returns the values of a column in these rows, each followed by a line end."""

        def gathered(rows: np.ndarray) -> bytes:
            given = self.text, self.starts[column], rows, len(rows), self.separator
            joined = np.empty(self.parser.call("join", *given, None), np.uint8)
            self.parser.call("join", *given, joined)
            return joined.tobytes()

        return gathered

    def hashes_of(self, column: int) -> tuple[np.ndarray, np.ndarray | None]:
        return self.hashes[0, column], self.hashes[1, column] if self.has_long[column] else None

    def free(self) -> None:
        """Let other fields use the memory of these, which are not used any more."""
        self.buffers.append(self.hashes.base)


def series(lines: bytes) -> pl.Series:
    """Return the values that are each followed by a line end; empty ones become null."""
    values = pl.Series([lines.decode()]).str.split("\n").explode().head(-1)
    return values.set(values == "", None)


def divided(
    text: bytes, separator: str, wanted: dict[str, int], num_columns: int, quote: str, buffers: Buffers
) -> Fields | None:
    """Return the fields of the columns at these positions, in a text that ends with a line end, or None.

    None: a row does not have so many columns, the text is not UTF-8 or holds `quote`, carriage returns or NUL bytes, or
    there is no compiler.
    """
    assert text.endswith(b"\n")
    parser = load_parser()
    if parser is None:
        return None
    is_ascii = np.zeros(1, np.int64)
    num_rows = parser.call("lines", text, len(text), ord(quote) if quote else 0, is_ascii)
    if num_rows < 0 or not (is_ascii[0] or _is_utf8(text)):
        return None
    starts, hashes = _arrays(buffers, len(wanted), num_rows)
    has_long = np.zeros(len(wanted), np.uint8)
    places = np.full(num_columns, -1)
    places[[*wanted.values()]] = np.arange(len(wanted))
    where = text, len(text), ord(separator), places, num_columns, *starts.shape
    if not parser.call("divide", *where, starts, hashes, has_long):
        return None
    return Fields(text, ord(separator), [*wanted], starts, hashes, has_long, parser, buffers)


def _arrays(buffers: Buffers, num_columns: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays for starts and hashes, in a buffer that is free, or in a new one."""
    size = num_columns * num_rows
    words = 2 * size + -(-size // 2)
    buffer = np.empty(0, np.uint64)
    with contextlib.suppress(IndexError):
        buffer = buffers.pop()
    if len(buffer) < words:
        buffer = np.empty(words + words // 8, np.uint64)
    starts, hashes = buffer[2 * size : words].view(np.uint32)[:size], buffer[: 2 * size]
    return starts.reshape(num_columns, num_rows), hashes.reshape(2, num_columns, num_rows)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
