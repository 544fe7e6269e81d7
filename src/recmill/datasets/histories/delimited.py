"""Delimited text -> Polars frames. Every row is checked; the error names a bad row, its column and its value.
Bad rows can also be skipped and counted.

Fields are counted here because Polars silently fills a row that is too short with missing values.
"""

import csv
import io
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from recmill.datasets.compressed import expansion, read_blocks
from recmill.errors import DataError, did_you_mean
from recmill.observe.progress import Progress

log = logging.getLogger(__name__)

Kind = Literal["integer", "number", "text", "date", "any"]  # any: text that may be empty

_TYPES = {"integer": pl.Int64(), "number": pl.Float64(), "text": pl.String(), "date": pl.String(), "any": pl.String()}
_FACTS = {"integer": "is not a whole number", "number": "is not a number", "text": "is empty", "date": "is not a date"}
_PARSED = _TYPES | {"date": pl.Int64()}
_NAMED_BAD_ROWS = 10
_REMEDY = "Fix the file, or get it again."
_BLOCK_BYTES = 1 << 24
_MAX_ROW_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Field:
    name: str  # in the frame
    column: str  # in the file
    kind: Kind
    option: str = "see --help"  # that names the column


@dataclass
class BadRows:
    """The bad rows that were skipped, of at most `allowed`."""

    allowed: int
    count: int = 0
    first: list[str] = field(default_factory=list)

    def skip(self, problem: str) -> None:
        self.count += 1
        if len(self.first) < _NAMED_BAD_ROWS:
            self.first.append(problem)
        if self.count > self.allowed:
            raise DataError(f"{problem}. This is one bad row more than --max-bad-rows allows.")

    def notes(self) -> list[str]:
        counted = [f"{self.count:,} bad rows skipped"] if self.count else []
        return [*counted, *(f"skipped: {problem}" for problem in self.first)]


@dataclass(frozen=True)
class Table:
    """A text file with a separator, which may be `::`. Without `columns`, its first row names them. Without `bad_rows`,
    a bad row is an error.
    """

    path: Path
    separator: str
    columns: list[str] | None = None
    bad_rows: BadRows | None = None
    quotes: bool | None = None  # whether fields may be in double quotes; None: with commas they may

    def rows(self, *fields: Field) -> Iterator[pl.DataFrame]:
        """Yield frames of these fields in file order; dates become microseconds since 1970."""
        texts = self._texts()
        columns = self.columns
        if columns is None:
            header, line_end, rest = next(texts, b"").partition(b"\n")
            columns = (self._split(header + line_end) or [[]])[0]
            texts = chain([rest] if rest else [], texts)
        positions = {field: self._position(columns, field) for field in fields}
        total = int(self.path.stat().st_size * expansion(self.path))
        done = num_good = 0
        with Progress(f"reading {self.path.name}", total, "bytes") as progress:
            for text in texts:
                frame = self._parse(text, len(columns), positions)
                num_rows = frame.height if frame is not None else len(self._split(text))
                if frame is None:
                    frame = self._without_bad_rows(text, len(columns), positions, done)
                yield frame
                done += num_rows
                num_good += frame.height
                progress.advance(len(text))
        if done and not num_good and self.bad_rows:
            raise DataError(f"{self.path}: all of its {done:,} rows are bad; the first: {self.bad_rows.first[0]}")
        if not done:
            raise DataError(f"{self.path}: no rows. Get the file again.")

    def header(self) -> list[str]:
        """Return the fields of the first row."""
        return (self._split(next(self._texts(), b"\n").splitlines(keepends=True)[0]) or [[]])[0]

    def first_value(self, column: str) -> str:
        """Return the value in the first row after the header, or an empty string."""
        header, *rows = self._split(b"".join(next(self._texts(), b"\n").splitlines(keepends=True)[:2]))
        return dict(zip(header, rows[0], strict=False)).get(column, "") if rows else ""

    def _position(self, columns: list[str], field: Field) -> int:
        column = field.column
        if columns.count(column) != 1:
            fact = f"two columns '{column}'" if column in columns else f"no column '{column}'"
            there = ", ".join(columns) or "nothing"
            near = did_you_mean(column, columns).strip() if column not in columns else ""
            remedy = near or f"Name another column ({field.option}), or choose another file."
            raise DataError(f"{self.path}: {fact} in its first row, which has: {there}. {remedy}")
        return columns.index(column)

    @property
    def _has_quotes(self) -> bool:
        return self.separator == "," if self.quotes is None else self.quotes

    @property
    def _one_byte_separator(self) -> str:
        return "\t" if self.separator == "::" else self.separator

    def _texts(self) -> Iterator[bytes]:
        """Yield the text in blocks of complete rows, without blank lines at the end; `::` is replaced by tabs.

        A block is held back until another row follows, because blank lines at its end may be the last of the file.
        """
        held = b""
        rest = b""  # the beginning of a row
        is_start = True
        for block in read_blocks(self.path, _BLOCK_BYTES):
            text = rest + block
            if is_start and len(text) >= len(_BOM):
                text = text.removeprefix(_BOM)
                is_start = False
            end = text.rfind(b"\n") + 1
            if self._has_quotes and text.count(b'"', 0, end) % 2:  # the last quote opens a field with line ends
                end = text.rfind(b"\n", 0, text.rfind(b'"', 0, end)) + 1
            rest = text[end:]
            if len(rest) > _MAX_ROW_BYTES:
                raise DataError(f"{self.path}: a row of more than {_MAX_ROW_BYTES:,} bytes. Is a quote not closed?")
            if end:
                if held:
                    yield self._with_tabs(held)
                held = text[:end]
        if rest.strip(b"\r\n"):
            log.warning("%s: the last row has no line end; it is used as it is. Is the file incomplete?", self.path)
        if last := (held + rest).rstrip(b"\r\n"):
            yield self._with_tabs(last + b"\n")

    def _with_tabs(self, text: bytes) -> bytes:
        return text.replace(b"::", b"\t") if self.separator == "::" else text

    def _split(self, text: bytes, errors: str = "backslashreplace") -> list[list[str]]:
        lines = io.StringIO(text.decode("utf-8", errors=errors), newline="")
        if self._has_quotes:
            return list(csv.reader(lines, delimiter=self._one_byte_separator))
        return list(csv.reader(lines, delimiter=self._one_byte_separator, quoting=csv.QUOTE_NONE))

    def _parse(self, text: bytes, num_columns: int, positions: dict[Field, int]) -> pl.DataFrame | None:
        """Return None if any row is bad."""
        if not self._has_num_columns(text, num_columns):
            return None
        types = {position: _TYPES[field.kind] for field, position in positions.items()}
        dates = [field.name for field in positions if field.kind == "date"]
        numbers = [field.name for field in positions if field.kind == "number"]
        try:
            frame = pl.read_csv(
                text,
                has_header=False,
                separator=self._one_byte_separator,
                quote_char='"' if self._has_quotes else None,
                schema={str(position): types.get(position, pl.String()) for position in range(num_columns)},
            ).select(pl.col(str(position)).alias(field.name) for field, position in positions.items())
            frame = frame.with_columns(pl.col(dates).str.to_datetime(strict=False, time_unit="us").dt.epoch("us"))
        except pl.exceptions.PolarsError:
            return None
        full = [field.name for field in positions if field.kind != "any"]
        is_good = not any(frame.select(full).null_count().row(0) if full else ()) and all(
            frame[name].is_finite().all() for name in numbers
        )
        return frame if is_good else None

    def _has_num_columns(self, text: bytes, num_columns: int) -> bool:
        if self._has_quotes and b'"' in text:
            return all(len(row) == num_columns for row in self._split(text))
        letters = np.frombuffer(text, np.uint8)
        separators = np.flatnonzero(letters == ord(self._one_byte_separator))
        separators_before = np.searchsorted(separators, np.flatnonzero(letters == ord("\n")))
        return np.array_equal(separators_before, np.arange(1, len(separators_before) + 1) * (num_columns - 1))

    def _bad_row(self, text: bytes, num_columns: int, positions: dict[Field, int], done: int) -> DataError:
        """Find the first bad row by checking one value at a time."""
        rows = self._split(text)
        for number, row in enumerate(rows, done + 1):
            if problem := _problem(row, num_columns, positions):
                return DataError(f"{self.path}: row {number:,}{problem}. {_REMEDY}")
        span = f"{self.path}: rows {done + 1:,} to {done + len(rows):,}"
        reasons = "a quote, a character that is not UTF-8, or a date in another format than the first"
        return DataError(f"{span}: one of them cannot be read ({reasons}). {_REMEDY}")

    def _without_bad_rows(self, text: bytes, num_columns: int, positions: dict[Field, int], done: int) -> pl.DataFrame:
        """Parse the good rows of a block, and count the others. Raise DataError if they may not be skipped."""
        if self.bad_rows is None:
            raise self._bad_row(text, num_columns, positions, done)
        good = io.StringIO()
        quotes: Any = {"quotechar": '"'} if self._has_quotes else {"quotechar": None, "quoting": csv.QUOTE_NONE}
        writer = csv.writer(good, delimiter=self._one_byte_separator, lineterminator="\n", **quotes)
        for number, row in enumerate(self._split(text, "surrogateescape"), done + 1):
            problem = _problem(row, num_columns, positions)
            if problem is None and not "".join(row).isascii() and any("\udc80" <= c <= "\udcff" for c in "".join(row)):
                problem = ": a character that is not UTF-8"
            if problem:
                self.bad_rows.skip(f"{self.path.name}: row {number:,}{problem}")
            else:
                writer.writerow([row[position] for position in positions.values()])
        if not good.getvalue():
            return pl.DataFrame(schema={field.name: _PARSED[field.kind] for field in positions})
        frame = self._parse(good.getvalue().encode(), len(positions), {field: i for i, field in enumerate(positions)})
        if frame is None:
            raise self._bad_row(text, num_columns, positions, done)
        return frame


def _problem(row: list[str], num_columns: int, positions: dict[Field, int]) -> str | None:
    """Return what is wrong with a row, to follow its number; None if it is good."""
    if len(row) != num_columns:
        found = f"got {len(row)}, the last is {row[-1][:80]!r}" if row else "got a blank line"
        return f": expected {num_columns} fields, {found}"
    for wanted, position in positions.items():
        if not _is_good(row[position], wanted.kind):
            return f", column {wanted.column}: {row[position][:80]!r} {_FACTS[wanted.kind]}"
    return None


def _is_good(value: str, kind: Kind) -> bool:
    try:
        match kind:
            case "integer":
                return bool(re.fullmatch(r" *[+-]?\d+", value)) and -(2**63) <= int(value) < 2**63
            case "number":
                return math.isfinite(float(value))
            case "date":
                return bool(datetime.fromisoformat(value))
            case "text":
                return bool(value)
            case "any":
                return True
    except ValueError:
        return False
