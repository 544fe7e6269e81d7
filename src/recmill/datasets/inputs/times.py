"""Texts as times, in the formats of `time.format` and --time-format."""

import contextlib
import re
from collections.abc import Iterable

import polars as pl

FORMATS = "'iso' (2026-03-16T08:05:30), 's', 'ms' or 'us' since 1970, or a format like '%d.%m.%Y'."
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}  # in microseconds
_PARTS_OF_DAYS = ("%H", "%I", "%M", "%S", "%T", "%R", "%X", "%c", "%r", "%s", "%+")
_ISO = r"^(?:\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:Z|[+-]\d\d(?::?\d\d)?)?)?|\d{8}T\d{6}Z?)$"
_ZONE = r"[T ].*[Z+-]"


def is_format(text: str) -> bool:
    return text == "iso" or text in _UNITS or "%" in text


def parsed_times(values: pl.Series, form: str) -> pl.Series:
    """Return texts as microseconds since 1970, null where they do not have the format."""
    if form in _UNITS:
        texts = values.str.strip_chars()
        whole = texts.cast(pl.Int64, strict=False) * _UNITS[form]
        if whole.null_count() == values.null_count():
            return whole
        decimals = texts.cast(pl.Float64, strict=False) * _UNITS[form]
        return whole.fill_null(decimals.round().cast(pl.Int64, strict=False))
    if form == "iso":
        return _iso(values)
    if "%H" in form and "%M" not in form:  # a parser of hours wants minutes, too
        values, form = values + " 00", f"{form} %M"
    dtype = pl.Datetime("us") if any(part in form for part in _PARTS_OF_DAYS) else pl.Date()
    return values.str.strptime(dtype, form, strict=False).cast(pl.Datetime("us")).dt.epoch("us")


def _iso(values: pl.Series) -> pl.Series:
    """Return ISO 8601 texts as microseconds since 1970, each row by itself; without a zone, they are UTC."""
    is_iso = values.str.contains(_ISO).fill_null(False)
    has_zone = values.str.contains(_ZONE).fill_null(False)
    found = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    for chosen in (is_iso & ~has_zone, is_iso & has_zone):  # Polars takes the one or the other from the first row
        if chosen.any():
            same = values if chosen.all() else values.set(~chosen, None)
            with contextlib.suppress(pl.exceptions.ComputeError):  # the first one is no date, like 2026-02-30
                found = found.zip_with(~chosen, same.str.to_datetime(strict=False, time_unit="us").dt.epoch("us"))
    return found


def likely_format(values: Iterable[str]) -> str:
    """Return the format of the first value that is a time; empty if that is a whole number, or no value is a time."""
    for value in map(str.strip, values):
        if re.fullmatch(r"[+-]?\d+", value):
            return ""
        if re.fullmatch(r"[+-]?\d+\.\d+", value):
            return "s"
        if re.fullmatch(_ISO, value):
            return "iso"
    return ""
