"""The flags that say how to read a text, which several commands have."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from pydantic import NonNegativeInt

from recmill.config.sections import Section, key
from recmill.datasets.inputs.times import FORMATS
from recmill.errors import ConfigError


class Reading(TypedDict, total=False):
    """`ReadingFlags` as keyword arguments, for type checkers."""

    columns: list[str] | None
    separator: str | None
    quotes: bool | None
    escape: bool | None
    encoding: str | None
    skip_lines: int | None


class NewRows(Reading, total=False):
    """`NewRowsFlags` as keyword arguments, for type checkers."""

    decimal: Literal[".", ","] | None
    thousands: Literal["", ".", ",", " ", "'"] | None
    time_format: str | None
    on_bad_value: Literal["fail", "missing"]


def given_flag(flags: Mapping[str, object]) -> str:
    """Return the first flag that was given, or nothing."""
    return next((f"--{name.replace('_', '-')}" for name, value in flags.items() if value not in (None, "fail")), "")


def check_no_flags(flags: Mapping[str, object]) -> None:
    """Raise an error if flags were given for a frame."""
    if flag := given_flag({**flags, "on_bad_value": None}):
        raise ConfigError(f"{flag} says how to read a file, and `input` is a frame. Remove it.")


class ReadingFlags(Section):
    """How to read a text. What is not given is found in its first lines."""

    columns: list[str] | None = key(None, "The names of a text's columns, if its first row does not name them.")
    separator: str | None = key(None, "Between the fields of a text.  [default: found in its first 1,000 lines]")
    quotes: bool | None = key(
        None,
        "Whether a field of a text may be in double quotes.  [default: likewise]",
        json_schema_extra={"flags": ["--quotes/--no-quotes"]},
    )
    escape: bool | None = key(
        None,
        'Whether a quote within a field of a text is written as \\" instead of two quotes.  [default: likewise]',
        json_schema_extra={"flags": ["--escape/--no-escape"]},
    )
    encoding: str | None = key(None, "The encoding of a text: a codec of Python, like latin-1.  [default: utf-8]")
    skip_lines: NonNegativeInt | None = key(None, "Skip this many lines at the beginning of a text.")

    def given(self) -> dict[str, Any]:
        """Return the flags that were given, by the names of their keys in [input] of a schema."""
        values = {name: getattr(self, name) for name in ReadingFlags.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class NewRowsFlags(ReadingFlags):
    """How new rows differ from the training log."""

    separator: str | None = key(
        None, "Between the fields of a text.  [default: as in training, or found in its first 1,000 lines]"
    )
    encoding: str | None = key(
        None, "The encoding of a text: a codec of Python, like latin-1.  [default: as in training, or utf-8]"
    )
    decimal: Literal[".", ","] | None = key(
        None, "Before the decimals of a number in a text.  [default: as in training]"
    )
    thousands: Literal["", ".", ",", " ", "'"] | None = key(
        None, "Between the thousands of a number in a text.  [default: as in training]"
    )
    time_format: str | None = key(None, f"{FORMATS}  [default: as in training]")
    on_bad_value: Literal["fail", "missing"] = key(
        "fail", "A number or time that cannot be used is an error, or is taken as missing and counted."
    )

    def given(self) -> dict[str, Any]:
        numbers = {"decimal": self.decimal, "thousands": self.thousands}
        return super().given() | {name: value for name, value in numbers.items() if value is not None}

    def check_not_for_values(self) -> None:
        """Raise if a flag about numbers and times is given, for rows that no schema describes."""
        for name in ("decimal", "thousands", "time_format", "on_bad_value"):
            if getattr(self, name) not in (None, "fail"):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for click logs that `prepare clicks` has prepared. Remove it.")
