"""MovieLens ratings as histories: ml-100k, ml-1m, ml-10m, ml-20m, ml-25m and similar, recognized by their files.

Filters apply in this order: rating, repeated items, items, users, k-core. The defaults give the data of the BERT4Rec
paper.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from pydantic import Field, NonNegativeInt

from recmill.datasets.compressed import SUFFIXES, forecast_rows, read_blocks
from recmill.datasets.histories import delimited
from recmill.datasets.histories.interactions import Filters, InteractionsPlan, rating_condition, write
from recmill.errors import DataError

__all__ = ["Options", "plan", "write"]


class Options(Filters):
    input: str = Field(description="Directory with ratings.dat, u.data or ratings.csv, and the file of titles.")
    min_user_count: NonNegativeInt = Field(
        5, description="Keep only users with at least this many interactions; never fewer than 3."
    )


@dataclass(frozen=True)
class _Edition:
    ratings: str
    separator: str
    columns: list[str] | None
    titles: str
    title_separator: str


_NAMES = ["userId", "movieId", "rating", "timestamp"]
_FIELDS = (
    delimited.Field("user", "userId", "integer"),
    delimited.Field("item", "movieId", "integer"),
    delimited.Field("rating", "rating", "number"),
    delimited.Field("time", "timestamp", "integer"),
)
_EDITIONS = (
    _Edition("ratings.dat", "::", _NAMES, "movies.dat", "::"),  # ml-1m, ml-10m
    _Edition("u.data", "\t", _NAMES, "u.item", "|"),  # ml-100k
    _Edition("ratings.csv", ",", None, "movies.csv", ","),  # ml-20m, ml-25m, ml-latest
)


def plan(options: Options) -> InteractionsPlan:
    directory = Path(options.input)
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory. --input is where the unpacked MovieLens files are.")
    found = [(edition, path) for edition in _EDITIONS if (path := _find(directory, edition.ratings))]
    if len(found) != 1:
        names = ", ".join(edition.ratings for edition in _EDITIONS)
        there = ", ".join(path.name for _, path in found) or ", ".join(sorted(p.name for p in directory.iterdir())[:5])
        raise DataError(f"{directory}: expected one of {names}; it holds {there or 'nothing'}.")
    edition, ratings = found[0]
    titles = _find(directory, edition.titles)
    if not titles:
        raise DataError(
            f"{directory}: {ratings.name} is there, but not {edition.titles}, the titles. Both are in the same archive."
        )
    table = delimited.Table(ratings, edition.separator, edition.columns)
    return InteractionsPlan(
        "movielens",
        options,
        [ratings, titles],
        forecast_rows(ratings),
        lambda: table.rows(*_FIELDS),
        options.min_user_count,
        conditions=rating_condition(options),
        titles=lambda: _titles(titles, edition.title_separator),
    )


def _find(directory: Path, name: str) -> Path | None:
    return next((path for suffix in SUFFIXES if (path := directory / f"{name}{suffix}").is_file()), None)


def _titles(path: Path, separator: str) -> pl.DataFrame:
    """Return original_id, title. Older editions are in latin-1, which is hardly ever valid UTF-8 by accident."""
    content = b"".join(read_blocks(path, 1 << 20))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    lines = text.splitlines()
    rows = list(csv.reader(lines)) if separator == "," else [line.split(separator) for line in lines]
    titles = {}
    for number, row in enumerate(rows, 1):
        if len(row) < 3 and row not in ([], [""]):
            raise DataError(f"{path}: line {number}: expected id, title and genres, got {row}. Get the file again.")
        if row and row[0]:
            titles[row[0]] = row[1] if separator != "::" else separator.join(row[1:-1])
    return pl.DataFrame(list(titles.items()), schema={"original_id": pl.String, "title": pl.String}, orient="row")
