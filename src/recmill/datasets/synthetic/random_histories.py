"""Random histories for benchmarks and trials: uniform (user, item) pairs in order of time."""

import numpy as np
import polars as pl
from pydantic import Field, PositiveInt

from recmill.config.sections import Section
from recmill.datasets.histories.writing import MIN_HISTORY, id_table, seal_histories
from recmill.datasets.synthetic.plan import GeneratedPlan, plan
from recmill.datasets.writing import Work, write_npy
from recmill.errors import ConfigError
from recmill.schema import Description

__all__ = ["Options", "plan", "write"]


class Options(Section):
    random_user_count: PositiveInt = Field(10, lt=2**31, description="Number of users to draw from.")
    random_item_count: PositiveInt = Field(30, lt=2**31 - 2, description="Number of items to draw from.")
    random_size: PositiveInt = Field(
        300, lt=2**40, description="Number of interactions to draw; the N-th has time N, counted from 0."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="The same seed gives the same bytes.")


def write(plan: GeneratedPlan[Options], work: Work) -> Description:
    options = plan.options
    generator = np.random.default_rng(options.seed)
    drawn = pl.DataFrame(
        {
            "user": generator.integers(0, options.random_user_count, options.random_size),
            "item": generator.integers(0, options.random_item_count, options.random_size),
            "time": np.arange(options.random_size),
        }
    )
    kept = drawn.filter(pl.len().over("user") >= MIN_HISTORY).sort("user", "time")
    if kept.is_empty():
        raise ConfigError(
            f"--random-size {options.random_size}: none of {options.random_user_count} users got the "
            f"{MIN_HISTORY} interactions that leave-one-out needs. Draw more."
        )
    users = _counted(kept["user"], first_id=0)
    items = _counted(kept["item"], first_id=1)
    items = items.select("id", "original_id", pl.format("item {}", "original_id").alias("title"), "count")
    write_npy(work.data / "items.npy", kept["item"].rank("dense").to_numpy(), np.int32)
    write_npy(work.data / "timestamps.npy", kept["time"].to_numpy(), np.int64)
    dropped = drawn.height - kept.height
    notes = [f"dropped {dropped} interactions of users with fewer than {MIN_HISTORY}"] if dropped else []
    return seal_histories(work.data, "random-histories", plan.recipe, users, items, notes=notes)


def _counted(values: pl.Series, first_id: int) -> pl.DataFrame:
    original_ids, counts = np.unique(values.to_numpy(), return_counts=True)
    return id_table(map(str, original_ids), counts, first_id)
