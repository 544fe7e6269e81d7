"""MovieLens ratings as histories: ml-100k, ml-1m, ml-10m, ml-20m, ml-25m and the like, told apart by their files.

Filters, in this order: rating, repeated items, items, users, k-core. The defaults give the data of the BERT4Rec paper.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from pydantic import Field, NonNegativeInt

from recmill.datasets.compressed import SUFFIXES, read_blocks
from recmill.datasets.histories import delimited, interactions
from recmill.datasets.histories.interactions import Filters, Plan, write
from recmill.errors import DataError

__all__ = ["Options", "plan", "write"]


class Options(Filters):
    input: str = Field(description="Directory of the unpacked files: ratings.dat, u.data or ratings.csv, and titles.")
    min_user_count: NonNegativeInt = Field(5, description="Only users with so many interactions; 3 at least.")


@dataclass(frozen=True)
class _Edition:
    ratings: str
    separator: str
    columns: list[str] | None
    titles: str
    title_separator: str


_NAMES = ["userId", "movieId", "rating", "timestamp"]
_FIELDS = (
    delimited.Field("user", "userId", "whole"),
    delimited.Field("item", "movieId", "whole"),
    delimited.Field("rating", "rating", "number"),
    delimited.Field("time", "timestamp", "whole"),
)
_EDITIONS = (
    _Edition("ratings.dat", "::", _NAMES, "movies.dat", "::"),  # ml-1m, ml-10m
    _Edition("u.data", "\t", _NAMES, "u.item", "|"),  # ml-100k
    _Edition("ratings.csv", ",", None, "movies.csv", ","),  # ml-20m, ml-25m, ml-latest
)


def plan(options: Options) -> Plan:
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
        raise DataError(f"{directory}: {ratings.name}, but no {edition.titles}, the titles. It is in the same archive.")
    table = delimited.Table(ratings, edition.separator, edition.columns)
    return Plan(
        "movielens",
        options,
        [ratings, titles],
        lambda: table.rows(*_FIELDS),
        options.min_user_count,
        only=interactions.at_least_rated(options),
        titles=lambda: _titles(titles, edition.title_separator),
    )


def _find(directory: Path, name: str) -> Path | None:
    return next((path for suffix in SUFFIXES if (path := directory / f"{name}{suffix}").is_file()), None)


def _titles(path: Path, separator: str) -> pl.DataFrame:
    """original_id, title. Older editions are in latin-1, which is hardly ever good UTF-8 by accident."""
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
            raise DataError(f"{path}: line {number}: expected a movie, its title and more, got {row}. Get it again.")
        if row and row[0]:
            titles[row[0]] = row[1] if separator != "::" else separator.join(row[1:-1])
    return pl.DataFrame(list(titles.items()), schema={"original_id": pl.String, "title": pl.String}, orient="row")
