"""Histories from your own interactions: CSV, TSV or Parquet with a column for users and one for items.

Filters apply in this order: rating, repeated items, items, users, k-core.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import polars as pl
import xxhash
from pydantic import NonNegativeInt, model_validator

from recmill.config.sections import key
from recmill.data.parquet_files import reading
from recmill.datasets.compressed import forecast_rows
from recmill.datasets.histories import delimited
from recmill.datasets.histories.interactions import Filters, InteractionsPlan, write
from recmill.errors import ConfigError, DataError, did_you_mean, did_you_mean_path

__all__ = ["Options", "plan", "plan_frame", "write"]

_BATCH_ROWS = 1 << 19
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Options(Filters):
    input: str = key(..., "One file: .csv or .tsv with a header (also .gz, .zst), or .parquet.")
    user_column: str = key(..., "Column of users: text or whole numbers.")
    item_column: str = key(..., "Column of items: text or whole numbers.")
    time_column: str | None = key(None, "Column of times: whole numbers or ISO dates. Without it, file order counts.")
    rating_column: str | None = key(None, "Column of ratings: numbers, for --min-rating.")
    titles: str | None = key(None, "File with titles of items, in one of the formats of --input.")
    title_column: str | None = key(None, "Column of titles, in the file of --titles.")
    title_id_column: str | None = key(None, "Column of items, in the file of --titles.  [default: as --item-column]")
    on_bad_row: Literal["fail", "skip"] = key("fail", "Stop at a row of --input that cannot be parsed, or skip it.")
    max_bad_rows: NonNegativeInt = key(1000, "With --on-bad-row skip: stop after more than this many.")
    min_user_count: NonNegativeInt = key(5, "Keep only users with at least this many interactions; never fewer than 3.")

    @model_validator(mode="after")
    def check_combinations(self) -> "Options":
        if (self.min_rating is None) != (self.rating_column is None):
            raise ValueError("--min-rating and --rating-column go together: one of them is missing.")
        if (self.titles is None) != (self.title_column is None):
            raise ValueError("--titles and --title-column go together: one of them is missing.")
        if self.title_id_column is not None and self.titles is None:
            raise ValueError("--title-id-column needs --titles.")
        if self.max_bad_rows != 1000 and self.on_bad_row == "fail":
            raise ValueError("--max-bad-rows needs --on-bad-row skip.")
        if self.on_bad_row == "skip" and self.input.endswith(".parquet"):
            raise ValueError("--on-bad-row skip is for .csv and .tsv: values of Parquet files have types. Remove it.")
        return self


def plan(options: Options) -> InteractionsPlan:
    path = Path(options.input)
    bad_rows = delimited.BadRows(options.max_bad_rows) if options.on_bad_row == "skip" else None
    made = _plan(options, [path], *_reader(path, "--input", _columns(options), bad_rows))
    return replace(made, bad_rows=bad_rows)


def plan_frame(options: Options, frame: pl.DataFrame) -> InteractionsPlan:
    """Plan to read a frame instead of the file `options.input`, with the same checks."""
    if options.on_bad_row == "skip":
        raise ConfigError("--on-bad-row skip is for .csv and .tsv: values of a frame have types. Remove it.")
    columns = _columns(options)
    read = partial(_read_selected, "input", columns, _select("input", frame.lazy(), columns))
    digest = xxhash.xxh3_128_hexdigest(frame.select(columns.values()).hash_rows(seed=0).to_numpy().data)
    return replace(_plan(options, [], frame.height, read), frame_digest=digest)


def _plan(
    options: Options, files: list[Path], rows: int, read: Callable[[], Iterator[pl.DataFrame]]
) -> InteractionsPlan:
    titles = None
    if options.titles and options.title_column:
        files = [*files, Path(options.titles)]
        columns = {"item": options.title_id_column or options.item_column, "title": options.title_column}
        titles = partial(_titles, _reader(files[-1], "--titles", columns)[1])
    has_time = options.time_column is not None
    return InteractionsPlan(
        "histories", options, files, rows, read, options.min_user_count, titles=titles, has_time=has_time
    )


def _columns(options: Options) -> dict[str, str]:
    """Return the column of users, items, ratings and times, as far as they are given."""
    names = ("user", "item", "rating", "time")
    return {name: column for name in names if (column := getattr(options, f"{name}_column")) is not None}


def _reader(
    path: Path, option: str, columns: dict[str, str], bad_rows: delimited.BadRows | None = None
) -> tuple[int, Callable[[], Iterator[pl.DataFrame]]]:
    """Return about how many rows a file has, and a function that reads these columns of it."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. {did_you_mean_path(path)}{option} is one file: .csv, .tsv or .parquet.")
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    if suffix not in (*_SEPARATORS, ".parquet"):
        raise DataError(f"{path}: '{suffix}' is none of .csv, .tsv, .parquet (.gz and .zst after the first two).")
    if suffix == ".parquet":
        with reading(path, "Get it again."):
            selected = _select(str(path), pl.scan_parquet(path), columns)
            rows = selected.select(pl.len()).collect().item()
        return rows, partial(_read_selected, str(path), columns, selected)
    return forecast_rows(path), partial(
        _read_text, delimited.Table(path, _SEPARATORS[suffix], bad_rows=bad_rows), columns
    )


def _titles(read: Callable[[], Iterator[pl.DataFrame]]) -> pl.DataFrame:
    return pl.concat(read()).select(original_id=pl.col("item").cast(pl.String), title="title")


def _read_text(table: delimited.Table, columns: dict[str, str]) -> Iterator[pl.DataFrame]:
    kinds: dict[str, delimited.Kind] = dict.fromkeys(columns, "text")
    kinds |= {"rating": "number", "time": "integer"}
    if "time" in columns and "-" in table.first_value(columns["time"])[1:]:
        kinds["time"] = "date"
    fields = [delimited.Field(name, column, kinds[name], _option(name, columns)) for name, column in columns.items()]
    return table.rows(*fields)


def _select(path: str, frame: pl.LazyFrame, columns: dict[str, str]) -> pl.LazyFrame:
    schema = frame.collect_schema()
    for name, column in columns.items():
        if column not in schema:
            remedy = f"Name another column ({_option(name, columns)})."
            raise DataError(
                f"{path}: no column '{column}'; it has: {', '.join(schema)}. {did_you_mean(column, schema)}{remedy}"
            )
    return frame.select(_typed_column(path, schema, *names) for names in columns.items())


def _option(name: str, columns: dict[str, str]) -> str:
    """Return the option that names this column of the file with these columns."""
    return "--title-id-column" if name == "item" and "title" in columns else f"--{name}-column"


def _typed_column(path: str, schema: pl.Schema, name: str, column: str) -> pl.Expr:
    """Select `column` as `name`, in the type that text would be read as."""
    dtype = schema[column]
    value = pl.col(column).alias(name)
    if name == "time" and isinstance(dtype, pl.Date | pl.Datetime):
        return value.cast(pl.Datetime("us")).dt.epoch("us")
    if name == "rating" and dtype.is_numeric():
        return value.cast(pl.Float64)
    if dtype.is_integer() and name != "title":
        return value.cast(pl.Int64)
    if name in ("user", "item", "title") and dtype == pl.String:
        return value
    others = {"time": "whole numbers, dates or datetimes", "rating": "numbers", "title": "text"}
    expected = others.get(name, "text or whole numbers")
    raise DataError(f"{path}: column '{column}' is {dtype}, not {expected}.")


def _check_values(path: str, batch: pl.DataFrame, columns: dict[str, str], rows_before: int) -> None:
    for name, column in columns.items():
        is_bad = batch[name].is_null() if name != "rating" else ~batch[name].is_finite().fill_null(False)
        if is_bad.any():
            row = rows_before + int(is_bad.arg_true()[0]) + 1
            value = batch[name].filter(is_bad)[0]
            fact = "missing" if value is None else f"{value} is not a number"
            raise DataError(f"{path}: row {row:,}, column {column}: {fact}. Remove such rows.")


def _read_selected(path: str, columns: dict[str, str], selected: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    done = 0
    try:
        for batch in selected.collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True):
            _check_values(path, batch, columns, done)
            done += batch.height
            yield batch
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{path}: after row {done:,}: {str(error).splitlines()[0]}. Is it complete?") from None
    if not done:
        raise DataError(f"{path}: no rows.")
