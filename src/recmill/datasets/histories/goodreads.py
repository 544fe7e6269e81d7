"""Goodreads' interactions (goodreads_interactions.csv, 229 million) as histories, in the order of the file.

The file has no times: the next item is the next row of the user. Filters apply in this order: read, rating, repeated
items, items, users, k-core.
"""

from pathlib import Path

import polars as pl
from pydantic import NonNegativeInt, PositiveInt, model_validator

from recmill.config.sections import key
from recmill.datasets.compressed import file_of, forecast_rows
from recmill.datasets.histories.interactions import Filters, InteractionsPlan, write
from recmill.datasets.histories.writing import MIN_HISTORY
from recmill.datasets.inputs import delimited, json_lines
from recmill.datasets.inputs.section import InputSection
from recmill.errors import DataError, did_you_mean_path

__all__ = ["Options", "plan", "write"]

_FILE = "goodreads_interactions.csv"
_FIELDS = (
    delimited.Field("user", "user_id", "integer"),
    delimited.Field("item", "book_id", "integer"),
    delimited.Field("is_read", "is_read", "integer"),
    delimited.Field("rating", "rating", "number"),
)


class Options(Filters):
    input: str = key(..., f"{_FILE}, plain, .gz or .zst; or its directory.")
    min_rating: float | None = key(None, "Keep only interactions with at least this rating; 0 means not rated.")
    only_read: bool = key(False, "Keep only books that were read, not those just put on a shelf.")
    min_interactions: NonNegativeInt = key(20, "Keep only users with at least this many; never fewer than 3.")
    max_interactions: PositiveInt = key(200, "Keep only users with at most this many interactions.")
    min_item_count: NonNegativeInt = key(0, "Keep only items with at least this many interactions.")
    titles: str | None = key(None, "goodreads_books.json.gz (or plain, .zst), for the books' titles.")
    book_ids: str | None = key(None, "book_id_map.csv, which maps ids of --input to ids of --titles.")

    @model_validator(mode="after")
    def check_combinations(self) -> "Options":
        if (self.titles is None) != (self.book_ids is None):
            given, other = ("titles", "book-ids") if self.titles else ("book-ids", "titles")
            raise ValueError(f"--{given} needs --{other}, which is missing.")
        least = max(self.min_interactions, MIN_HISTORY)
        if self.max_interactions < least:
            raise ValueError(f"--max-interactions {self.max_interactions}: give {least} or more, or no user is left.")
        return self


def plan(options: Options) -> InteractionsPlan:
    path = Path(options.input)
    if path.is_dir():
        path = file_of(path, _FILE) or path / _FILE
    if not path.is_file():
        raise DataError(f"{path}: no such file. {did_you_mean_path(path)}--input is {_FILE} or its directory.")
    name_files = [Path(file) for file in (options.titles, options.book_ids) if file]
    for file in name_files:
        if not file.is_file():
            raise DataError(f"{file}: no such file. Get it: recmill download goodreads --variant books (or book-ids).")
    return InteractionsPlan(
        "goodreads",
        options,
        [path, *name_files],
        forecast_rows(path),
        lambda: delimited.Table(path, InputSection()).rows(*_FIELDS),
        options.min_interactions,
        options.max_interactions,
        conditions={"--only-read": pl.col("is_read") == 1} if options.only_read else {},
        titles=(lambda: _titles(*name_files)) if name_files else None,
        has_time=False,
    )


def _titles(books: Path, book_ids: Path) -> pl.DataFrame:
    """Return original_id, title for the ids of the interactions, which are not the ids of the books."""
    fields = delimited.Field("original_id", "book_id_csv", "integer"), delimited.Field("book", "book_id", "integer")
    ids = pl.concat(delimited.Table(book_ids, InputSection()).rows(*fields)).cast(pl.String)
    frames = json_lines.frames(books, InputSection(kind="jsonl"), ["book_id", "title"], "--")
    titled = pl.concat(frame.filter(pl.col("title") != "") for frame in frames)
    return titled.join(ids, left_on="book_id", right_on="book").select("original_id", "title")
