"""Columns of files of any kind: text, JSON lines or Parquet."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import polars as pl

from recmill.datasets.compressed import InputFile, forecast_rows
from recmill.datasets.inputs import delimited, json_lines, parquet
from recmill.datasets.inputs.section import InputSection
from recmill.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from recmill.datasets.inputs.fields import Fields


def types_of(file: InputFile, section: InputSection, prefix: str = "input.") -> dict[str, pl.DataType]:
    """Return the columns of a file and their types; those of a text are texts."""
    match section.kind_of(file):
        case "parquet":
            return parquet.types_of(file)
        case "jsonl":
            return json_lines.types_of(file, section, prefix)
    return dict.fromkeys(columns_of(file, section, prefix), pl.String())


def columns_of(file: InputFile, section: InputSection, prefix: str = "input.") -> list[str]:
    """Return the names of the columns. In a text, a name may occur twice."""
    if section.kind_of(file) != "text":
        return list(types_of(file, section, prefix))
    return delimited.Table(file, section, prefix=prefix).header()


def frames(
    file: InputFile,
    section: InputSection,
    columns: list[str],
    prefix: str = "input.",
    bad_rows: delimited.BadRows | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield these columns of all rows, in order.

    A row of a text that does not have all fields is an error, or is skipped and counted in `bad_rows`.
    """
    match section.kind_of(file):
        case "parquet":
            return parquet.frames(file, columns)
        case "jsonl":
            return json_lines.frames(file, section, columns, prefix)
    fields = [delimited.Field(column, column, "any") for column in columns]
    return delimited.Table(file, section, bad_rows, prefix).rows(*fields)


def blocks(
    file: InputFile, section: InputSection, columns: list[str], plain: list[str], each: "delimited.Each" = map
) -> "Iterator[pl.DataFrame | Fields]":
    """Yield these columns of all rows, in order; of a text, those in `plain` as `Fields` up to its first quote.

    `each` applies a function to each block of a text; it may do so ahead, in threads.
    """
    if section.kind_of(file) != "text":
        return frames(file, section, columns)
    fields = [delimited.Field(column, column, "any") for column in columns]
    return delimited.Table(file, section, prefix="input.", otherwise=delimited.SKIP).blocks(fields, plain, each)


def num_rows(file: InputFile, section: InputSection) -> int:
    """Return the number of rows; of a text it is an estimate."""
    return parquet.rows_of(file) if section.kind_of(file) == "parquet" else forecast_rows(file)


def check_columns(
    files: Sequence[InputFile],
    section: InputSection,
    columns: list[str],
    fact: str = "the files do not fit the schema",
    remedy: str = "Correct the schema, or the files.",
    copied: Sequence[str] = (),
    prefix: str = "input.",
    type_problems: Callable[[str, dict[str, pl.DataType]], Iterable[str]] = lambda file, types: (),
) -> None:
    """Raise an error that names every column that a file lacks, or holds in another type than the first file.

    Of columns that are `copied` to one file, no types may differ; others may hold whole numbers or texts. `prefix`
    begins the settings that errors name, like input.separator or --separator. `type_problems` returns what is wrong
    with the types of a file's columns, given its name and these types.
    """
    columns = list(dict.fromkeys(columns))
    problems: list[str] = []
    num_advised = 0  # problems that name their own remedy
    first: dict[str, str] = {}
    for file in files:
        there = columns_of(file, section, prefix)
        if not there:
            problems.append(f"{file}: no rows. Get the file again.")
            num_advised += 1
            continue
        types = types_of(file, section, prefix) if section.kind_of(file) != "text" else {}
        problems += [f"{file}: two columns '{column}'" for column in columns if there.count(column) > 1]
        if missing := [column for column in columns if column not in there]:
            hint = wrong_header(file, section, there, columns, prefix)
            num_advised += bool(hint)
            problems.append(f"{file}: {_no_columns(missing)}{hint}" if hint else f"{file}: {lacking(missing, there)}")
        usable: dict[str, pl.DataType] = {}
        for column in (column for column in columns if column in there):
            try:
                dtype = parquet.converted_type(str(file), column, types.get(column, pl.String()))
                kind = str(types.get(column, dtype)) if column in copied else _kind(dtype)
            except DataError as error:
                problems.append(str(error))
                continue
            if first.setdefault(column, kind) == kind:
                usable[column] = dtype
            else:
                problems.append(f"{file}: column {column} holds {kind}, but {first[column]} in {files[0]}")
        problems += type_problems(str(file), usable)
    if problems:
        last = [remedy] if num_advised < len(problems) else []
        raise DataError("\n".join([f"{fact}:", *(f"  {problem}" for problem in problems), *last]))


def wrong_header(file: InputFile, section: InputSection, there: list[str], wanted: Sequence[str], prefix: str) -> str:
    """Return why `there` cannot be names of columns, as `Table.wrong_header` does; empty if the file is not a text."""
    is_text = section.kind_of(file) == "text"
    return delimited.Table(file, section, prefix=prefix).wrong_header(there, wanted) if is_text else ""


def _no_columns(missing: list[str]) -> str:
    return f"no column{'s' if len(missing) > 1 else ''} " + ", ".join(f"'{column}'" for column in missing)


def lacking(missing: list[str], there: list[str]) -> str:
    """Name all columns that are missing and those that are there, with the one that each may have meant."""
    near = {column: did_you_mean(column, there).strip() for column in missing}
    hints = [f"For '{c}': {text}" if len(missing) > 1 else text for c, text in near.items() if text]
    return f"{_no_columns(missing)}; it has {', '.join(there)}{'. ' if hints else ''}{' '.join(hints)}"


def _kind(dtype: pl.DataType) -> str:
    """Return a type as far as files may not differ in it: texts and whole numbers are the same values."""
    if isinstance(dtype, pl.List):
        return "lists"
    return "times" if dtype.is_temporal() else "values"
