"""Click logs with a known truth: skewed ids over tables of very different sizes and a planted model.

logit = offset + dense part + one effect per id + products of latent factors for some pairs of tables; the label is
drawn with that probability. The probability itself is the best possible score, so its AUROC and log loss on a split
are the best that any model can reach there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat

from recmill import rng
from recmill.config.sections import key
from recmill.data.click_rows import ClickRows
from recmill.datasets.clicks import BLOCK_ROWS, ClickOptions, rows_per_day, seal_clicks, write_day
from recmill.datasets.synthetic.plan import GeneratedPlan, plan
from recmill.datasets.writing import Work
from recmill.metrics.auc import auroc
from recmill.metrics.binary import log_loss_sum, sigmoid
from recmill.observe.progress import Progress
from recmill.schema import Description

__all__ = ["Options", "plan", "write"]

NUM_PAIRS = 4
FACTOR_DIM = 2


class Options(ClickOptions):
    click_rate: float = key(0.25, "Approximate share of clicks.", gt=0.0, lt=1.0)
    signal: PositiveFloat = key(1.5, "Standard deviation of the planted logit; larger is easier.")


@dataclass(frozen=True)
class PlantedModel:
    options: Options

    def ids(self, day: int, rows: np.ndarray) -> np.ndarray:
        """Draw Zipf-like ids (probability ~ 1/(id+1)) by inverting a log-uniform distribution."""
        columns = []
        for table, size in enumerate(self.options.tables):
            u = rng.uniform(rng.stream_key(self.options.seed, "ids", day, table), rows)
            columns.append(np.minimum(np.exp(u * np.log(size + 1.0)).astype(np.int64) - 1, size - 1))
        return np.stack(columns, axis=1)

    def dense(self, day: int, rows: np.ndarray) -> np.ndarray:
        keys = [rng.stream_key(self.options.seed, "dense", day, f) for f in range(self.options.dense)]
        return np.stack([rng.normal(key, rows) for key in keys], axis=1).astype(np.float32)

    def logit(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Take a quarter of the logit's variance from dense values, half from ids, a quarter from pairs of ids."""
        seed = self.options.seed
        num_tables = len(self.options.tables)
        weights = rng.normal(rng.stream_key(seed, "weights"), np.arange(self.options.dense))
        logit = dense @ (weights / np.linalg.norm(weights)) * 0.5
        # Small tables get larger effects: their ids occur often enough for a model to learn them.
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


def write(plan: GeneratedPlan[Options], work: Work) -> Description:
    options = plan.options
    planted = PlantedModel(options)
    day_rows = rows_per_day(options.rows, options.days)
    held_out: list[tuple[np.ndarray, np.ndarray]] = []  # logits and labels of the last day

    def blocks(day: int) -> Iterator[ClickRows]:
        for start in range(0, day_rows[day], BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, day_rows[day]))
            dense, ids = planted.dense(day, rows), planted.ids(day, rows)
            logits = planted.logit(dense, ids)
            labels = rng.uniform(rng.stream_key(options.seed, "labels", day), rows) < sigmoid(logits)
            if day == options.days - 1:
                held_out.append((logits, labels))
            yield ClickRows(dense, ids, labels.astype(np.int32))
            progress.advance(len(rows))

    with Progress("generating clicks", options.rows, "rows") as progress:
        for day, rows in enumerate(day_rows):
            write_day(work.data, f"day_{day}", rows, blocks(day), options.id_dtype)
    logits, labels = map(np.concatenate, zip(*held_out, strict=True))
    middle = (day_rows[-1] + 1) // 2
    truth = {
        "val": best_reachable(logits[:middle], labels[:middle]),
        "test": best_reachable(logits[middle:], labels[middle:]),
    }
    return seal_clicks(work.data, "synthetic-clicks", plan.recipe, day_rows, options, truth)


def best_reachable(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics of the planted logits; AUROC is left out if the labels are all equal."""
    truth = {"logloss": log_loss_sum(logits, labels) / len(labels)}
    area = auroc(logits, labels)
    return truth if area is None else {"auroc": area, **truth}
