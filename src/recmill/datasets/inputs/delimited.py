"""Delimited text -> Polars frames. Every row is checked; the error names a bad row, its column and its value.
Bad rows can also be skipped and counted.

Fields are counted here because Polars silently fills a row that is too short with missing values.
"""

import csv
import io
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from recmill.datasets.compressed import InputFile, expansion
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.text import MAX_ROW_BYTES, QUOTE_IN_FIELD, LongRow, bad_byte, row_blocks, setting
from recmill.datasets.inputs.times import parsed_times
from recmill.errors import DataError, did_you_mean
from recmill.observe.progress import Progress

if TYPE_CHECKING:
    from recmill.datasets.inputs.fields import Buffers, Fields

    Parsed = tuple[bytes, pl.DataFrame | Fields | None]
    Each = Callable[[Callable[[bytes | Exception], Parsed], Iterable[bytes | Exception]], Iterable[Parsed]]

log = logging.getLogger(__name__)

Kind = Literal["integer", "number", "text", "date", "any"]  # any: text that may be empty

_TYPES = {"integer": pl.Int64(), "number": pl.Float64(), "text": pl.String(), "date": pl.String(), "any": pl.String()}
_FACTS = {"integer": "is not a whole number", "number": "is not a number", "text": "is empty", "date": "is not a date"}
_PARSED = _TYPES | {"date": pl.Int64()}
NAMED_BAD_ROWS = 10
SKIP = "To skip such rows: --on-bad-row skip."  # another remedy for a bad row
_FIRST_ROWS = 1000
_REPLACED = "\x1f"  # stands for a separator of several bytes
SEPARATORS = [",", "\t", ";", "|", "::", "\x01", " "]  # in the order in which they are tried


@dataclass(frozen=True)
class Field:
    name: str  # in the frame
    column: str  # in the file
    kind: Kind
    option: str = "see --help"  # that names the column
    form: str = "iso"  # of dates


@dataclass
class BadRows:
    """The bad rows that were skipped, of at most `allowed`."""

    allowed: int
    count: int = 0
    first: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the rows, in their files

    def skip(self, problem: str, number: int) -> None:
        self.count += 1
        self.numbers.append(number)
        if len(self.first) < NAMED_BAD_ROWS:
            self.first.append(problem)
        if self.count > self.allowed:
            raise DataError(f"{problem}. This is one bad row more than --max-bad-rows allows.")

    def notes(self) -> list[str]:
        counted = [f"{self.count:,} bad row{'s' if self.count > 1 else ''} skipped"] if self.count else []
        return [*counted, *(f"skipped: {problem}" for problem in self.first)]


@dataclass(frozen=True)
class Table:
    """A text file with separated fields. Without `section.columns`, its first row names them. Without `bad_rows`, a bad
    row is an error. `prefix` is that of the keys in messages: 'input.' of a schema, '--' or '--title-' of flags.
    """

    path: InputFile
    section: InputSection
    bad_rows: BadRows | None = None
    prefix: str = "--"
    otherwise: str = ""  # another remedy for a bad row than to correct it

    def rows(self, *fields: Field) -> Iterator[pl.DataFrame]:
        """Yield frames of these fields in file order; dates become microseconds since 1970."""
        return (block for block in self.blocks(fields) if isinstance(block, pl.DataFrame))

    def blocks(
        self, fields: Sequence[Field], plain: Collection[str] = (), each: "Each" = map
    ) -> "Iterator[pl.DataFrame | Fields]":
        """Yield blocks of these fields in file order, as `Fields` of the columns `plain` up to the first quote.

        `each` applies a function to each text; it may do so ahead, in threads.
        """
        columns, texts = self._opened()
        positions = {field: self._position(columns, field) for field in fields}
        total = int(self.path.stat().st_size * expansion(self.path))
        done = num_good = 0
        is_plain = bool(plain)
        buffers: Buffers = deque()

        def parsed(text: bytes | Exception) -> "Parsed":
            if isinstance(text, Exception):
                raise text
            found = self._divided(text, len(columns), positions, plain, buffers) if is_plain else None
            return text, found or self._parse(text, len(columns), positions)

        with Progress(f"reading {self.path.name}", total, "bytes") as progress:
            try:
                for text, found in each(parsed, _with_error(texts)):
                    is_frame = found is None or isinstance(found, pl.DataFrame)
                    if not is_plain and not is_frame:  # parsed ahead
                        found = self._parse(text, len(columns), positions)
                    is_plain = is_plain and not is_frame
                    num_rows = found.height if found is not None else len(self._split(text))
                    if found is None:
                        found = self._without_bad_rows(text, len(columns), positions, done)
                    yield found
                    done += num_rows
                    num_good += found.height
                    progress.advance(len(text))
            except LongRow:
                fact = f"{self.path}: row {done + 1:,} has more than {MAX_ROW_BYTES:,} bytes"
                raise DataError(f"{fact}. Is a quote not closed ({self._no_quotes} ignores quotes)?") from None
        if done and not num_good and self.bad_rows:
            raise DataError(f"{self.path}: all of its {done:,} rows are bad; the first: {self.bad_rows.first[0]}")
        if not done:
            raise DataError(f"{self.path}: no rows. Get the file again.")

    def header(self) -> list[str]:
        """Return the names of the columns."""
        return self._opened()[0]

    def first_values(self, column: str) -> list[str]:
        """Return the values in the first rows after the header."""
        columns, texts = self._opened()
        lines = next(texts, b"").split(b"\n")[:_FIRST_ROWS]
        rows = (dict(zip(columns, row, strict=False)) for row in self._split(b"\n".join(lines)))
        return [row.get(column, "") for row in rows]

    def _opened(self) -> tuple[list[str], Iterator[bytes]]:
        """Return the names of the columns, and the text of the rows."""
        texts = self._texts()
        try:
            first = next(texts, b"")
        except LongRow:
            remedy = "Are its line ends missing? Is it a text?"
            raise DataError(f"{self.path}: row 1 has more than {MAX_ROW_BYTES:,} bytes. {remedy}") from None
        if self.section.columns:
            self._check_no_header(first)
            return self.section.columns, chain([first] if first else [], texts)
        header, line_end, rest = first.partition(b"\n")
        while self.section.has_quotes and header.count(b'"') % 2 and rest:
            more, line_end, rest = rest.partition(b"\n")
            header += b"\n" + more
        columns = (self._split(header + line_end) or [[]])[0]
        return columns, chain([rest] if rest else [], texts)

    def _check_no_header(self, first: bytes) -> None:
        """Raise an error if the names of the columns are given, and the first row names them, too."""
        rows = [list(map(str.strip, row)) for row in self._split(b"\n".join(first.split(b"\n")[:2]) + b"\n")]
        if len(rows) < 2 or len(rows[0]) != len(rows[1]):
            return
        is_named = rows[0] == self.section.columns
        numbers = sum(_is_good(value, "number") for value in rows[1])
        if is_named or (numbers >= len(rows[1]) / 2 and not any(_is_good(value, "number") for value in rows[0])):
            shown = self.section.separator.join(rows[0])[:80]
            raise DataError(
                f"{self.path}: its first row is {shown!r}, which looks like names of columns, but {self.prefix}columns "
                f"gives them. Leave {self.prefix}columns out, or {self._skip_first_row}."
            )

    def _position(self, columns: list[str], field: Field) -> int:
        column = field.column
        if columns.count(column) != 1:
            raise DataError(f"{self.path}: {self._lacks(columns, field)}")
        return columns.index(column)

    def _lacks(self, columns: list[str], field: Field) -> str:
        """Return why there is not exactly one such column, and what to do."""
        column = field.column
        there = ", ".join(columns) or "nothing"
        if hint := self.wrong_header(columns, [column]):
            return f"no column '{column}'{hint}"
        fact = f"two columns '{column}'" if column in columns else f"no column '{column}'"
        near = did_you_mean(column, columns) if column not in columns else ""
        remedy = f"{near}Name another column ({field.option}), or choose another file."
        where = f"{self.prefix}columns" if self.section.columns else "its first row"
        return f"{fact} in {where}, which has: {there}. {remedy}"

    def wrong_header(self, columns: list[str], wanted: Sequence[str]) -> str:
        """Return why `columns` cannot be names of columns, as the end of a message about a missing one, or nothing.

        One number is enough if no name is among those `wanted` or similar to one of them.
        """
        if self.section.columns:
            return ""
        if len(columns) == 1 and (hint := self._other_separator(columns[0])):
            return f" in its first row, which has 1 field; {hint}."
        if any("\\x" in name for name in columns) and (place := bad_byte(self.path, self.prefix)):
            return f" in its first row: {place}"
        if not self.section.quotes and any(map(_is_quoted, columns)):
            return f" in its first row, whose names are in quotes. Use {setting(self.prefix, 'quotes', True)}."
        numbers = sum(_is_good(name.strip(), "number") for name in columns)
        is_other = not any(name in columns or did_you_mean(name, columns) for name in wanted)
        if numbers and (is_other or numbers >= len(columns) / 2):
            shown = self.section.separator.join(columns)[:80]
            remedy = f"Name the columns ({self.prefix}columns), or add a row with their names."
            return f": its first row is {shown!r}, which looks like data. {remedy}"
        return ""

    def _other_separator(self, line: str) -> str:
        """Return which separator would divide this line, if any."""
        counts = {other: line.count(other) + 1 for other in SEPARATORS if other != self.section.separator}
        best = max(counts, key=lambda other: counts[other])
        use = setting(self.prefix, "separator", best)
        return f"with {best!r} it would be {counts[best]} ({use})" if counts[best] > 1 else ""

    @property
    def _no_quotes(self) -> str:
        return setting(self.prefix, "quotes", False)

    @property
    def _skip_first_row(self) -> str:
        """Return how not to read the first row; a file of titles has no flag for that."""
        return "remove the row" if self.prefix == "--title-" else f"use {setting(self.prefix, 'skip_lines', 1)}"

    @property
    def _remedy(self) -> str:
        return f"Fix the file, or get it again. {self.otherwise}".rstrip()

    @property
    def _one_byte_separator(self) -> str:
        separator = self.section.separator
        return separator if len(separator.encode()) == 1 else _REPLACED

    def _texts(self) -> Iterator[bytes]:
        """Yield the text in blocks of complete rows; a separator of several bytes is replaced by one byte."""
        separator = self.section.separator.encode()
        for text in row_blocks(self.path, self.section, self.prefix, self.section.has_quotes):
            if len(separator) == 1:
                yield text
                continue
            if _REPLACED.encode() in text:
                raise DataError(
                    f"{self.path}: holds the character {_REPLACED!r}, which cannot be read here. Remove it."
                )
            yield text.replace(separator, _REPLACED.encode())

    def _split(self, text: bytes, errors: str = "backslashreplace") -> list[list[str]]:
        csv.field_size_limit(2 * MAX_ROW_BYTES)
        lines = io.StringIO(text.decode("utf-8", errors=errors), newline="")
        quoting: Any = csv.QUOTE_MINIMAL if self.section.has_quotes else csv.QUOTE_NONE
        rows = list(csv.reader(lines, delimiter=self._one_byte_separator, quoting=quoting))
        if QUOTE_IN_FIELD.encode() in text and self.section.escape:
            rows = [[value.replace(QUOTE_IN_FIELD, '"') for value in row] for row in rows]
        return rows

    def _parse(self, text: bytes, num_columns: int, positions: dict[Field, int]) -> pl.DataFrame | None:
        """Return None if any row is bad."""
        if b"\0" in text or not self._has_num_columns(text, num_columns) or self._row_with_stray_quote(text):
            return None
        return self._typed(text, num_columns, positions)

    def _typed(self, text: bytes, num_columns: int, positions: dict[Field, int]) -> pl.DataFrame | None:
        """Return None if a value is bad; all rows have as many fields as there are columns."""
        types = {position: _TYPES[field.kind] for field, position in positions.items()}
        dates = [field for field in positions if field.kind == "date"]
        numbers = [field.name for field in positions if field.kind == "number"]
        try:
            frame = pl.read_csv(
                text,
                has_header=False,
                separator=self._one_byte_separator,
                quote_char='"' if self.section.has_quotes else None,
                schema={str(position): types.get(position, pl.String()) for position in range(num_columns)},
                columns=sorted(types),
            ).select(pl.col(str(position)).alias(field.name) for field, position in positions.items())
            if self.section.escape:
                frame = frame.with_columns(pl.col(pl.String).str.replace_all(QUOTE_IN_FIELD, '"', literal=True))
            frame = frame.with_columns(parsed_times(frame[field.name], field.form).alias(field.name) for field in dates)
        except pl.exceptions.PolarsError:
            return None
        full = [field.name for field in positions if field.kind != "any"]
        is_good = not any(frame.select(full).null_count().row(0) if full else ()) and all(
            frame[name].is_finite().all() for name in numbers
        )
        return frame if is_good else None

    def _divided(
        self,
        text: bytes,
        num_columns: int,
        positions: dict[Field, int],
        names: Collection[str],
        buffers: "Buffers",
    ) -> "Fields | None":
        """Return None if the text has a bad row, or anything but plain fields."""
        from recmill.datasets.inputs.fields import divided  # few commands need the parser

        if num_columns == 1 or self.section.escape:
            return None
        text = text.replace(b"\r\n", b"\n") if b"\r" in text else text
        wanted = {field.name: position for field, position in positions.items() if field.name in names}
        quote = '"' if self.section.has_quotes else ""
        fields = divided(text, self._one_byte_separator, wanted, num_columns, quote, buffers)
        rest = {field: position for field, position in positions.items() if field.name not in wanted}
        if fields is None or not rest:
            return fields
        others = self._typed(text, num_columns, rest)
        return None if others is None else replace(fields, others=others)

    def _has_num_columns(self, text: bytes, num_columns: int) -> bool:
        letters = np.frombuffer(text, np.uint8)
        is_separator, is_end = letters == ord(self._one_byte_separator), letters == ord("\n")
        has_quotes = self.section.has_quotes and b'"' in text
        if has_quotes:  # between a quote and the next one, both are parts of a field
            is_outside = ~np.bitwise_xor.accumulate(letters == ord('"'))
            is_separator, is_end = is_separator & is_outside, is_end & is_outside
        separators = np.flatnonzero(is_separator)
        separators_before = np.searchsorted(separators, np.flatnonzero(is_end))
        if np.array_equal(separators_before, np.arange(1, len(separators_before) + 1) * (num_columns - 1)):
            return bool(is_end[-1])
        return has_quotes and all(len(row) == num_columns for row in self._split(text)) and not self._is_open(text)

    def _row_with_stray_quote(self, text: bytes) -> int:
        """Return what `row_with_stray_quote` does. Polars would leave out the quotes of such a field."""
        if not self.section.has_quotes or b'"' not in text:
            return 0
        letters = np.frombuffer(b"\n" + text + b"\n", np.uint8)
        quotes = np.flatnonzero(letters == ord('"'))
        closing = quotes[1::2]
        ends = np.frombuffer(f"{self._one_byte_separator}\r\n".encode(), np.uint8)
        continues = ~np.isin(letters[closing + 1], np.append(ends, np.uint8(ord('"'))))
        if not (np.isin(letters[quotes[::2][: len(closing)] - 1], ends) & continues).any():
            return 0  # most texts; what looks stray may also follow a quote in a field without quotes
        lines = io.StringIO(text.decode("utf-8", errors="backslashreplace"), newline="")
        return row_with_stray_quote(lines, self._one_byte_separator)

    def _is_open(self, text: bytes) -> bool:
        """Return whether the last field begins with a quote that is not closed: it then holds the last line end."""
        rows = self._split(text) if self.section.has_quotes else []
        return bool(rows and rows[-1] and rows[-1][-1].endswith("\n"))

    def _bad_row(self, text: bytes, num_columns: int, positions: dict[Field, int], done: int) -> DataError:
        """Find the first bad row by checking one value at a time."""
        rows = self._split(text, "surrogateescape")
        stray = done + self._row_with_stray_quote(text)
        bad_dates = _bad_dates(rows, positions)
        for number, row in enumerate(rows, done + 1):
            if _is_broken(row):
                return DataError(f"{self.path}: row {number:,}: {bad_byte(self.path, self.prefix)}")
            if number == stray:
                fact = f"{self.path}: row {number:,}: a quoted field continues after its closing quote"
                escape = setting(self.prefix, "escape", True)
                written = "" if self.section.escape else f'If quotes in fields are written as \\", say so ({escape}). '
                return DataError(f"{fact}. {written}Otherwise double them, or ignore quotes ({self._no_quotes}).")
            if number == done + len(rows) and self._is_open(text):
                remedy = f"Close it, or ignore quotes ({self._no_quotes})."
                return DataError(f"{self.path}: row {number:,}: a quote is opened and not closed. {remedy}")
            if problem := _problem(row, num_columns, positions, bad_dates):
                time = next((one for one in positions if one.option == "--time-column"), None)
                if number == 1 and time and f", column {time.column}: " in problem:  # not one bad row: another column
                    fact = problem.replace(_FACTS["integer"], "is neither a whole number nor an ISO date")
                    remedy = "Give the right --time-format, name another --time-column, or correct the values."
                    return DataError(f"{self.path}: row 1{fact}. {remedy} {self.otherwise}".rstrip())
                return DataError(f"{self.path}: row {number:,}{problem}.{self._hint(row, num_columns, number)}")
        span = f"{self.path}: rows {done + 1:,} to {done + len(rows):,}"
        ignore = f" Or ignore quotes ({self._no_quotes})." if self.section.has_quotes and b'"' in text else ""
        return DataError(
            f"{span}: one of them cannot be read, because of a quote inside a field. {self._remedy}{ignore}"
        )

    def _hint(self, row: list[str], num_columns: int, number: int) -> str:
        """Return what to do about a row that is bad."""
        if len(row) == 1 and num_columns > 1 and (hint := self._other_separator(row[0])):
            return f" It has 1 field; {hint}."
        header = self.section.columns or self.header()
        if len(header) == 1 and (hint := self._other_separator(header[0])):
            return f" The first row has 1 field; {hint}."
        if not self.section.quotes and any(value.startswith('"') for value in row):
            return f" Are its fields in quotes? Use {setting(self.prefix, 'quotes', True)}."
        if len(row) == num_columns + 1 and number == 1 and not self.section.columns:
            columns = f"{self.prefix}columns"
            remedy = f"Name all columns ({columns}) and {self._skip_first_row}."
            return f" Does it begin with an index that has no name? {remedy}"
        return f" {self._remedy}"

    def _without_bad_rows(self, text: bytes, num_columns: int, positions: dict[Field, int], done: int) -> pl.DataFrame:
        """Parse the good rows of a block, and count the others. Raise DataError if they may not be skipped."""
        if self.bad_rows is None or self._row_with_stray_quote(text):
            raise self._bad_row(text, num_columns, positions, done)
        good = io.StringIO()
        quotes: Any = {"quotechar": '"'} if self.section.has_quotes else {"quotechar": None, "quoting": csv.QUOTE_NONE}
        writer = csv.writer(good, delimiter=self._one_byte_separator, lineterminator="\n", **quotes)
        rows = self._split(text, "surrogateescape")
        bad_dates = _bad_dates(rows, positions)
        for number, row in enumerate(rows, done + 1):
            problem = _problem(row, num_columns, positions, bad_dates)
            if problem is None and _is_broken(row):
                problem = ": a character that is not UTF-8"
            if problem:
                self.bad_rows.skip(f"{self.path.name}: row {number:,}{problem}", number)
            else:
                writer.writerow([row[position] for position in positions.values()])
        if not good.getvalue():
            return pl.DataFrame(schema={field.name: _PARSED[field.kind] for field in positions})
        frame = self._parse(good.getvalue().encode(), len(positions), {field: i for i, field in enumerate(positions)})
        if frame is None:
            raise self._bad_row(text, num_columns, positions, done)
        return frame


def _with_error(texts: Iterator[bytes]) -> Iterator[bytes | Exception]:
    """Yield the texts, and the error that ends them: they may be read ahead, and a row before it may be bad, too."""
    try:
        yield from texts
    except (LongRow, DataError) as error:
        yield error


def row_with_stray_quote(lines: Iterable[str], separator: str) -> int:
    """Return the number of the first row whose quoted field continues after its closing quote; 0 if there is none."""
    csv.field_size_limit(2 * MAX_ROW_BYTES)
    done = 0
    try:
        for _ in csv.reader(lines, delimiter=separator, strict=True):
            done += 1
    except csv.Error as error:
        return done + 1 if "expected after" in str(error) else 0  # else the last field is not closed
    return 0


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _is_broken(row: list[str]) -> bool:
    """Return whether bytes of this row, which was decoded with surrogateescape, are not UTF-8."""
    text = "".join(row)
    return not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text)


def _bad_dates(rows: list[list[str]], positions: dict[Field, int]) -> dict[Field, set[str]]:
    """Return the values of each column of dates that are not dates."""
    found = {}
    for wanted, position in positions.items():
        if wanted.kind == "date":
            texts = {row[position] for row in rows if len(row) > position and not _is_broken(row)}
            values = pl.Series([*texts], dtype=pl.String)
            found[wanted] = {*values.filter(parsed_times(values, wanted.form).is_null())}
    return found


def _problem(
    row: list[str], num_columns: int, positions: dict[Field, int], bad_dates: dict[Field, set[str]]
) -> str | None:
    """Return what is wrong with a row, to follow its number; None if it is good."""
    if len(row) != num_columns:
        found = f"got {len(row)}, the last is {row[-1][:80]!r}" if row else "got a blank line"
        return f": expected {num_columns} fields, {found}"
    if any("\0" in value for value in row):
        return f": a NUL byte in {next(value for value in row if chr(0) in value)[:80]!r}"
    for wanted, position in positions.items():
        value = row[position]
        if value in bad_dates[wanted] if wanted.kind == "date" else not _is_good(value, wanted.kind):
            fact = _FACTS[wanted.kind] if wanted.form == "iso" else f"does not have the format '{wanted.form}'"
            return f", column {wanted.column}: {value[:80]!r} {fact}"
    return None


def _is_good(value: str, kind: Kind) -> bool:
    try:
        match kind:
            case "integer":
                return bool(re.fullmatch(r" *[+-]?\d+", value)) and -(2**63) <= int(value) < 2**63
            case "number":
                return math.isfinite(float(value))
            case "text":
                return bool(value)
            case _:
                return True
    except ValueError:
        return False
