"""Texts with one line per user: `user item item item ...`, or only items, for sessions without a user."""

from collections.abc import Iterator

import polars as pl

from recmill.datasets.compressed import InputFile, expansion
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.text import MAX_ROW_BYTES, LongRow, bad_byte, row_blocks
from recmill.errors import DataError
from recmill.observe.progress import Progress


def rows(file: InputFile, section: InputSection, first_user: int | None = None) -> Iterator[pl.DataFrame]:
    """Yield columns user, item, one row per item. With `first_user`, lines hold only items: users are numbered."""
    done = 0
    with Progress(f"reading {file.name}", int(file.stat().st_size * expansion(file)), "bytes") as progress:
        try:
            for text in row_blocks(file, section, "--", quotes=False):
                try:
                    lines = pl.Series("line", text.decode().split("\n")[:-1]).str.strip_suffix("\r")
                except UnicodeDecodeError:
                    raise DataError(f"{file}: {bad_byte(file, '--')}") from None
                fields = lines.str.strip_suffix(section.separator).str.split(section.separator)
                frame = pl.DataFrame({"item": fields}).with_row_index("line", done).cast({"line": pl.Int64})
                _check(file, frame, 1 if first_user is not None else 2)
                if first_user is None:
                    user, items = pl.col("item").list.first(), pl.col("item").list.slice(1)
                else:
                    user, items = first_user + pl.col("line"), pl.col("item")
                yield frame.select(user.alias("user"), items).explode("item")
                done += len(lines)
                progress.advance(len(text))
        except LongRow:
            raise DataError(f"{file}: row {done + 1:,} has more than {MAX_ROW_BYTES:,} bytes. Is it a text?") from None
    if not done:
        raise DataError(f"{file}: no rows. Get the file again.")


def _check(file: InputFile, frame: pl.DataFrame, least: int) -> None:
    """Raise an error for the first line that has too few fields, an empty one, or a NUL byte."""
    is_empty = pl.element().eq("") | pl.element().str.contains("\0", literal=True)
    is_bad = (frame["item"].list.len() < least) | frame["item"].list.eval(is_empty).list.any()
    if is_bad.any():
        row = int(is_bad.arg_true()[0])
        fields = frame["item"][row].to_list()
        shown = " ".join(fields)[:80]
        fact = f"{len(fields)} fields, of which one is empty" if len(fields) >= least else "a user without items"
        remedy = "Fix the line, or name another separator (--separator)."
        raise DataError(f"{file}: row {int(frame['line'][row]) + 1:,}: {fact}: {shown!r}. {remedy}")
