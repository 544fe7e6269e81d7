"""Delimited text -> Polars frames, every row checked. A row that cannot be read is an error that says where and why.

Polars takes a row that is too short for one with missing values, without a word: fields are counted here.
"""

import csv
import io
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from recmill.datasets.compressed import expansion, read_blocks
from recmill.errors import DataError
from recmill.observe.progress import Progress

log = logging.getLogger(__name__)

Kind = Literal["whole", "number", "text", "date"]

_TYPES = {"whole": pl.Int64(), "number": pl.Float64(), "text": pl.String(), "date": pl.String()}
_FACTS = {"whole": "is not a whole number", "number": "is not a number", "text": "is empty", "date": "is not a date"}
_REMEDY = "Mend the file, or get it again."
_BLOCK_BYTES = 1 << 24
_LONGEST_ROW = 1 << 20
_BOM = b"\xef\xbb\xbf"
_LINE = ord("\n")


@dataclass(frozen=True)
class Field:
    name: str  # in the frame
    column: str  # in the file
    kind: Kind


@dataclass(frozen=True)
class Table:
    """A text file: its separator (`::` too), and its columns (None: they stand in its first row)."""

    path: Path
    separator: str
    columns: list[str] | None = None

    def rows(self, *fields: Field) -> Iterator[pl.DataFrame]:
        """Frames of these fields, in the order of the file. Dates become microseconds since 1970."""
        texts, columns, done = self._whole_rows(), self.columns, 0
        if columns is None:
            header, line_end, rest = next(texts, b"").partition(b"\n")
            columns = (self._split(header + line_end) or [[]])[0]
            texts = chain([rest] if rest else [], texts)
        places = {field: self._place(columns, field.column) for field in fields}
        total = int(self.path.stat().st_size * expansion(self.path))
        with Progress(f"reading {self.path.name}", total, "bytes") as progress:
            for text in texts:
                frame = self._parsed(text, len(columns), places)
                if frame is None:
                    raise self._bad_row(text, len(columns), places, done)
                yield frame
                done += frame.height
                progress.advance(len(text))
        if not done:
            raise DataError(f"{self.path}: no rows. Get the file again.")

    def first_value(self, column: str) -> str:
        """Of a file whose first row names the columns; empty if there is none."""
        header, *rows = self._split(b"".join(next(self._whole_rows(), b"\n").splitlines(keepends=True)[:2]))
        return dict(zip(header, rows[0], strict=False)).get(column, "") if rows else ""

    def _place(self, columns: list[str], column: str) -> int:
        if columns.count(column) != 1:
            fact = f"two columns '{column}'" if column in columns else f"no column '{column}'"
            there = ", ".join(columns) or "nothing"
            raise DataError(f"{self.path}: {fact} in its first row, which has: {there}. Is it the right file?")
        return columns.index(column)

    @property
    def _has_quotes(self) -> bool:
        return self.separator == ","

    @property
    def _letter(self) -> str:
        return "\t" if self.separator == "::" else self.separator

    def _whole_rows(self) -> Iterator[bytes]:
        """The text in pieces that end with a row, `::` made tabs. Blank lines at the very end are left out."""
        held, rest, is_first = b"", b"", True
        for block in read_blocks(self.path, _BLOCK_BYTES):
            text = rest + block
            if is_first and len(text) >= len(_BOM):
                text, is_first = text.removeprefix(_BOM), False
            cut = text.rfind(b"\n") + 1
            if self._has_quotes and text.count(b'"', 0, cut) % 2:  # the last quote opens a field that holds line ends
                cut = text.rfind(b"\n", 0, text.rfind(b'"', 0, cut)) + 1
            rest = text[cut:]
            if len(rest) > _LONGEST_ROW:
                raise DataError(f"{self.path}: a row of more than {_LONGEST_ROW:,} bytes. Is a quote not closed?")
            if cut:
                yield from [self._with_tabs(held)] if held else []
                held = text[:cut]
        if rest.strip(b"\r\n"):
            log.warning("%s: its last row has no line end; it is taken as it is. Was the file cut?", self.path)
        if last := (held + rest).rstrip(b"\r\n"):
            yield self._with_tabs(last + b"\n")

    def _with_tabs(self, text: bytes) -> bytes:
        return text.replace(b"::", b"\t") if self.separator == "::" else text

    def _split(self, text: bytes) -> list[list[str]]:
        lines = io.StringIO(text.decode("utf-8", errors="backslashreplace"), newline="")
        if self._has_quotes:
            return list(csv.reader(lines, delimiter=self._letter))
        return list(csv.reader(lines, delimiter=self._letter, quoting=csv.QUOTE_NONE))

    def _parsed(self, text: bytes, num_columns: int, places: dict[Field, int]) -> pl.DataFrame | None:
        """None if any row is bad."""
        if not self._is_regular(text, num_columns):
            return None
        types = {place: _TYPES[field.kind] for field, place in places.items()}
        dates = [field.name for field in places if field.kind == "date"]
        try:
            frame = pl.read_csv(
                text,
                has_header=False,
                separator=self._letter,
                quote_char='"' if self._has_quotes else None,
                schema={str(place): types.get(place, pl.String()) for place in range(num_columns)},
            ).select(pl.col(str(place)).alias(field.name) for field, place in places.items())
            frame = frame.with_columns(pl.col(dates).str.to_datetime(strict=False, time_unit="us").dt.epoch("us"))
        except pl.exceptions.PolarsError:
            return None
        numbers = [field.name for field in places if field.kind == "number"]
        is_good = not any(frame.null_count().row(0)) and all(frame[name].is_finite().all() for name in numbers)
        return frame if is_good else None

    def _is_regular(self, text: bytes, num_columns: int) -> bool:
        """Whether every row has that many fields."""
        if self._has_quotes and b'"' in text:
            return all(len(row) == num_columns for row in self._split(text))
        letters = np.frombuffer(text, np.uint8)
        before = np.searchsorted(np.flatnonzero(letters == ord(self._letter)), np.flatnonzero(letters == _LINE))
        return np.array_equal(before, np.arange(1, len(before) + 1) * (num_columns - 1))

    def _bad_row(self, text: bytes, num_columns: int, places: dict[Field, int], done: int) -> DataError:
        """Slowly, one by one, to tell which."""
        rows = self._split(text)
        for number, row in enumerate(rows, done + 1):
            if len(row) != num_columns:
                found = f"got {len(row)}, the last is {row[-1][:80]!r}" if row else "got a blank line"
                return DataError(f"{self.path}: row {number:,}: expected {num_columns} fields, {found}. {_REMEDY}")
            for field, place in places.items():
                if not _is_good(row[place], field.kind):
                    fact = f"column {field.column}: {row[place][:80]!r} {_FACTS[field.kind]}"
                    return DataError(f"{self.path}: row {number:,}, {fact}. {_REMEDY}")
        span = f"{self.path}: rows {done + 1:,} to {done + len(rows):,}"
        reasons = "a quote, a letter that is not UTF-8, or a date unlike the first"
        return DataError(f"{span}: one of them cannot be read ({reasons}). {_REMEDY}")


def _is_good(value: str, kind: Kind) -> bool:
    try:
        match kind:
            case "whole":
                return bool(re.fullmatch(r" *[+-]?\d+", value)) and -(2**63) <= int(value) < 2**63
            case "number":
                return math.isfinite(float(value))
            case "date":
                return bool(datetime.fromisoformat(value))
            case "text":
                return bool(value)
    except ValueError:
        return False
