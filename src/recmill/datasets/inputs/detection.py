"""Find out how the fields of a text are separated, from its first lines."""

import csv
from collections import Counter
from itertools import product
from typing import Any

from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.delimited import SEPARATORS, row_with_stray_quote
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.text import LongRow, row_blocks
from recmill.errors import ConfigError, DataError

_LINES = 1000
_NAMED = {".csv": ",", ".tsv": "\t"}  # for a text of one column, or of none
_MOST = 0.9  # of the lines have the same number of fields, if the separator is right


def described(
    file: InputFile,
    separator: str | None = None,
    quotes: bool | None = None,
    prefix: str = "--",
    escape: bool | None = None,
    **keys: Any,
) -> InputSection:
    """Return how to read a file, from the flags that were given; what was not given is found in its first lines."""
    given = {name: value for name, value in {"separator": separator, "escape": escape}.items() if value is not None}
    section = changed(InputSection(), {**keys, **given}, prefix)
    if section.kind_of(file) != "text":
        return section
    lines = _first_lines(file, section, prefix)
    if separator is None:
        section = _with_separator(file, section, lines, prefix)
    has_quotes = quotes is not False and not _only_within(lines, section.separator)
    if escape is None:
        escape = has_quotes and _has_backslashes(lines, section.separator)
    return section.model_copy(update={"quotes": has_quotes, "escape": escape})


def changed(section: InputSection, flags: dict[str, Any], prefix: str = "--") -> InputSection:
    """Return the section with the values of these flags."""
    section = section.model_copy(update=flags)
    if problems := section.contradictions():
        raise ConfigError("\n".join(problem.replace("input.", prefix) for problem in problems))
    return section


def _only_within(lines: list[str], separator: str) -> bool:
    """Return whether there are quotes, but only within fields: then they are ordinary characters."""
    quoted = [line for line in lines if '"' in line]
    return bool(quoted) and not any(line.startswith('"') or f'{separator}"' in line for line in quoted)


def _has_backslashes(lines: list[str], separator: str) -> bool:
    """Return whether quotes in fields are written as \\": only without them can the lines be divided into fields."""
    if len(separator) > 1 or not any('\\"' in line for line in lines):
        return False
    without = (line.replace("\\\\", "").replace('\\"', "") + "\n" for line in lines)
    given = (f"{line}\n" for line in lines)
    return row_with_stray_quote(given, separator) > 0 and not row_with_stray_quote(without, separator)


def _with_separator(file: InputFile, section: InputSection, lines: list[str], prefix: str) -> InputSection:
    """Add the separator that divides the first lines into equal numbers of fields; if several do, into the most.

    A space is tried last, because texts have spaces, too. Without tabs or commas, the name of the file decides.
    """
    if not lines:
        raise DataError(f"{file}: no rows. Get the file again.")
    for candidates in (SEPARATORS[:-1], SEPARATORS[-1:]):
        found: dict[tuple[str, bool], tuple[bool, int]] = {}
        for separator, quotes in product(candidates, (True, False)):
            rows = _divided(lines, separator, quotes)
            fields, times = Counter(map(len, rows)).most_common(1)[0] if rows else (1, 0)
            is_joined = quotes and len(rows) < _MOST * len(lines)  # a quote that is no quote takes many lines
            if fields > 1 and times >= _MOST * len(rows) and not is_joined:
                found[separator, quotes] = (
                    len(rows[0]) == fields,
                    fields,
                )  # a comma in quotes may be in all but the header
        if found:
            separator, _ = max(found, key=lambda one: found[one])
            return section.model_copy(update={"separator": separator})
    if named := next((s for suffix, s in _NAMED.items() if suffix in file.name), None):
        return section.model_copy(update={"separator": named})
    raise DataError(
        f"{file}: none of {', '.join(map(repr, SEPARATORS))} divides its first lines into the same number of fields. "
        f"Name the separator ({prefix}separator), or correct the file."
    )


def _first_lines(file: InputFile, section: InputSection, prefix: str) -> list[str]:
    blocks = row_blocks(file, section, prefix, quotes=False)
    try:
        text = next(blocks, b"")[: 1 << 20]
    except LongRow:
        raise DataError(f"{file}: its first line is very long. Is it a text with line ends?") from None
    lines = text.decode("utf-8", "replace").split("\n")
    return [line for line in lines[:-1] if line.strip()][:_LINES]


def _divided(lines: list[str], separator: str, quotes: bool) -> list[list[str]]:
    if len(separator) > 1:
        return [line.split(separator) for line in lines]
    quoting: Any = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    return list(csv.reader((f"{line}\n" for line in lines), delimiter=separator, quoting=quoting))
