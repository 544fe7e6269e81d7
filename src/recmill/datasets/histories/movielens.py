"""MovieLens ratings as histories: ml-100k, ml-1m, ml-10m, ml-20m, ml-25m and similar, recognized by their files.

Filters apply in this order: rating, repeated items, items, users, k-core. The defaults give the data of the BERT4Rec
paper.
"""

import csv
import zipfile
from pathlib import Path

import polars as pl
from pydantic import NonNegativeInt

from recmill.config.sections import key
from recmill.datasets.compressed import file_of, forecast_rows, read_blocks
from recmill.datasets.histories.interactions import Filters, InteractionsPlan, write
from recmill.datasets.inputs import delimited
from recmill.datasets.inputs.section import InputSection
from recmill.errors import DataError, did_you_mean_path

__all__ = ["Options", "plan", "write"]


class Options(Filters):
    input: str = key(..., "Directory with ratings.dat, u.data or ratings.csv, and the file of titles.")
    min_user_count: NonNegativeInt = key(5, "Keep only users with at least this many interactions; never fewer than 3.")


_FIELDS = (
    delimited.Field("user", "userId", "integer"),
    delimited.Field("item", "movieId", "integer"),
    delimited.Field("rating", "rating", "number"),
    delimited.Field("time", "timestamp", "integer"),
)
_EDITIONS = {  # file of ratings: its separator, file of titles, its separator
    "ratings.dat": ("::", "movies.dat", "::"),  # ml-1m, ml-10m
    "u.data": ("\t", "u.item", "|"),  # ml-100k
    "ratings.csv": (",", "movies.csv", ","),  # ml-20m, ml-25m, ml-latest: the only ones with a header
}


def plan(options: Options) -> InteractionsPlan:
    directory = Path(options.input)
    if directory.is_file():
        remedy = "Unpack it (unzip), and give the directory" if zipfile.is_zipfile(directory) else "Give its directory"
        raise DataError(f"{directory}: a file, where --input is the directory of the MovieLens files. {remedy}.")
    if not directory.is_dir():
        near = did_you_mean_path(directory)
        raise DataError(f"{directory}: no such directory. {near}--input is where the unpacked MovieLens files are.")
    found = {name: path for name in _EDITIONS if (path := file_of(directory, name))}
    if len(found) != 1:
        there = [path.name for path in found.values()] or sorted(path.name for path in directory.iterdir())[:5]
        holds = ", ".join(there) or "nothing"
        raise DataError(f"{directory}: expected one of {', '.join(_EDITIONS)}; it holds {holds}.")
    name, ratings = found.popitem()
    separator, titles_name, title_separator = _EDITIONS[name]
    titles = file_of(directory, titles_name)
    if not titles:
        raise DataError(f"{directory}: {ratings.name} is there, but not {titles_name}. Both are in one archive.")
    columns = [] if separator == "," else [field.column for field in _FIELDS]
    table = delimited.Table(ratings, InputSection(separator=separator, columns=columns, quotes=separator == ","))
    return InteractionsPlan(
        "movielens",
        options,
        [ratings, titles],
        forecast_rows(ratings),
        lambda: table.rows(*_FIELDS),
        options.min_user_count,
        titles=lambda: _titles(titles, title_separator),
    )


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
            titles[row[0]] = row[1] if separator != "::" else "::".join(row[1:-1])  # a title may contain it
    return pl.DataFrame(list(titles.items()), schema={"original_id": pl.String, "title": pl.String}, orient="row")
