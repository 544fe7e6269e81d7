"""Columns of files of any kind: text, JSON lines or Parquet."""

from collections.abc import Iterator, Sequence
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
    """Yield these columns of all rows, in order. Every row of a text is checked to have all fields; those that do not
    are errors, or skipped and counted in `bad_rows`.
    """
    match section.kind_of(file):
        case "parquet":
            return parquet.frames(file, columns)
        case "jsonl":
            return json_lines.frames(file, section, columns, prefix)
    fields = [delimited.Field(column, column, "any") for column in columns]
    return delimited.Table(file, section, bad_rows, prefix).rows(*fields)


def blocks(
    file: InputFile, section: InputSection, columns: list[str], plain: list[str]
) -> "Iterator[pl.DataFrame | Fields]":
    """Yield these columns of all rows, in order; of a text, those in `plain` as `Fields` up to its first quote."""
    if section.kind_of(file) != "text":
        return frames(file, section, columns)
    fields = [delimited.Field(column, column, "any") for column in columns]
    remedy = f"Fix the file, {delimited.SKIP}"
    return delimited.Table(file, section, prefix="input.", remedy=remedy).blocks(fields, plain)


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
) -> None:
    """Raise an error that names every column that a file lacks, or holds in another type than the first file.

    Of columns that are `copied` to one file, no types may differ; others may hold whole numbers or texts. `prefix`
    begins the settings that errors name, like input.separator or --separator.
    """
    columns = list(dict.fromkeys(columns))
    problems: list[str] = []
    num_advised = 0  # problems that name their own remedy
    first: dict[str, str] = {}
    for file in files:
        there = columns_of(file, section, prefix)
        types = types_of(file, section, prefix) if section.kind_of(file) != "text" else {}
        problems += [f"{file}: two columns '{column}'" for column in columns if there.count(column) > 1]
        if missing := [column for column in columns if column not in there]:
            advice = _wrong_header(file, section, missing, there, prefix)
            num_advised += bool(advice)
            problems.append(f"{file}: {advice or lacking(missing, there)}")
        for column in (column for column in columns if column in there):
            try:
                dtype = parquet.converted_type(str(file), column, types.get(column, pl.String()))
                kind = str(types.get(column, dtype)) if column in copied else _kind(dtype)
            except DataError as error:
                problems.append(str(error))
                continue
            if first.setdefault(column, kind) != kind:
                problems.append(f"{file}: column {column} holds {kind}, but {first[column]} in {files[0]}")
    if problems:
        last = [remedy] if num_advised < len(problems) else []
        raise DataError("\n".join([f"{fact}:", *(f"  {problem}" for problem in problems), *last]))


def _wrong_header(file: InputFile, section: InputSection, missing: list[str], there: list[str], prefix: str) -> str:
    """Return what is wrong with how a file is read, so that it has none of its columns, and the remedy; or nothing."""
    if not there:
        return "no rows. Get the file again."
    if section.kind_of(file) == "text" and (hint := delimited.Table(file, section, prefix=prefix).wrong_header(there)):
        return f"{_no_columns(missing)}{hint}"
    return ""


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
