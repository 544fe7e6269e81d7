"""Read the files of an own click log, block by block."""

import glob
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from recmill.data.parquet_files import reading
from recmill.datasets.histories import delimited
from recmill.datasets.own_clicks.schema import InputSection
from recmill.datasets.own_clicks.values import RawRows
from recmill.errors import DataError, did_you_mean, did_you_mean_path

_BLOCK_ROWS = 1 << 17


def found_files(given: str, option: str = "--input") -> list[Path]:
    """Return the file, or the files that a pattern like logs/*.csv matches, in the order of their names."""
    if Path(given).is_file():
        return [Path(given)]
    found = sorted(Path(name) for name in glob.glob(given, recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not found:
        near = did_you_mean_path(given)
        raise DataError(
            f"{option} {given}: no such file. {near}Give a file, or a pattern in quotes, like 'logs/*.csv'."
        )
    return found


def check_columns(
    files: list[Path],
    section: InputSection,
    columns: list[str],
    fact: str = "the files do not fit the schema",
    remedy: str = "Correct the schema, or the files.",
) -> None:
    """Raise an error that names every column that a file lacks."""
    problems = []
    for file in files:
        there = columns_of(file, section)
        problems += [no_column(file, c, there) for c in columns if c not in there]
        problems += [f"  {file}: two columns '{c}'\n" for c in columns if there.count(c) > 1]
    if problems:
        raise DataError(f"{fact}:\n{''.join(problems)}{remedy}")


def no_column(file: Path, column: str, there: list[str]) -> str:
    near = did_you_mean(column, there)
    return f"  {file}: no column '{column}'; it has {', '.join(there)}{f'. {near.strip()}' if near else ''}\n"


def columns_of(file: Path, section: InputSection) -> list[str]:
    if file.suffix == ".parquet":
        with reading(file, "Get it again."):
            return list(pl.read_parquet_schema(file))
    return section.columns or _table(file, section).header()


def read(file: Path, section: InputSection, columns: list[str]) -> Iterator[RawRows]:
    """Yield these columns of all rows, in order. Every row is checked to have all fields."""
    blocks = _parquet_frames(file, columns) if file.suffix == ".parquet" else _text_frames(file, section, columns)
    first = 1
    for frame in blocks:
        yield RawRows(frame, str(file), range(first, first + frame.height))
        first += frame.height


def _table(file: Path, section: InputSection) -> delimited.Table:
    has_quotes = section.quotes and section.separator != "::"
    return delimited.Table(file, section.separator, section.columns or None, quotes=has_quotes)


def _text_frames(file: Path, section: InputSection, columns: list[str]) -> Iterator[pl.DataFrame]:
    fields = [delimited.Field(column, column, "any") for column in columns]
    return _table(file, section).rows(*fields)


def _parquet_frames(file: Path, columns: list[str]) -> Iterator[pl.DataFrame]:
    with reading(file, "Get it again."):
        yield from pl.scan_parquet(file).select(columns).collect_batches(chunk_size=_BLOCK_ROWS, maintain_order=True)


def schema_of(file: Path, section: InputSection, columns: list[str]) -> dict[str, pl.DataType]:
    """Return the types of these columns; those of a text are texts."""
    types = pl.read_parquet_schema(file) if file.suffix == ".parquet" else {}
    return {column: types.get(column, pl.String()) for column in columns}
