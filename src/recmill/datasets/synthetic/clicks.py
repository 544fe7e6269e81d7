"""Click logs with a known truth: skewed ids over tables of very different sizes and a planted model.

logit = offset + dense part + one effect per id + products of latent factors for some pairs of tables; the label
is a coin with that probability. The probability itself is the best possible score, so its AUROC and log loss on
a split are the best that any model can reach there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, PositiveFloat

from recmill import rng
from recmill.data.click_rows import ClickRows
from recmill.datasets.clicks import BLOCK_ROWS, ClickOptions, rows_per_day, seal_clicks, write_day
from recmill.datasets.writing import Progress
from recmill.metrics.auc import auroc
from recmill.metrics.binary import log_loss_sum, sigmoid
from recmill.schema import Description

NUM_PAIRS = 4
FACTOR_DIM = 2


class Options(ClickOptions):
    click_rate: float = Field(0.25, gt=0.0, lt=1.0, description="Roughly the share of clicks.")
    signal: PositiveFloat = Field(1.5, description="Standard deviation of the planted logit: larger is easier.")


@dataclass(frozen=True)
class PlantedModel:
    options: Options

    def ids(self, day: int, rows: np.ndarray) -> np.ndarray:
        """Zipf-like (probability ~ 1/(id+1)): inverse of a log-uniform distribution."""
        columns = []
        for table, size in enumerate(self.options.tables):
            u = rng.uniform(rng.stream_key(self.options.seed, "ids", day, table), rows)
            columns.append(np.minimum(np.exp(u * np.log(size + 1.0)).astype(np.int64) - 1, size - 1))
        return np.stack(columns, axis=1)

    def dense(self, day: int, rows: np.ndarray) -> np.ndarray:
        keys = [rng.stream_key(self.options.seed, "dense", day, f) for f in range(self.options.dense)]
        return np.stack([rng.normal(key, rows) for key in keys], axis=1).astype(np.float32)

    def logit(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """A quarter of the logit's variance from dense values, half from ids, a quarter from pairs of ids."""
        seed, num_tables = self.options.seed, len(self.options.tables)
        weights = rng.normal(rng.stream_key(seed, "weights"), np.arange(self.options.dense))
        logit = dense @ (weights / np.linalg.norm(weights)) * 0.5
        # Small tables carry more: their ids are seen often enough for a model to learn them.
        strength = 1.0 / np.log2(np.array(self.options.tables) + 2.0)
        strength *= np.sqrt(0.5) / np.linalg.norm(strength)
        for table in range(num_tables):
            logit += strength[table] * rng.normal(rng.stream_key(seed, "effect", table), ids[:, table])
        pairs = [(table, table + 1) for table in range(0, num_tables - 1, 2)][:NUM_PAIRS]
        for one, other in pairs:
            product = np.sum(self._factors(one, ids) * self._factors(other, ids), axis=1)
            logit += product * (0.5 / np.sqrt(len(pairs) * FACTOR_DIM))
        rate = self.options.click_rate
        return np.log(rate / (1 - rate)) + self.options.signal * logit

    def _factors(self, table: int, ids: np.ndarray) -> np.ndarray:
        keys = [rng.stream_key(self.options.seed, "factor", table, d) for d in range(FACTOR_DIM)]
        return np.stack([rng.normal(key, ids[:, table]) for key in keys], axis=1)


def write(directory: Path, options: Options, progress: Progress) -> Description:
    planted = PlantedModel(options)
    day_rows = rows_per_day(options.rows, options.days)
    last_day: list[tuple[np.ndarray, np.ndarray]] = []

    def blocks(day: int) -> Iterator[ClickRows]:
        for start in range(0, day_rows[day], BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, day_rows[day]))
            dense, ids = planted.dense(day, rows), planted.ids(day, rows)
            logits = planted.logit(dense, ids)
            labels = rng.uniform(rng.stream_key(options.seed, "labels", day), rows) < sigmoid(logits)
            if day == options.days - 1:
                last_day.append((logits, labels))
            yield ClickRows(dense, ids, labels.astype(np.int32))
            progress(sum(day_rows[:day]) + int(rows[-1]) + 1, options.rows)

    for day in range(options.days):
        write_day(directory, f"day_{day}", day_rows[day], blocks(day), options.id_dtype)
    logits, labels = (np.concatenate(parts) for parts in zip(*last_day, strict=True))
    middle = (day_rows[-1] + 1) // 2
    truth = {
        "val": best_reachable(logits[:middle], labels[:middle]),
        "test": best_reachable(logits[middle:], labels[middle:]),
    }
    return seal_clicks(
        directory, "synthetic-clicks", options.model_dump(), day_rows, options.dense, options.tables, truth
    )


def best_reachable(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    truth = {"logloss": log_loss_sum(logits, labels) / len(labels)}
    area = auroc(logits, labels)
    return truth if area is None else {"auroc": area, **truth}
