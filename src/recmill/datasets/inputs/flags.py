"""The flags that say how to read a text, which several commands have."""

from typing import Any, TypedDict

from pydantic import NonNegativeInt

from recmill.config.sections import Section, key
from recmill.errors import ConfigError


class Reading(TypedDict, total=False):
    """`ReadingFlags` as keyword arguments, for type checkers."""

    columns: list[str] | None
    separator: str | None
    quotes: bool | None
    escape: bool | None
    encoding: str | None
    skip_lines: int | None


def given_flag(reading: Reading) -> str:
    """Return the first flag that was given, or nothing."""
    return next((f"--{name.replace('_', '-')}" for name, value in reading.items() if value is not None), "")


def check_no_flags(reading: Reading) -> None:
    """Raise an error if flags were given for a frame."""
    if flag := given_flag(reading):
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
    """How to read new rows. What is not given is as in training, if the run knows it."""

    separator: str | None = key(
        None, "Between the fields of a text.  [default: as in training, or found in its first 1,000 lines]"
    )
    encoding: str | None = key(
        None, "The encoding of a text: a codec of Python, like latin-1.  [default: as in training, or utf-8]"
    )
