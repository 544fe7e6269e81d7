"""Parquet files: columns in the types that features can be made of. Other types are refused by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from recmill.data.parquet_files import reading
from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.frame import FrameFile
from recmill.errors import ConfigError, DataError

_BLOCK_ROWS = 1 << 17


def types_of(file: InputFile) -> dict[str, pl.DataType]:
    """Return the columns and their types in the file."""
    if isinstance(file, FrameFile):
        return dict(file.frame.schema)
    if isinstance(file, Path):
        with reading(file, "Get it again."):
            return dict(pl.scan_parquet(file, glob=False).collect_schema())
    with _remote(file) as parquet:
        return dict(pl.DataFrame(parquet.schema_arrow.empty_table()).schema)


def rows_of(file: InputFile) -> int:
    if isinstance(file, FrameFile):
        return file.frame.height
    if isinstance(file, Path):
        with reading(file, "Get it again."):
            return int(pl.scan_parquet(file, glob=False).select(pl.len()).collect().item())
    with _remote(file) as parquet:
        return int(parquet.metadata.num_rows)


def frames(file: InputFile, columns: list[str]) -> Iterator[pl.DataFrame]:
    """Yield these columns of all rows, in order."""
    types = types_of(file)
    chosen = [_converted(str(file), column, types[column]) for column in columns]
    if isinstance(file, FrameFile):
        yield from (part.select(chosen) for part in file.frame.iter_slices(_BLOCK_ROWS))
        return
    if isinstance(file, Path):
        with reading(file, "Get it again."):
            selected = pl.scan_parquet(file, glob=False).select(chosen)
            for start in range(0, rows_of(file), _BLOCK_ROWS):
                yield selected.slice(start, _BLOCK_ROWS).collect()  # collect_batches reads far ahead
        return
    with _remote(file) as parquet:
        for batch in parquet.iter_batches(batch_size=_BLOCK_ROWS, columns=columns):
            yield pl.DataFrame(batch).select(chosen)
    file.check_unchanged()


def converted_type(file: str, column: str, dtype: pl.DataType) -> pl.DataType:
    """Return the type that a column is read as; raise an error if it has values that no feature can be made of."""
    if isinstance(dtype, pl.List | pl.Array):
        inner = dtype.inner if isinstance(dtype.inner, pl.DataType) else dtype.inner()
        if not inner.is_nested():
            return pl.List(converted_type(file, column, inner))
    if dtype.is_nested() or isinstance(dtype, pl.Object | pl.Binary | pl.Duration):
        kind = "a map" if isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.Struct) else f"{dtype}"
        raise DataError(
            f"{file}: column {column} holds {kind}, of which no feature can be made. "
            "Leave it out, or write its parts to columns of their own."
        )
    if isinstance(dtype, pl.Categorical | pl.Enum | pl.Null):
        return pl.String()
    if isinstance(dtype, pl.Decimal):
        return pl.Int64() if dtype.scale == 0 else pl.Float64()
    if isinstance(dtype, pl.Datetime) and dtype.time_zone:
        return pl.Datetime(dtype.time_unit)
    return dtype


def _converted(file: str, column: str, dtype: pl.DataType) -> pl.Expr:
    value = pl.col(column)
    if isinstance(dtype, pl.Datetime) and dtype.time_zone:
        return value.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
    wanted = converted_type(file, column, dtype)
    return value if wanted == dtype else value.cast(wanted)


@contextmanager
def _remote(file: Any) -> Iterator[Any]:
    """Open a file of an object store. Polars would read all of it into memory."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"{file}: Parquet in object storage needs pyarrow. Use: pip install pyarrow.") from None
    try:
        with file.open() as opened:
            yield ParquetFile(opened)
    except (ArrowException, pl.exceptions.PolarsError) as error:
        fact = str(error).partition("\n")[0]
        raise DataError(f"{file}: not a Parquet file that can be read ({fact}). Get it again.") from None
