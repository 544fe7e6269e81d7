"""Number the values of a column while its file is read, so that later steps work on whole numbers, not on texts."""

import weakref
from collections.abc import Callable

import numpy as np
import polars as pl

from recmill.datasets.inputs.fields import series
from recmill.kernels.library import load_parser

Gather = Callable[[np.ndarray], pl.Series | bytes]  # bytes: as `Fields.gather`

_LINES_AT_ONCE = 1 << 22  # bytes: a few large conversions are faster than many, and take less memory than one
_SEEDS = (0, 0x9E3779B97F4A7C15)


def can_be_numbered(dtype: pl.DataType) -> bool:
    """Return whether values of this type can be told apart by their hashes in every block of a file."""
    return dtype in (pl.String, pl.Boolean, pl.Date) or dtype.is_integer() or isinstance(dtype, pl.Datetime)


class Coder:
    """Numbers the values of a column in the order in which they occur first: 0, 1, ...

    Values are equal if two 64-bit hashes of them are: should two values collide in one, the other tells them apart.
    """

    def __init__(self) -> None:
        self._parser = load_parser()
        if self._parser:
            self._coder = self._parser.call("new_coder")
            if not self._coder:
                raise MemoryError
            weakref.finalize(self, self._parser.call, "delete_coder", self._coder)
        self._known: dict[tuple[int, int], int] = {}  # without a parser
        self._found: list[pl.Series] = []
        self._lines = bytearray()  # values behind those in `_found`
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def codes(self, values: pl.Series) -> np.ndarray:
        """Return the codes of these values, uint32 [n]; those that are new get the next ones."""
        one, other = (values.hash(seed).to_numpy() for seed in _SEEDS)
        return self.codes_of(one, other, values.gather)

    def codes_of(self, hashes: np.ndarray, others: np.ndarray | None, gather: Gather) -> np.ndarray:
        """Return the codes of values with these hashes; `gather` returns the values of some rows."""
        codes, new_rows = self._numbered(hashes, others) if self._parser else self._numbered_in_python(hashes, others)
        self._size += len(new_rows)
        if len(new_rows) or not self._found:
            new = gather(new_rows)
            if isinstance(new, pl.Series):
                self._found.append(new)
            else:
                self._lines += new
        if len(self._lines) > _LINES_AT_ONCE:
            self._convert()
        return codes

    def values(self) -> pl.Series:
        """Return the values, in the order of their codes."""
        if self._lines or not self._found:
            self._convert()
        return pl.concat(self._found)

    def _convert(self) -> None:
        self._found.append(series(bytes(self._lines)))
        self._lines.clear()

    def _numbered(self, hashes: np.ndarray, others: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes, and the rows of new values."""
        assert self._parser
        codes, new_rows = np.empty(len(hashes), np.uint32), np.empty(len(hashes), np.int64)
        num_new = self._parser.call("number", self._coder, hashes, others, len(hashes), codes, new_rows)
        if num_new < 0:
            raise MemoryError
        return codes, new_rows[:num_new]

    def _numbered_in_python(self, hashes: np.ndarray, others: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        assert others is not None
        pairs = zip(hashes.tolist(), others.tolist(), strict=True)
        codes = np.array([self._known.setdefault(pair, len(self._known)) for pair in pairs], np.uint32)
        different, first_rows = np.unique(codes, return_index=True)
        return codes, first_rows[different >= self._size]


def add_up(counts: np.ndarray, codes: np.ndarray) -> None:
    """Add to `counts` how often each code occurs: `bincount` would pass over all values for each block of rows."""
    if parser := load_parser():
        parser.call("add_up", counts, codes, len(codes))
    else:
        counts += np.bincount(codes, minlength=len(counts))
