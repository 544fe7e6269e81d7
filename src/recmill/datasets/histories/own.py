"""Histories from anybody's interactions: CSV, TSV or Parquet with a column for users and one for items.

Filters, in this order: rating, repeated items, items, users, k-core.
"""

from collections.abc import Iterator
from pathlib import Path

import polars as pl
from pydantic import Field, NonNegativeInt, model_validator

from recmill.datasets.histories import delimited, interactions
from recmill.datasets.histories.interactions import Filters, Plan, write
from recmill.errors import DataError

__all__ = ["Options", "plan", "write"]

_BATCH_ROWS = 1 << 19
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Options(Filters):
    input: str = Field(description="One file: .csv or .tsv with a header (also .gz, .zst), or .parquet.")
    user_column: str = Field(description="Who: any text or whole numbers.")
    item_column: str = Field(description="What: any text or whole numbers.")
    time_column: str | None = Field(
        None, description="When: whole numbers or ISO dates. Without it, the order of the file."
    )
    rating_column: str | None = Field(None, description="How good: numbers, for --min-rating.")
    min_user_count: NonNegativeInt = Field(5, description="Only users with so many interactions; 3 at least.")

    @model_validator(mode="after")
    def fit_together(self) -> "Options":
        if (self.min_rating is None) != (self.rating_column is None):
            raise ValueError("--min-rating and --rating-column go together: one of them is missing.")
        return self


def plan(options: Options) -> Plan:
    path = Path(options.input)
    if not path.is_file():
        raise DataError(f"{path}: no such file. --input is one file: .csv, .tsv or .parquet.")
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    if suffix not in (*_SEPARATORS, ".parquet"):
        raise DataError(f"{path}: '{suffix}' is none of .csv, .tsv, .parquet (.gz and .zst after the first two).")
    columns = {name: getattr(options, f"{name}_column") for name in ("user", "item", "rating", "time")}
    named = {name: column for name, column in columns.items() if column is not None}

    def batches() -> Iterator[pl.DataFrame]:
        return (
            _parquet(path, named) if suffix == ".parquet" else _text(delimited.Table(path, _SEPARATORS[suffix]), named)
        )

    only = interactions.at_least_rated(options)
    has_time = options.time_column is not None
    return Plan("histories", options, [path], batches, options.min_user_count, only=only, has_time=has_time)


def _text(table: delimited.Table, named: dict[str, str]) -> Iterator[pl.DataFrame]:
    kinds: dict[str, delimited.Kind] = {"user": "text", "item": "text", "rating": "number", "time": "whole"}
    if "time" in named and "-" in table.first_value(named["time"])[1:]:
        kinds["time"] = "date"
    return table.rows(*(delimited.Field(name, column, kinds[name]) for name, column in named.items()))


def _parquet(path: Path, named: dict[str, str]) -> Iterator[pl.DataFrame]:
    try:
        found = pl.read_parquet_schema(path)
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: not a whole Parquet file ({error}). Get it again.") from None
    wanted = []
    for name, column in named.items():
        if column not in found:
            raise DataError(f"{path}: no column '{column}'; it has: {', '.join(found)}.")
        dtype = found[column]
        value = pl.col(column).alias(name)
        if name == "time" and isinstance(dtype, pl.Date | pl.Datetime):
            value = value.cast(pl.Datetime("us")).dt.epoch("us")
        elif name == "rating" and dtype.is_numeric():
            value = value.cast(pl.Float64)
        elif dtype.is_integer():
            value = value.cast(pl.Int64)
        elif name not in ("user", "item") or dtype != pl.String:
            good = {"time": "whole numbers, dates or datetimes", "rating": "numbers"}
            raise DataError(f"{path}: column '{column}' is {dtype}, not {good.get(name, 'text or whole numbers')}.")
        wanted.append(value)
    batches = pl.scan_parquet(path).select(wanted).collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True)
    done = 0
    try:
        for batch in batches:
            for name, column in named.items():
                is_bad = batch[name].is_null() if name != "rating" else ~batch[name].is_finite().fill_null(False)
                if is_bad.any():
                    row, value = done + int(is_bad.arg_true()[0]) + 1, batch[name].filter(is_bad)[0]
                    fact = "missing" if value is None else f"{value} is not a number"
                    raise DataError(f"{path}: row {row:,}, column {column}: {fact}. Leave such rows out of the file.")
            done += batch.height
            yield batch
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: after row {done:,}: {str(error).splitlines()[0]}. Is the file whole?") from None
    if not done:
        raise DataError(f"{path}: no rows.")
