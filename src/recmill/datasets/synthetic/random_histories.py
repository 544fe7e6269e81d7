"""Plain random histories: uniform (user, item) pairs in order of time. For speed runs and trials."""

from pathlib import Path

import numpy as np
import polars as pl
from pydantic import Field, PositiveInt

from recmill.config.sections import Section
from recmill.datasets.histories.writing import MIN_HISTORY, seal_histories
from recmill.datasets.writing import Progress
from recmill.errors import ConfigError
from recmill.schema import Description


class Options(Section):
    random_user_count: PositiveInt = Field(10, lt=2**31, description="Users to draw from.")
    random_item_count: PositiveInt = Field(30, lt=2**31 - 2, description="Items to draw from.")
    random_size: PositiveInt = Field(300, lt=2**40, description="Interactions to draw; the time of each is its place.")
    seed: int = Field(1, ge=0, lt=2**63, description="Same seed, same bytes.")


def write(directory: Path, options: Options, progress: Progress) -> Description:
    generator = np.random.default_rng(options.seed)
    drawn = pl.DataFrame(
        {
            "user": generator.integers(0, options.random_user_count, options.random_size),
            "item": generator.integers(0, options.random_item_count, options.random_size),
            "time": np.arange(options.random_size),
        }
    )
    kept = drawn.filter(pl.len().over("user") >= MIN_HISTORY)
    if kept.is_empty():
        raise ConfigError(
            f"--random-size {options.random_size}: none of {options.random_user_count} users got the "
            f"{MIN_HISTORY} interactions that leave-one-out needs. Draw more."
        )
    items = _numbered(kept, "item", first_id=1).with_columns(title="item " + pl.col("original_id"))
    users = _numbered(kept, "user", first_id=0)
    ordered = (
        kept.with_columns(pl.col("user", "item").cast(pl.String))
        .join(users.select(uid="id", user="original_id"), on="user")
        .join(items.select(iid="id", item="original_id"), on="item")
        .sort("uid", "time")
    )
    dropped = drawn.height - kept.height
    progress(options.random_size, options.random_size)
    return seal_histories(
        directory,
        "random-histories",
        options.model_dump(),
        items=ordered["iid"].to_numpy(),
        lengths=users["count"].to_numpy(),
        users=users,
        item_names=items.select("id", "original_id", "title", "count"),
        timestamps=ordered["time"].to_numpy(),
        notes=[f"dropped {dropped} interactions of users with fewer than {MIN_HISTORY}"] if dropped else [],
    )


def _numbered(rows: pl.DataFrame, column: str, first_id: int) -> pl.DataFrame:
    """id, original_id, count: ids in the order of the original ones."""
    counted = rows.group_by(column).agg(count=pl.len().cast(pl.Int64)).sort(column)
    return counted.select(
        id=pl.int_range(first_id, pl.len() + first_id, dtype=pl.Int64),
        original_id=pl.col(column).cast(pl.String),
        count="count",
    )
