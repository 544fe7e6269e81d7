"""Plain random click logs: uniform ids, normal dense values, labels by a fair coin. For speed runs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recmill.data.click_rows import ClickRows
from recmill.datasets.clicks import BLOCK_ROWS, ClickOptions, rows_per_day, seal_clicks, write_day
from recmill.datasets.writing import Progress
from recmill.schema import Description


class Options(ClickOptions):
    pass


def write(directory: Path, options: Options, progress: Progress) -> Description:
    day_rows = rows_per_day(options.rows, options.days)
    sizes = np.array(options.tables)

    def blocks(day: int) -> Iterator[ClickRows]:
        generator = np.random.default_rng([options.seed, day])
        for start in range(0, day_rows[day], BLOCK_ROWS):
            n = min(BLOCK_ROWS, day_rows[day] - start)
            yield ClickRows(
                dense=generator.standard_normal((n, options.dense), dtype=np.float32),
                ids=generator.integers(0, sizes, size=(n, len(sizes))),
                labels=generator.integers(0, 2, size=n),
            )
            progress(sum(day_rows[:day]) + start + n, options.rows)

    for day in range(options.days):
        write_day(directory, f"day_{day}", day_rows[day], blocks(day), options.id_dtype)
    truth = {split: {"auroc": 0.5} for split in ("val", "test")}
    return seal_clicks(directory, "random-clicks", options.model_dump(), day_rows, options.dense, options.tables, truth)
