"""Goodreads' interactions (goodreads_interactions.csv, 229 million) as histories, in the order of the file.

The file has no times: the next item is the next in the file. Filters, in this order: read, rating, repeated items,
items, users, k-core.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import polars as pl
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recmill.datasets.compressed import SUFFIXES, expansion, read_blocks
from recmill.datasets.histories import delimited, interactions
from recmill.datasets.histories.interactions import Filters, Plan, write
from recmill.errors import DataError
from recmill.observe.progress import Progress

__all__ = ["Options", "plan", "write"]

_BLOCK_BYTES = 1 << 24
_FILE = "goodreads_interactions.csv"
_FIELDS = (
    delimited.Field("user", "user_id", "whole"),
    delimited.Field("item", "book_id", "whole"),
    delimited.Field("is_read", "is_read", "whole"),
    delimited.Field("rating", "rating", "number"),
)


class Options(Filters):
    input: str = Field(description=f"{_FILE}, plain, .gz or .zst; or its directory.")
    min_rating: float | None = Field(None, description="Only interactions rated at least so. 0 means: not rated.")
    only_read: bool = Field(False, description="Only books that were read, not merely put on a shelf.")
    min_interactions: NonNegativeInt = Field(20, description="Only users with so many interactions; 3 at least.")
    max_interactions: PositiveInt = Field(200, description="Only users with at most so many interactions.")
    min_item_count: NonNegativeInt = Field(0, description="Only items with so many interactions.")
    titles: str | None = Field(None, description="goodreads_books.json.gz (or plain, .zst), for books' titles.")
    book_ids: str | None = Field(None, description="book_id_map.csv: which book of --titles an id of --input is.")

    @model_validator(mode="after")
    def fit_together(self) -> "Options":
        if (self.titles is None) != (self.book_ids is None):
            raise ValueError("--titles and --book-ids go together: one of them is missing.")
        if self.max_interactions < max(self.min_interactions, interactions.MIN_HISTORY):
            least = max(self.min_interactions, interactions.MIN_HISTORY)
            raise ValueError(f"--max-interactions {self.max_interactions}: give {least} or more, as no user is left.")
        return self


def plan(options: Options) -> Plan:
    path = Path(options.input)
    if path.is_dir():
        path = next((p for suffix in SUFFIXES if (p := path / f"{_FILE}{suffix}").is_file()), path / _FILE)
    if not path.is_file():
        raise DataError(f"{path}: no such file. --input is {_FILE} or its directory.")
    name_files = [Path(file) for file in (options.titles, options.book_ids) if file]
    for file in name_files:
        if not file.is_file():
            raise DataError(f"{file}: no such file. Get it: recmill download goodreads --variant books (or book-ids).")
    only = {"--only-read": pl.col("is_read") == 1} if options.only_read else {}
    return Plan(
        "goodreads",
        options,
        [path, *name_files],
        lambda: delimited.Table(path, ",").rows(*_FIELDS),
        options.min_interactions,
        options.max_interactions,
        only={**only, **interactions.at_least_rated(options)},
        titles=(lambda: _titles(*name_files)) if name_files else None,
        has_time=False,
    )


def _titles(books: Path, book_ids: Path) -> pl.DataFrame:
    """original_id, title; for the ids of the interactions, which are not those of the books."""
    fields = delimited.Field("original_id", "book_id_csv", "whole"), delimited.Field("book", "book_id", "whole")
    ids = pl.concat(delimited.Table(book_ids, ",").rows(*fields)).cast(pl.String)
    return pl.concat(_books(books)).join(ids, on="book").select("original_id", "title")


def _books(path: Path) -> Iterator[pl.DataFrame]:
    """book, title, from JSON lines; books without a title are left out."""
    rest, lines = b"", 0
    with Progress(f"reading {path.name}", int(path.stat().st_size * expansion(path)), "bytes") as progress:
        for block in chain(read_blocks(path, _BLOCK_BYTES), [b"\n"]):
            text, _, rest = (rest + block).rpartition(b"\n")
            if not text.strip():
                continue
            try:
                frame = pl.read_ndjson(text, schema={"book_id": pl.String, "title": pl.String})
            except pl.exceptions.PolarsError as error:
                raise DataError(f"{path}: after line {lines:,}: {error}. Get the file again.") from None
            lines += text.count(b"\n") + 1
            yield frame.filter(pl.col("title") != "").rename({"book_id": "book"})
            progress.advance(len(block))
