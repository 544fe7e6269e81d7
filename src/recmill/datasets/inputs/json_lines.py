"""JSON lines: one object per line. Single values are read as text, as in delimited text; lists as lists of text."""

import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import polars as pl

from recmill.datasets.compressed import InputFile, expansion
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.text import MAX_ROW_BYTES, LongRow, bad_byte, row_blocks
from recmill.errors import DataError
from recmill.observe.progress import Progress

_REMEDY = "Fix the line, or get the file again."


def types_of(file: InputFile, section: InputSection, prefix: str) -> dict[str, pl.DataType]:
    """Return the keys of the objects in the first 16 MB, and whether their values are texts or lists.

    Objects and lists of lists keep their type: they are refused where they are used.
    """
    first = b"".join(islice(_blocks(file, section, prefix), 4))
    try:
        schema = pl.read_ndjson(first, infer_schema_length=None).schema
    except pl.exceptions.PolarsError:
        found: dict[str, pl.DataType] = {}
        for _, values in _objects(file, first, 0):
            for key, value in values.items():
                is_list = isinstance(value, list) or isinstance(found.get(key), pl.List)
                found[key] = pl.List(pl.String()) if is_list else pl.String()
        return found
    return {column: _simple(dtype) for column, dtype in schema.items()}


def _simple(dtype: pl.DataType) -> pl.DataType:
    if isinstance(dtype, pl.List) and not (isinstance(dtype.inner, pl.DataType) and dtype.inner.is_nested()):
        return pl.List(pl.String())
    return dtype if dtype.is_nested() else pl.String()


def frames(file: InputFile, section: InputSection, columns: list[str], prefix: str) -> Iterator[pl.DataFrame]:
    """Yield these columns of all rows, in order. A key that an object lacks is a missing value."""
    types = types_of(file, section, prefix)
    wanted = {column: types.get(column, pl.String()) for column in columns}
    for column, dtype in wanted.items():
        if isinstance(dtype, pl.Struct) or (isinstance(dtype, pl.List) and dtype != pl.List(pl.String())):
            what = "objects" if isinstance(dtype, pl.Struct) else "lists of lists or of objects"
            raise DataError(f"{file}: column {column} holds {what}. Write their parts to keys of their own.")
    done = 0
    with Progress(f"reading {file.name}", int(file.stat().st_size * expansion(file)), "bytes") as progress:
        for text in _blocks(file, section, prefix):
            try:
                frame = pl.read_ndjson(text, schema=wanted)
            except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
                raise _bad_line(file, text, wanted, done, section, prefix) from None
            _check_single(file, text, frame, wanted, done)
            yield frame
            done += frame.height
            progress.advance(len(text))
    if not done:
        raise DataError(f"{file}: no rows. Get the file again.")


def _blocks(file: InputFile, section: InputSection, prefix: str) -> Iterator[bytes]:
    blocks = row_blocks(file, section.model_copy(update={"escape": False}), prefix, quotes=False)
    try:
        first = next(blocks, b"")
        if first.lstrip()[:1] == b"[":
            raise DataError(f"{file}: begins with '[': it is one JSON array. Write one object per line instead.")
        yield from chain([first] if first else [], blocks)
    except LongRow:
        raise DataError(f"{file}: a line has more than {MAX_ROW_BYTES:,} bytes. Write one object per line.") from None


def _objects(file: InputFile, text: bytes, done: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects with the numbers of their rows, read one at a time."""
    lines = [line for line in text.decode("utf-8", "surrogateescape").split("\n") if line.strip()]
    for number, line in enumerate(lines, done + 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: row {number:,} is no JSON ({error}): {line[:80]!r}. {_REMEDY}") from None
        if not isinstance(values, dict):
            raise DataError(f"{file}: row {number:,} is no object: {line[:80]!r}. {_REMEDY}")
        yield number, values


def _bad_line(
    file: InputFile, text: bytes, wanted: dict[str, pl.DataType], done: int, section: InputSection, prefix: str
) -> DataError:
    if section.encoding == "utf-8" and (place := bad_byte(file, prefix)):
        return DataError(f"{file}: {place}")
    number = done
    for number, values in _objects(file, text, done):
        for column, dtype in wanted.items():
            value = values.get(column)
            if isinstance(dtype, pl.List) and value is not None and not isinstance(value, list):
                fact = f"{str(value)[:80]!r}, where other rows have a list"
                return DataError(f"{file}: row {number:,}, column {column}: {fact}. Make it a list, too.")
    return DataError(f"{file}: rows {done + 1:,} to {number:,}: one of them cannot be read as JSON. {_REMEDY}")


def _check_single(file: InputFile, text: bytes, frame: pl.DataFrame, wanted: dict[str, pl.DataType], done: int) -> None:
    """Raise an error if a value is a list or an object where texts are expected: Polars has turned it into text."""
    suspects = [
        column for column, dtype in wanted.items() if dtype == pl.String and frame[column].str.contains(r"^[\[{]").any()
    ]
    for number, values in _objects(file, text, done) if suspects else ():
        for column in suspects:
            if isinstance(value := values.get(column), list | dict):
                what = "a list" if isinstance(value, list) else "an object"
                fact = f"{what}, where other rows have single values"
                raise DataError(f"{file}: row {number:,}, column {column}: {fact}. Give all rows the same kind.")
