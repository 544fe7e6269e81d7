"""Random histories for benchmarks and trials: uniform (user, item) pairs in order of time."""

import numpy as np
import polars as pl
from pydantic import NonNegativeInt, PositiveInt

from recmill.config.sections import Section, key
from recmill.datasets.histories.writing import MIN_HISTORY, id_table, seal_histories
from recmill.datasets.synthetic.plan import GeneratedPlan, plan
from recmill.datasets.writing import Work, write_npy
from recmill.errors import ConfigError
from recmill.schema import Description

__all__ = ["Options", "plan", "write"]


class Options(Section):
    random_user_count: PositiveInt = key(10, "Number of users to draw from.", lt=2**31)
    random_item_count: PositiveInt = key(30, "Number of items to draw from.", lt=2**31 - 2)
    random_size: PositiveInt = key(300, "Number of interactions to draw; their times are 0, 1, 2, ...", lt=2**40)
    min_item_count: NonNegativeInt = key(0, "Keep only items with at least this many interactions.")
    min_user_count: NonNegativeInt = key(0, "Keep only users with at least this many interactions; never fewer than 3.")
    seed: int = key(1, "The same seed gives the same bytes.", ge=0, lt=2**63)


def write(plan: GeneratedPlan[Options], work: Work) -> Description:
    options = plan.options
    generator = np.random.default_rng(options.seed)
    users = generator.integers(0, options.random_user_count, options.random_size)
    items = generator.integers(0, options.random_item_count, options.random_size)
    drawn = pl.DataFrame({"user": users, "item": items, "time": np.arange(options.random_size)})
    least = max(options.min_user_count, MIN_HISTORY)
    kept = drawn.filter(pl.len().over("item") >= options.min_item_count)
    kept = kept.filter(pl.len().over("user") >= least).sort("user", "time")
    if kept.is_empty():
        work.give_up()
        raise ConfigError(
            f"--random-size {options.random_size}: none of {options.random_user_count} users got {least} interactions; "
            f"leave-one-out needs {MIN_HISTORY}. Draw more."
        )
    user_table = _counted(kept["user"], first_id=0)
    item_table = _counted(kept["item"], first_id=1).with_columns(title=pl.format("item {}", "original_id"))
    write_npy(work.data / "items.npy", kept["item"].rank("dense").to_numpy(), np.int32)
    write_npy(work.data / "timestamps.npy", kept["time"].to_numpy(), np.int64)
    dropped = drawn.height - kept.height
    or_items = f" or items with fewer than {options.min_item_count}" if options.min_item_count else ""
    notes = [f"dropped {dropped} interactions of users with fewer than {least}{or_items}"] if dropped else []
    return seal_histories(work.data, "random-histories", plan.recipe, user_table, item_table, notes=notes)


def _counted(values: pl.Series, first_id: int) -> pl.DataFrame:
    original_ids, counts = np.unique(values.to_numpy(), return_counts=True)
    return id_table(map(str, original_ids), counts, first_id)
