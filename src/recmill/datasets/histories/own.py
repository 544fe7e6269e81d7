"""Histories from your own interactions: rows with a column for users and one for items, or a line per user.

Filters apply in this order: rating, repeated items, items, users, k-core.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import polars as pl
import xxhash
from pydantic import NonNegativeInt, model_validator

from recmill.config.sections import key
from recmill.datasets.compressed import InputFile, forecast_items, read_blocks
from recmill.datasets.histories.interactions import Filters, InteractionsPlan, write
from recmill.datasets.inputs import delimited, lines
from recmill.datasets.inputs.detection import described
from recmill.datasets.inputs.files import found_files
from recmill.datasets.inputs.flags import ReadingFlags
from recmill.datasets.inputs.frame import FrameFile
from recmill.datasets.inputs.parquet import converted_type
from recmill.datasets.inputs.reading import check_columns, columns_of, frames, lacking, num_rows, types_of
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.times import FORMATS, is_format, likely_format, parsed_times
from recmill.errors import ConfigError, DataError

__all__ = ["Options", "plan", "plan_frames", "write"]

FRAMES = ("input", "titles")

_BATCH_ROWS = 1 << 19
_KINDS = {"time": "a whole number or a date"}


class Options(Filters, ReadingFlags):
    input: str = key(
        ...,
        "Files: text, .jsonl or .parquet (text also .gz, .zst); a directory, a pattern in quotes, or s3://, gs://, hf://.",
    )
    layout: Literal["rows", "lines", "jsonl"] = key(
        "rows", "rows: one interaction per row; lines: a user and all its items per line; jsonl: JSON lines."
    )
    user_column: str | None = key(None, "Column of users: text or whole numbers.")
    item_column: str | None = key(None, "Column of items: text or whole numbers.")
    time_column: str | None = key(None, "Column of times. Without it, file order counts.")
    time_format: str | None = key(
        None, f"{FORMATS}  [default: ISO dates, seconds with decimals, or whole numbers, which are kept as they are]"
    )
    rating_column: str | None = key(None, "Column of ratings: numbers, for --min-rating.")
    no_user: bool = key(False, "With --layout lines: a line has only items, and is a history of its own.")
    only: list[str] = key([], "Keep only rows with one of these values, like event=purchase,cart. May be repeated.")
    titles: str | None = key(None, "File with titles of items, in one of the formats of --input.")
    title_column: str | None = key(None, "Column of titles, in the file of --titles.")
    title_id_column: str | None = key(None, "Column of items, in the file of --titles.  [default: as --item-column]")
    title_columns: list[str] | None = key(None, "The names of the columns of --titles, if its first row has none.")
    title_separator: str | None = key(None, "Between the fields of --titles.  [default: found in its first lines]")
    title_encoding: str | None = key(None, "The encoding of --titles.  [default: as --encoding]")
    on_bad_row: Literal["fail", "skip"] = key("fail", "Stop at a row of --input that cannot be parsed, or skip it.")
    max_bad_rows: NonNegativeInt = key(1000, "With --on-bad-row skip: stop after more than this many.")
    min_user_count: NonNegativeInt = key(5, "Keep only users with at least this many interactions; never fewer than 3.")

    @model_validator(mode="after")
    def check_combinations(self) -> "Options":
        if self.rating_column is not None and self.min_rating is None:
            raise ValueError("--rating-column needs --min-rating, the least rating to keep.")
        if self.time_format is not None and self.time_column is None:
            raise ValueError("--time-format needs --time-column.")
        if self.time_format is not None and not is_format(self.time_format):
            raise ValueError(f"--time-format is {self.time_format!r}. Give {FORMATS}")
        if self.title_column is not None and self.titles is None:
            raise ValueError("--title-column needs --titles, the file that has the column.")
        of_titles = ("title_id_column", "title_columns", "title_separator", "title_encoding")
        if (given := [name for name in of_titles if getattr(self, name) is not None]) and self.titles is None:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --titles.")
        if self.max_bad_rows != 1000 and self.on_bad_row == "fail":
            raise ValueError("--max-bad-rows needs --on-bad-row skip.")
        is_text = self.layout == "rows" and not self.input.endswith((".parquet", ".jsonl"))
        if self.on_bad_row == "skip" and not is_text:
            raise ValueError("--on-bad-row skip is for .csv and .tsv: values of other files have types. Remove it.")
        self._check_layout()
        return self

    def _check_layout(self) -> None:
        named = {name: getattr(self, name) for name in ("user_column", "item_column", "time_column", "rating_column")}
        if self.layout == "lines":
            if self.min_rating is not None:
                raise ValueError("--min-rating is for rows with columns; --layout lines has none.")
            if wrong := [name for name in (*named, "columns") if getattr(self, name) is not None] or self.only:
                option = "only" if wrong is self.only else str(wrong[0])
                raise ValueError(f"--{option.replace('_', '-')} is for rows with columns; --layout lines has none.")
            if self.titles and not self.title_id_column:
                raise ValueError("--titles needs --title-id-column with --layout lines, whose items have no column.")
            return
        if self.no_user:
            raise ValueError("--no-user needs --layout lines.")
        if bad := [text for text in self.only if not text.partition("=")[0] or not text.partition("=")[2]]:
            raise ValueError(f"--only {bad[0]!r}: give a column and its values, like event=purchase,cart.")


def plan(options: Options, titles: list[InputFile] | None = None) -> InteractionsPlan:
    """`titles`: is read instead of the files of options.titles."""
    files = found_files(options.input)
    bad_rows = delimited.BadRows(options.max_bad_rows) if options.on_bad_row == "skip" else None
    section = _section(files[0], options)
    if options.layout == "lines":
        items = sum(map(forecast_items, files))
        return _plan(options, files, items, partial(_read_lines, files, section, options.no_user), titles)
    needed = ["user", "item"] + ["rating"] * (options.min_rating is not None)
    if missing := [name for name in needed if getattr(options, f"{name}_column") is None]:
        raise _no_column(missing[0], files[0], section)
    columns = _columns(options)
    named = list(dict.fromkeys(columns.values()))
    if len(files) > 1 or len({*named} - {*columns_of(files[0], section, "--")}) > 1:  # one is reported by its reader
        check_columns(files, section, named, "the files do not fit the options", "Correct the options.", prefix="--")
    rows, read = _reader(files, section, columns, bad_rows, options.time_format)
    return replace(_plan(options, files, rows, read, titles), bad_rows=bad_rows)


def _no_column(name: str, file: InputFile, section: InputSection) -> ConfigError:
    there = ", ".join(columns_of(file, section, "--"))
    return ConfigError(f"--{name}-column is missing: name the column of {name}s. {file} has: {there}.")


def _section(file: InputFile, options: Options) -> InputSection:
    kind = "jsonl" if options.layout == "jsonl" else "text" if options.layout == "lines" else "auto"
    keys: dict[str, Any] = {"kind": kind, **options.given()}
    if options.layout == "lines":
        keys.setdefault("separator", _separator_of_lines(file))
    return described(file, **keys)


def _separator_of_lines(file: InputFile) -> str:
    """Return the separator of a text with lines of different lengths: the one that occurs most often in it."""
    text = next(read_blocks(file, 1 << 18), b"").replace(b"\0", b"")
    return max((" ", "\t", ","), key=lambda separator: text.count(separator.encode()))


def plan_frames(options: Options, frames: Mapping[str, pl.DataFrame]) -> InteractionsPlan:
    """Plan to read frames instead of the files of options.input or options.titles, with the same checks."""
    titles: list[InputFile] | None = [FrameFile(frames["titles"], "titles")] if "titles" in frames else None
    if "input" not in frames:
        return plan(options, titles)
    frame = frames["input"]
    if options.on_bad_row == "skip":
        raise ConfigError("--on-bad-row skip is for .csv and .tsv: values of a frame have types. Remove it.")
    if options.min_rating is not None and options.rating_column is None:
        raise ConfigError(
            f"rating_column is missing: name the column of ratings. The frame has: {', '.join(frame.columns)}."
        )
    columns = _columns(options)
    _check_there("input", frame.schema, columns)
    chosen = [_typed_column("input", frame.schema, *names, options.time_format) for names in columns.items()]
    read = partial(_checked, "input", columns, list(frame.iter_slices(_BATCH_ROWS)), chosen)
    digest = xxhash.xxh3_128_hexdigest(frame.select(columns.values()).hash_rows(seed=0).to_numpy().data)
    return replace(_plan(options, [], frame.height, read, titles), frame_digest=digest)


def _plan(
    options: Options,
    files: list[InputFile],
    rows: int,
    read: Callable[[], Iterator[pl.DataFrame]],
    titles_given: list[InputFile] | None = None,
) -> InteractionsPlan:
    titles = None
    if options.titles:
        found = titles_given or found_files(options.titles, "--titles")
        files = [*files, *(file for file in found if file not in files)]
        encoding = options.title_encoding or options.encoding or "utf-8"
        named = options.title_columns or []
        section = described(
            found[0],
            options.title_separator,
            options.quotes,
            "--title-",
            columns=named,
            encoding=encoding,
            escape=options.escape,
        )
        if options.title_column is None:
            raise _no_column("title", found[0], section)
        columns = {"item": options.title_id_column or options.item_column or "", "title": options.title_column}
        titles = partial(_titles, _reader(found, section, columns)[1])
    return InteractionsPlan(
        "histories",
        options,
        files,
        rows,
        read,
        options.min_user_count,
        conditions={
            f"--only {text}": pl.col(f"only {number}").is_in(text.partition("=")[2].split(","))
            for number, text in enumerate(options.only)
        },
        titles=titles,
        has_time=options.time_column is not None,
    )


def _columns(options: Options) -> dict[str, str]:
    """Return the column of users, items, ratings and times, as far as they are given."""
    names = ("user", "item", "rating", "time")
    found = {name: column for name in names if (column := getattr(options, f"{name}_column")) is not None}
    return found | {f"only {number}": text.partition("=")[0] for number, text in enumerate(options.only)}


def _reader(
    files: list[InputFile],
    section: InputSection,
    columns: dict[str, str],
    bad_rows: delimited.BadRows | None = None,
    form: str | None = None,
) -> tuple[int, Callable[[], Iterator[pl.DataFrame]]]:
    """Return about how many rows the files have, and a function that reads these columns of them."""
    readers = [_file_reader(file, section, columns, bad_rows, form) for file in files]
    rows = sum(num_rows(file, section) for file in files)
    return rows, lambda: chain.from_iterable(read() for read in readers)


def _file_reader(
    file: InputFile,
    section: InputSection,
    columns: dict[str, str],
    bad_rows: delimited.BadRows | None,
    form: str | None,
) -> Callable[[], Iterator[pl.DataFrame]]:
    kind = section.kind_of(file)
    if kind == "text":
        table = delimited.Table(file, section, bad_rows, otherwise=delimited.SKIP)
        if "title" in columns:
            table = delimited.Table(file, section, prefix="--title-")
        return partial(_read_text, table, columns, form)
    schema = pl.Schema(types_of(file, section, "--"))
    _check_there(str(file), schema, columns)
    distinct = list(dict.fromkeys(columns.values()))
    if kind == "parquet":
        converted = {name: converted_type(str(file), name, schema[name]) for name in distinct}
        chosen = [_typed_column(str(file), pl.Schema(converted), *names, form) for names in columns.items()]
    else:
        if form is None and "time" in columns:
            first = next(frames(file, section, [columns["time"]], "--")).to_series()
            form = likely_format(first.drop_nulls())
        chosen = [_parsed_column(*names, form) for names in columns.items()]
    return lambda: _checked(str(file), columns, frames(file, section, distinct, "--"), chosen)


def _read_lines(files: list[InputFile], section: InputSection, no_user: bool) -> Iterator[pl.DataFrame]:
    users = 1
    for file in files:
        for frame in lines.rows(file, section, users if no_user else None):
            yield frame
        users = int(frame["user"][-1]) + 1 if no_user else users


def _parsed_column(name: str, column: str, form: str | None) -> pl.Expr:
    """Select a column of texts as `name`, in the type that delimited text would be read as."""
    value = pl.col(column)
    if name == "rating":
        return value.cast(pl.Float64, strict=False).alias(name)
    if name == "time":
        return (_as_time(value, form) if form else value.cast(pl.Int64, strict=False)).alias(name)
    return value.alias(name)


def _as_time(value: pl.Expr, form: str) -> pl.Expr:
    """Return values as microseconds since 1970."""
    return value.cast(pl.String).map_batches(partial(parsed_times, form=form), return_dtype=pl.Int64)


def _titles(read: Callable[[], Iterator[pl.DataFrame]]) -> pl.DataFrame:
    return pl.concat(read()).select(original_id=pl.col("item").cast(pl.String), title="title")


def _read_text(table: delimited.Table, columns: dict[str, str], form: str | None) -> Iterator[pl.DataFrame]:
    kinds: dict[str, delimited.Kind] = dict.fromkeys(columns, "text")
    kinds |= {"rating": "number", "time": "integer"}
    kinds |= {name: "any" for name in columns if name.startswith("only")}
    if "time" in columns:
        form = likely_format(table.first_values(columns["time"])) if form is None else form
        kinds["time"] = "date" if form else "integer"
    named = columns.items()
    return table.rows(
        *(delimited.Field(n, column, kinds[n], _option(n, columns), form or "iso") for n, column in named)
    )


def _check_there(path: str, schema: pl.Schema, columns: dict[str, str]) -> None:
    missing = {column: _option(name, columns) for name, column in columns.items() if column not in schema}
    if missing:
        what = "other columns" if len(missing) > 1 else "another column"
        remedy = f"Name {what} ({', '.join(missing.values())})."
        raise DataError(f"{path}: {lacking([*missing], [*schema])}\n{remedy}")


def _option(name: str, columns: dict[str, str]) -> str:
    """Return the option that names this column of the file with these columns."""
    if name.startswith("only"):
        return "--only"
    return "--title-id-column" if name == "item" and "title" in columns else f"--{name}-column"


def _typed_column(path: str, schema: pl.Schema, name: str, column: str, form: str | None) -> pl.Expr:
    """Select `column` as `name`, in the type that text would be read as."""
    dtype = schema[column]
    value = pl.col(column).alias(name)
    if name.startswith("only") and not dtype.is_nested():
        return value.cast(pl.String)
    if name == "time" and isinstance(dtype, pl.Date | pl.Datetime):
        return value.cast(pl.Datetime("us")).dt.epoch("us")
    if name == "time" and (form or dtype.is_float() or dtype == pl.String) and not dtype.is_nested():
        return _as_time(value, form or ("iso" if dtype == pl.String else "s"))
    if name == "rating" and dtype.is_numeric():
        return value.cast(pl.Float64)
    if dtype.is_integer() and name != "title":
        return value.cast(pl.Int64)
    if name in ("user", "item", "title") and dtype == pl.String:
        return value
    others = {"time": "numbers, dates or texts", "rating": "numbers", "title": "text"}
    expected = others.get(name, "text or whole numbers")
    raise DataError(f"{path}: column '{column}' is {dtype}, not {expected}.")


def _check_values(path: str, batch: pl.DataFrame, columns: dict[str, str], rows_before: int, raw: pl.DataFrame) -> None:
    for name, column in columns.items():
        if name.startswith("only"):
            continue
        is_bad = batch[name].is_null() if name != "rating" else ~batch[name].is_finite().fill_null(False)
        is_bad = is_bad | (batch[name] == "") if batch[name].dtype == pl.String else is_bad
        if is_bad.any():
            place = int(is_bad.arg_true()[0])
            value = raw[column][place]
            fact = "missing" if value is None or value == "" else f"{value} is not {_KINDS.get(name, 'a number')}"
            raise DataError(f"{path}: row {rows_before + place + 1:,}, column {column}: {fact}. Remove such rows.")


def _checked(
    path: str, columns: dict[str, str], batches: Iterable[pl.DataFrame], chosen: list[pl.Expr]
) -> Iterator[pl.DataFrame]:
    done = 0
    try:
        for raw in batches:
            batch = raw.select(chosen)
            _check_values(path, batch, columns, done, raw)
            done += batch.height
            yield batch
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{path}: after row {done:,}: {str(error).splitlines()[0]}. Is it complete?") from None
    if not done:
        raise DataError(f"{path}: no rows.")
