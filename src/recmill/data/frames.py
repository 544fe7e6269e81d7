"""Frames of pandas, Polars and Arrow: what callers pass in, and what they get back."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from recmill.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    AnyFrame: TypeAlias = pl.DataFrame | pd.DataFrame | pa.Table

Kind = Literal["polars", "pandas", "arrow"]


def is_frame(value: object) -> bool:
    """Return whether this is a table of pandas, Polars, Arrow or any other library that exports Arrow's streams."""
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "collect_schema")


def as_polars(frame: Any, what: str) -> "pl.DataFrame":
    """Convert a frame. Categories become text, as in files; raise DataError if a column has no single type.

    pandas keeps whole numbers as floats if one is missing, so its columns of floats without decimals are whole numbers.
    """
    import polars as pl

    try:
        found = frame.collect() if isinstance(frame, pl.LazyFrame) else frame
        found = found if isinstance(found, pl.DataFrame) else pl.DataFrame(found)
    except ImportError as error:
        raise ConfigError(f"{what}: {error}. Install pyarrow, or give a Polars frame or a file.") from None
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        reason = str(error.args[0] if error.args else error).splitlines()[0]
        if column := _bad_column(frame):
            raise DataError(f"{what}: {column} cannot be read ({reason}). Give it one type.") from None
        raise DataError(f"{what}: the frame cannot be read ({reason.rstrip('.')}).") from None
    found = found.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    return _with_whole_numbers(found) if hasattr(frame, "iloc") else found


def _with_whole_numbers(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Return a frame of pandas with whole numbers where no float has decimals, and null for NaN."""
    import polars as pl

    frame = frame.with_columns(pl.col(pl.Float32, pl.Float64).fill_nan(None))
    floats = [column.drop_nulls() for column in frame.get_columns() if column.dtype.is_float()]
    whole = [values.name for values in floats if len(values) and ((values % 1 == 0) & (values.abs() < 2**53)).all()]
    return frame.with_columns(pl.col(whole).cast(pl.Int64))


def _bad_column(frame: Any) -> str:
    """Name the column of a pandas frame that holds values of several types, and the row of the first that differs.

    Return an empty text if there is none, as in a frame in which two columns have the same name.
    """
    for name in getattr(frame, "columns", []):
        kinds = [type(value) for value in frame[name]]
        for row, kind in enumerate(kinds, 1):
            if kind is not kinds[0] and kind not in (float, type(None)):  # a float may be pandas' missing value
                return f"row {row:,}, column {name}: {kind.__name__} after {kinds[0].__name__}; it"
    return ""


def converted(frame: "pl.DataFrame", kind: Kind) -> "AnyFrame":
    """Return the frame as one of pandas, Polars or Arrow."""
    try:
        if kind == "polars":
            return frame
        if kind == "pandas":
            return frame.to_pandas()
        if kind == "arrow":
            return frame.to_arrow()
    except ImportError as error:
        raise ConfigError(f"frame='{kind}': {error}. Install pandas and pyarrow, or use 'polars'.") from None
    raise ConfigError(f"frame={kind!r}: use 'polars', 'pandas' or 'arrow'.")
