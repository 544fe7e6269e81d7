"""The fields of a plain text: found and hashed in one pass, so that only different values become texts of Polars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from recmill.datasets.parallel import compiled


@dataclass(frozen=True)
class Fields:
    """The fields of some columns of a block of rows, and a frame of other columns."""

    text: np.ndarray  # uint8
    separator: int
    columns: Sequence[str]
    starts: np.ndarray  # uint32 [column, row]
    hashes: np.ndarray  # uint64 [2, column, row]: two hashes, which tell values apart
    others: pl.DataFrame = field(default_factory=pl.DataFrame)

    @property
    def height(self) -> int:
        return self.starts.shape[1]

    def gather(self, column: int) -> Callable[[np.ndarray], pl.Series]:
        """Return a function that returns the values of a column in these rows; empty fields have none."""

        def gathered(rows: np.ndarray) -> pl.Series:
            joined = _joined(self.text, self.starts[column], rows, self.separator)
            values: list[str | None] = [value or None for value in joined.tobytes().decode().split("\n")[:-1]]
            return pl.Series(values, dtype=pl.String)

        return gathered


def divided(text: bytes, separator: str, wanted: dict[str, int], num_columns: int) -> Fields | None:
    """Return the fields of the columns at these positions; None if a row does not have so many columns."""
    letters = np.frombuffer(text, np.uint8)
    shape = len(wanted), np.count_nonzero(letters == ord("\n"))
    fields = Fields(letters, ord(separator), [*wanted], np.empty(shape, np.uint32), np.empty((2, *shape), np.uint64))
    places = np.full(num_columns, -1)
    places[[*wanted.values()]] = np.arange(len(wanted))
    return fields if _divide(letters, fields.separator, places, fields.starts, fields.hashes) else None


@compiled
def _divide(text, separator, places, starts, hashes):
    """Find and hash the fields of the columns whose place in `places` is not negative.

    Return False if a row does not have as many fields as `places`.
    """
    last = len(places) - 1
    row = column = start = 0
    one = other = np.uint64(14695981039346656037)
    for index in range(len(text)):
        letter = text[index]
        if letter != separator and letter != 10:
            one = (one ^ letter) * np.uint64(1099511628211)  # FNV-1a
            other = (other ^ letter) * np.uint64(0x9E3779B97F4A7C15)
            continue
        place = places[column]
        if place >= 0:
            starts[place, row] = start
            hashes[0, place, row] = one
            hashes[1, place, row] = other
        if (letter == 10) != (column == last):
            return False
        column += 1
        if letter == 10:
            row += 1
            column = 0
        start = index + 1
        one = other = np.uint64(14695981039346656037)
    return True


@compiled
def _joined(text, starts, rows, separator):
    """Return the fields that begin there, each followed by a line end."""
    size = 0
    for row in rows:
        at = starts[row]
        while text[at] != separator and text[at] != 10:
            at += 1
        size += at - starts[row] + 1
    joined = np.empty(size, np.uint8)
    end = 0
    for row in rows:
        at = starts[row]
        while text[at] != separator and text[at] != 10:
            joined[end] = text[at]
            end += 1
            at += 1
        joined[end] = 10
        end += 1
    return joined
