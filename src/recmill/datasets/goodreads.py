"""Goodreads' interactions (goodreads_interactions.csv, 229 million) as histories, in the order of the file.

The file has no times: the next item is the next in the file. Filters, in this order: read, rating, repeated items,
items, users, k-core.
"""

from pathlib import Path

import polars as pl
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recmill.datasets import delimited, interactions
from recmill.datasets.compressed import SUFFIXES
from recmill.datasets.interactions import Filters, Plan, write
from recmill.errors import DataError

__all__ = ["Options", "plan", "write"]

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

    @model_validator(mode="after")
    def fit_together(self) -> "Options":
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
    only = {"--only-read": pl.col("is_read") == 1} if options.only_read else {}
    return Plan(
        "goodreads",
        options,
        [path],
        lambda: delimited.Table(path, ",").rows(*_FIELDS),
        options.min_interactions,
        options.max_interactions,
        only={**only, **interactions.at_least_rated(options)},
    )
