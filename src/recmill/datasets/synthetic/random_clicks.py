"""Random click logs for benchmarks: uniform ids, normally distributed dense values, labels from a fair coin."""

from collections.abc import Iterator

import numpy as np

from recmill.data.click_rows import ClickRows
from recmill.datasets.clicks import BLOCK_ROWS, rows_per_day, seal_clicks, write_day
from recmill.datasets.clicks import ClickOptions as Options
from recmill.datasets.synthetic.plan import GeneratedPlan, plan
from recmill.datasets.writing import Work
from recmill.observe.progress import Progress
from recmill.schema import Description

__all__ = ["Options", "plan", "write"]


def write(plan: GeneratedPlan[Options], work: Work) -> Description:
    options = plan.options
    day_rows = rows_per_day(options.rows, options.days)
    with Progress("generating clicks", options.rows, "rows") as progress:
        for day, rows in enumerate(day_rows):
            write_day(work.data, f"day_{day}", rows, _blocks(options, day, rows, progress), options.id_dtype)
    truth = {split: {"auroc": 0.5} for split in ("val", "test")}
    return seal_clicks(work.data, "random-clicks", plan.recipe, day_rows, options, truth)


def _blocks(options: Options, day: int, rows: int, progress: Progress) -> Iterator[ClickRows]:
    generator = np.random.default_rng([options.seed, day])
    sizes = np.array(options.tables)
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        yield ClickRows(
            dense=generator.standard_normal((count, options.dense), dtype=np.float32),
            ids=generator.integers(0, sizes, size=(count, len(sizes))),
            labels=generator.integers(0, 2, size=count),
        )
        progress.advance(count)
