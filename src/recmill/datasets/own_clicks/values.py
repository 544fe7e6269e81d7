"""Columns of raw rows as texts, numbers, times and labels, whether they come from text files or from Parquet."""

import contextlib
import operator
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.text import setting
from recmill.datasets.inputs.times import parsed_times
from recmill.datasets.own_clicks.schema import (
    BucketFeature,
    CategoricalFeature,
    ClicksSchema,
    CrossFeature,
    NumericFeature,
    condition,
)
from recmill.errors import ConfigError, DataError

_COMPARE: dict[str, Any] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
CLICK, NO_CLICK = ["1", "1.0", "true"], ["0", "0.0", "-1", "-1.0", "false"]
DROPPED = -1
_LARGEST = float(np.finfo(np.float32).max)  # networks read 32-bit numbers


@dataclass(frozen=True)
class Values:
    """The different values of a column, in the order of their codes, with what was computed of them."""

    series: pl.Series
    computed: dict[str, np.ndarray | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # so that no two threads compute the same


@dataclass(frozen=True)
class RawRows:
    """Rows of a file, with the columns that are needed, and their numbers in it, from 1.

    A column in `codes` is not in the frame: each row has the code of its value.
    """

    frame: pl.DataFrame
    file: str
    numbers: range | np.ndarray
    codes: dict[str, tuple[Values, np.ndarray]] = field(default_factory=dict)
    otherwise: str = ""  # another remedy for a value that cannot be used than to correct it
    prefix: str = "input."  # of the settings that errors name: '--' for new rows; '' if there are none, as for frames

    def __len__(self) -> int:
        return len(self.numbers)

    def column(self, name: str) -> pl.Series:
        if name not in self.codes:
            return self.frame[name]
        values, codes = self.codes[name]
        return values.series.gather(codes)

    def where(self, is_chosen: np.ndarray) -> "RawRows":
        if is_chosen.all():
            return self
        codes = {name: (values, of_rows[is_chosen]) for name, (values, of_rows) in self.codes.items()}
        frame = self.frame.filter(pl.Series(is_chosen)) if self.frame.width else self.frame
        numbers = self.numbers
        numbers = np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        return replace(self, frame=frame, numbers=numbers[is_chosen], codes=codes)

    def per_value(self, name: str, what: str, compute: Callable[["RawRows"], np.ndarray]) -> np.ndarray:
        """Return what `compute` makes of column `name` by row. If values have codes, it is computed once for each.

        `what` names the result, which is kept for other rows with the same values.
        """
        found = self.table(name, what, compute)
        if found is None:
            return compute(replace(self, frame=self.column(name).alias(name).to_frame(), codes={}))
        return found.take(self.codes[name][1], axis=0)  # two to three times as fast as found[codes]

    def table(self, name: str, what: str, compute: Callable[["RawRows"], np.ndarray]) -> np.ndarray | None:
        """Return what `compute` makes of each value that has a code. None: none have, or one of them is bad."""
        if name not in self.codes:
            return None
        values, _ = self.codes[name]
        with values.lock:
            if what not in values.computed:
                different = RawRows(values.series.alias(name).to_frame(), self.file, range(1, len(values.series) + 1))
                try:
                    values.computed[what] = compute(different)
                except DataError:  # the values may be of other rows; an error about these rows has to name the row
                    values.computed[what] = None
            return values.computed[what]

    def error(self, row: int, column: str, fact: str, remedy: str) -> DataError:
        place_and_fact = f"{self.file}: row {int(self.numbers[row]):,}, column {column}: {fact}"
        error = DataError(f"{place_and_fact}. {remedy}")
        error.bad_row = row, place_and_fact
        return error

    def bad_value(self, row: int, column: str, fact: str, remedy: str) -> DataError:
        return self.error(row, column, fact, f"{remedy} {self.otherwise}".rstrip())


def texts(rows: RawRows, column: str, missing: list[str]) -> pl.Series:
    """Return the column as text or lists of texts, null where there is no value. 1 and "1" are the same value."""
    values = rows.column(column)
    dtype = values.dtype
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    if inner.is_float() or inner.is_nested() or inner in (pl.Binary, pl.Duration):
        remedy = "Make it whole numbers or text; a numeric or bucket feature takes any number."
        raise DataError(
            f"{rows.file}: column {column} holds {dtype}, which is neither text nor whole numbers. {remedy}"
        )
    if isinstance(inner, pl.Datetime):  # the same time is the same text, whatever the unit and the zone
        values = values.cast(pl.List(pl.Datetime("us")) if isinstance(dtype, pl.List) else pl.Datetime("us"))
    if isinstance(dtype, pl.List):
        kept = pl.element().filter(~pl.element().is_in(missing) & pl.element().is_not_null())
        return values.cast(pl.List(pl.String)).list.eval(kept)
    as_text = values.cast(pl.String)
    is_missing = as_text.is_in(missing)
    return as_text.set(is_missing, None) if is_missing.any() else as_text


def single_texts(rows: RawRows, column: str, missing: list[str]) -> pl.Series:
    """Return the column as text, null where there is no value; lists are an error."""
    given = texts(rows, column, missing)
    if isinstance(given.dtype, pl.List):
        remedy = "Use it in a categorical feature of its own."
        raise DataError(f"{rows.file}: column {column} holds lists, where one value is needed. {remedy}")
    return given


def several_texts(given: pl.Series, feature: CategoricalFeature, missing: list[str]) -> pl.Series:
    """Return lists of texts, if the feature has several values in one field; otherwise the texts as they are."""
    if not feature.separator or isinstance(given.dtype, pl.List):
        return given
    return given.str.split(feature.separator).list.eval(pl.element().filter(~pl.element().is_in(missing)))


def normalized(given: pl.Series, steps: Collection[str], missing: list[str]) -> pl.Series:
    """Return the texts, or lists of texts, after these steps; what is then like a normalized `missing` is no value."""

    def changed(text: Any) -> Any:  # a series or an expression
        text = text.str.strip_chars() if "strip" in steps else text
        return text.str.to_lowercase() if "lower" in steps else text

    missing = [*missing, *changed(pl.Series(missing, dtype=pl.String))]
    if isinstance(given.dtype, pl.List):
        values = changed(pl.element())
        return given.list.eval(values.filter(~values.is_in(missing)))
    values = changed(given)
    is_missing = values.is_in(missing)
    return values.set(is_missing, None) if is_missing.any() else values


def numbers(rows: RawRows, column: str, missing: list[str], text: InputSection) -> np.ndarray:
    """Return the column as float64, NaN where there is no value."""
    found, is_bad = usable_numbers(rows, column, missing, text)
    if not is_bad.any():
        return found
    row = int(is_bad.argmax())
    value = rows.column(column)[row]
    if not isinstance(value, str) or _is_large(value):
        raise rows.bad_value(row, column, f"{value} is larger than {_LARGEST:.2g}", "Correct it.")
    raise rows.bad_value(row, column, f"{value[:80]!r} is not a number", _remedy(value, text, rows.prefix))


def _is_large(value: str) -> bool:
    with contextlib.suppress(ValueError):
        return abs(float(value)) > _LARGEST
    return False


def _remedy(value: str, text: InputSection, prefix: str) -> str:
    """Return what to do about a text that is not a number."""
    value = value.strip()
    if not prefix:
        return "Convert the column as for training."
    where = "" if prefix == "--" else " in the schema"
    decimal = setting(prefix, "decimal", ",")
    if text.decimal == "." and re.fullmatch(r"-?\d+,\d+", value):
        return f"Use {decimal}{where}."
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+\.\d+", value) and text.decimal == ".":
        return f"Use {setting(prefix, 'thousands', ',')}{where}."
    if re.fullmatch(r"-?\d{1,3}(\.\d{3})+(,\d+)?", value):
        also = f" and {decimal}" if text.decimal == "." else ""
        return f"If '.' separates thousands, use {setting(prefix, 'thousands', '.')}{also}{where}."
    if prefix == "--":
        return "Write it as in training."
    return "Correct it, or change the schema: name it in input.missing, or use another type of feature."


def usable_numbers(rows: RawRows, column: str, missing: list[str], text: InputSection) -> tuple[np.ndarray, np.ndarray]:
    """Return the column as float64, NaN where a value is missing or bad, and which values are bad."""
    values = rows.column(column)
    if values.dtype.is_numeric():
        found = values.cast(pl.Float64)
        is_filled = values.is_not_null()
    elif values.dtype in (pl.String, pl.Boolean):
        as_text = texts(rows, column, missing)
        plain = values if values.dtype == pl.Boolean else plain_numbers(as_text, text).str.strip_chars()
        found = plain.cast(pl.Float64, strict=False)
        is_filled = as_text.is_not_null()
    else:
        raise DataError(f"{rows.file}: column {column} holds {values.dtype}, not numbers. Use another type of feature.")
    array = found.fill_null(np.nan).to_numpy()
    is_bad = (found.is_null() & is_filled).to_numpy() | (np.abs(array) > _LARGEST)
    return (np.where(is_bad, np.nan, array) if is_bad.any() else array), is_bad


def plain_numbers(texts: pl.Series, text: InputSection) -> pl.Series:
    """Return numbers as texts like 1234.5, with null where they are not written as `text` says.

    With decimal commas, 1.234 becomes null: it may mean 1234.
    """
    if text.thousands:
        if text.thousands == " ":
            texts = texts.str.replace_all("[\u00a0\u202f]", " ")
        is_grouped = texts.str.contains(grouped(text.thousands, text.decimal)).fill_null(False)
        is_plain = ~texts.str.strip_chars().str.contains(text.thousands, literal=True)
        texts = texts.str.replace_all(text.thousands, "", literal=True).set(~(is_grouped | is_plain), None)
    elif text.decimal == ",":
        texts = texts.set(texts.str.contains(grouped(".", ",")).fill_null(False), None)
    return texts.str.replace(text.decimal, ".", literal=True) if text.decimal != "." else texts


def grouped(thousands: str, decimal: str) -> str:
    """Return a pattern of numbers with separated thousands, with or without decimals."""
    return rf"^\s*[-+]?\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+(?:{re.escape(decimal)}\d+)?\s*$"


def type_problems(log: ClicksSchema, file: str, types: dict[str, pl.DataType]) -> Iterator[str]:
    """Yield an error for each column of a file whose type does not fit its use in the schema."""
    no_rows = RawRows(pl.DataFrame(schema=types), file, range(0))

    def as_numbers(rows: RawRows, column: str, missing: list[str]) -> np.ndarray:
        return numbers(rows, column, missing, log.input)

    uses: list[tuple[str, Callable[[RawRows, str, list[str]], Any]]] = []
    for feature in log.feature:
        if isinstance(feature, NumericFeature | BucketFeature):
            uses.append((feature.column, as_numbers))
        elif isinstance(feature, CategoricalFeature):
            uses.append((feature.column, texts))
        elif isinstance(feature, CrossFeature):
            uses += [(column, single_texts) for column in feature.columns]
    uses += [(column, single_texts) for column in (log.split.column, log.split.group)]
    uses += [(log.label.column, lambda rows, *_: labels(rows, log)), (log.keep.weight, as_numbers)]
    uses += [(log.time.column, lambda rows, *_: times(rows, log))] if log.time else []
    for column, read in dict.fromkeys(uses):
        try:
            if column in types:
                read(no_rows, column, [])
        except DataError as error:
            yield str(error)


def weights(rows: RawRows, schema: ClicksSchema) -> np.ndarray:
    """Return the column of keep.weight as float32; every row must have a number that is not negative."""
    column = schema.keep.weight
    found = numbers(rows, column, schema.input.missing, schema.input)
    if (is_bad := ~(found >= 0)).any():
        row = int(is_bad.argmax())
        value = rows.column(column)[row]
        fact = "the weight is missing" if value is None else f"{value!r} is not a weight"
        raise rows.bad_value(row, column, fact, "Give a number from 0 to 3.4e38.")
    return found.astype(np.float32)


def times(rows: RawRows, schema: ClicksSchema) -> np.ndarray:
    """Return the column of [time] as microseconds since 1970."""
    assert schema.time
    return rows.per_value(schema.time.column, "times", lambda different: _times(different, schema))


def counted_times(rows: RawRows, schema: ClicksSchema) -> tuple[np.ndarray, np.ndarray]:
    """Return the times of these rows, and how often each occurs; a time may be there twice."""
    assert schema.time
    column = schema.time.column
    found = rows.table(column, "times", lambda different: _times(different, schema))
    if found is None or len(found) > len(rows):
        found = times(rows, schema)
        return found, np.ones(len(found), np.int64)
    counts = np.bincount(rows.codes[column][1], minlength=len(found))
    return found[counts > 0], counts[counts > 0]


def usable_times(rows: RawRows, schema: ClicksSchema) -> pl.Series:
    """Return what `times` does, with null where a time is missing or bad."""
    assert schema.time
    values = rows.column(schema.time.column)
    if isinstance(values.dtype, pl.Date | pl.Datetime):
        return values.cast(pl.Datetime("us")).dt.epoch("us")
    return parsed_times(single_texts(rows, schema.time.column, []), schema.time.format)


def _times(rows: RawRows, schema: ClicksSchema) -> np.ndarray:
    assert schema.time
    column, form = schema.time.column, schema.time.format
    parsed = usable_times(rows, schema)
    if parsed.null_count():
        values = rows.column(column)
        row = int(parsed.is_null().arg_true()[0])
        fact = f"{values[row]!r} does not have the format '{form}'" if values[row] else "the time is missing"
        iso = " ('iso' is like 2026-03-16 or 2026-03-16T08:05:30)" if form == "iso" else ""
        others = {"input.": ", or change time.format of the schema", "--": ", or name the format: --time-format"}
        raise rows.bad_value(row, column, fact, f"Correct it{others.get(rows.prefix, '')}{iso}.")
    return parsed.to_numpy()


def iso_time(text: str, key: str) -> int:
    """Return a date or time of the schema as microseconds since 1970."""
    parsed = parsed_times(pl.Series([text]), "iso")[0]
    if parsed is None:
        raise ConfigError(f"{key} is '{text}', which is no ISO date. Write it like 2014-10-29.")
    return int(parsed)


def labels(rows: RawRows, schema: ClicksSchema, may_be_missing: bool = False) -> np.ndarray:
    """Return 1 for a click, 0 for none, and DROPPED for rows that label.drop leaves out or without a label: int32."""

    def compute(different: RawRows) -> np.ndarray:
        return _labels(different, schema, may_be_missing)

    return rows.per_value(schema.label.column, f"labels {may_be_missing}", compute)


def _labels(rows: RawRows, schema: ClicksSchema, may_be_missing: bool) -> np.ndarray:
    section = schema.label
    if rows.column(section.column).dtype.is_float():
        given = rows.column(section.column).fill_nan(None).cast(pl.String)
    else:
        given = single_texts(rows, section.column, schema.input.missing)
    if given.null_count() and section.missing == "fail" and not may_be_missing:
        remedy = "Remove such rows, or leave them out (label.missing = 'drop')."
        raise rows.error(int(given.is_null().arg_true()[0]), section.column, "no label", remedy)
    is_missing = given.is_null().to_numpy()
    given = given.fill_null("")
    is_dropped = is_missing
    if isinstance(section.positive, str) or section.drop:
        as_numbers = numbers(rows, section.column, schema.input.missing, schema.input)
        is_dropped = is_missing | _meets(as_numbers, section.drop) if section.drop else is_missing
    if isinstance(section.positive, str):
        is_click = _meets(as_numbers, section.positive)
    elif section.positive:
        is_click = given.is_in(section.positive).to_numpy()
    else:
        lower = given.str.to_lowercase()
        is_click = lower.is_in(CLICK).to_numpy()
        is_bad = ~(is_dropped | lower.is_in(CLICK + NO_CLICK).to_numpy())
        if is_bad.any():
            row = int(is_bad.argmax())
            remedy = "Name the values that mean a click in label.positive of the schema."
            raise rows.error(row, section.column, f"label {given[row][:80]!r} is neither 0 nor 1", remedy)
    return np.where(is_dropped, DROPPED, is_click).astype(np.int32)


def _meets(values: np.ndarray, text: str) -> np.ndarray:
    compare, number = condition(text)
    return np.asarray(_COMPARE[compare](values, number))
