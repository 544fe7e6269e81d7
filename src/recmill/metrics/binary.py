"""Metrics of click probabilities: AUROC, log loss, normalised entropy, calibration, and their intervals."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from recmill import rng
from recmill.metrics.auc import (
    auroc_over_ranks,
    by_score_range,
    combined,
    doubled_pairs,
    grouped_auroc,
    weighted_auroc,
)
from recmill.metrics.own import UNDEFINED, OwnMetrics, Values
from recmill.observe.progress import Progress

if TYPE_CHECKING:
    from recmill.protocols import MetricModule
    from recmill.world import World

_BOOTSTRAP_SEED = 20190816  # of the protocol, not of a run
# P(drawn at most 0, 1, ... times); beyond 18 there is less than a float64 can say.
_POISSON = np.cumsum([math.exp(-1) / math.factorial(times) for times in range(19)])
_NAMES = ("auroc", "logloss", "normalised_entropy", "calibration")


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return probabilities in float64, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))


def corrected_logits(logits: np.ndarray, negatives: float) -> np.ndarray:
    """Return the logits of all rows, given those of a model that saw only the share `negatives` of unclicked rows.

    Leaving out unclicked rows multiplies the odds of a click by 1 / negatives.
    """
    return logits if negatives == 1 else logits + np.float32(math.log(negatives))


def log_loss_sum(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    """Return the weighted sum of -log p(label), in float64: a rounded probability could be 0 or 1."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN in, NaN out: the caller decides
        return float(np.sum(weights * (np.logaddexp(0.0, logits) - labels * logits)))


class BinaryMetrics:
    """Keeps every score of this rank, because AUROC is exact; the other metrics are sums.

    The bootstrap draws `resamples` times for confidence intervals; 0: there are none. Logits are corrected for the
    share of unclicked rows that the model was trained on, `negatives`. Rows may have weights, by which they count in
    all metrics but `rows` and those of plug-ins, and groups, which add `gauc`.
    """

    def __init__(
        self, own: "Mapping[str, MetricModule] | None" = None, resamples: int = 0, negatives: float = 1.0
    ) -> None:
        self._resamples = resamples
        self._negatives = negatives
        self._own = OwnMetrics(own or {})
        self._logits = [np.empty(0, np.float32)]
        self._labels = [np.empty(0, np.bool_)]
        self._weights = [np.empty(0, np.float32)]
        self._groups: list[np.ndarray] = []
        self._numbers = [np.empty(0, np.int64)]

    def update(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
    ) -> None:
        """Add rows. Without weights, each counts 1. Either all rows of an evaluation have groups or none.

        `numbers` in the split identify the rows for the bootstrap.
        """
        self._logits.append(corrected_logits(logits.astype(np.float32), self._negatives))
        self._labels.append(labels.astype(np.bool_))
        self._weights.append(np.ones(len(labels), np.float32) if weights is None else weights)
        self._groups += [] if groups is None else [groups]
        if self._resamples:
            assert numbers is not None, "a bootstrap of rows without numbers"
            self._numbers.append(numbers)
        self._own.update(self._logits[-1], self._labels[-1])

    def compute(self, world: "World") -> Values:
        """Return the metrics by name. All ranks take part and get the same values.

        "low/NAME" and "high/NAME" are the ends of a 95 % interval.
        """
        columns = self._logits, self._labels, self._weights
        logits, labels, weights = (np.concatenate(column) for column in columns)
        loss, predicted, clicks, weight, rows, weighted, grouped = world.sum(
            [
                log_loss_sum(logits, labels, weights),
                float(sigmoid(logits) @ weights),
                float(weights[labels].sum(dtype=np.float64)),
                float(weights.sum(dtype=np.float64)),
                float(len(labels)),
                float((weights != 1).sum()),
                float(len(self._groups)),
            ]
        )
        area = weighted_auroc(logits, labels, weights, world) if weighted else auroc_over_ranks(logits, labels, world)
        groups = np.concatenate([np.empty(0, np.int64), *self._groups])
        by_group = {"gauc": grouped_auroc(groups, logits, labels, weights, world)} if grouped else {}
        own = self._own.compute(world)
        if not rows or not np.isfinite(loss):  # no rows, or NaN logits
            return dict.fromkeys((*_NAMES, *by_group), UNDEFINED) | {"rows": int(rows), **own}
        found = {name: UNDEFINED if value is None else value for name, value in by_group.items()}
        numbers = np.concatenate(self._numbers)
        intervals = _intervals(logits, labels, numbers, self._resamples, world) if self._resamples else {}
        return {**_from_sums(area, loss, predicted, clicks, weight), **found, "rows": int(rows), **own, **intervals}


def _from_sums(area: float | None, loss: float, predicted: float, clicks: float, rows: float) -> Values:
    rate = clicks / rows
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if 0 < rate < 1 else 0.0
    return {
        "auroc": UNDEFINED if area is None else area,
        "logloss": loss / rows,
        # Log loss relative to that of always predicting the click rate: below 1, the model has learnt something.
        "normalised_entropy": float(loss / rows / entropy) if entropy else UNDEFINED,
        "calibration": predicted / clicks if clicks else UNDEFINED,  # predicted clicks per click
    }


def _intervals(logits: np.ndarray, labels: np.ndarray, numbers: np.ndarray, resamples: int, world: "World") -> Values:
    """Return the ends of 95 % intervals, the same for any number of processes. All ranks take part."""
    parts = world.gather(_resampled_sums(logits, labels, numbers, resamples, world))
    if parts is None:
        return world.broadcast({})
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for ranges in np.stack(parts, axis=1):  # of one resample
        area = combined((int(pairs), int(clicks), int(rows - clicks)) for pairs, clicks, rows, *_ in ranges)
        clicks, rows, loss, predicted = ranges[:, 1:].sum(axis=0).tolist()
        values = _from_sums(area, loss, predicted, clicks, rows) if rows else {}
        for name, value in values.items():
            found[name] += [float(value)] if value != UNDEFINED else []
    intervals: Values = {}
    for name, drawn in found.items():
        if drawn:
            low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
            intervals |= {f"low/{name}": low, f"high/{name}": high}
    return world.broadcast(intervals)


def _resampled_sums(
    logits: np.ndarray, labels: np.ndarray, numbers: np.ndarray, resamples: int, world: "World"
) -> np.ndarray:
    """Return doubled pairs, clicks, rows, loss and predicted clicks of this rank's range of scores, per resample.

    Every row is drawn as often as a Poisson variable of mean 1 says, which depends on the row's number alone.
    """
    columns = [labels.astype(np.int8), numbers]
    scores, labels, numbers = by_score_range(logits + np.float32(0), columns, world)  # -0 becomes 0
    scores, score_of_row = np.unique(scores, return_inverse=True)
    cells = 2 * score_of_row + 1 - labels  # per score: clicks, then the others
    order = np.lexsort((numbers, cells))
    cells, identities = cells[order], numbers[order].view(np.uint64)
    label_of_cell = np.tile([1, 0], len(scores))
    score_of_cell = np.repeat(scores, 2).astype(np.float64)
    loss_of_cell = np.logaddexp(0.0, score_of_cell) - label_of_cell * score_of_cell
    predicted_of_cell = sigmoid(score_of_cell)
    sums = np.zeros((resamples, 5))
    with Progress("resampling the rows", resamples, "resamples", world) as progress:
        for number in range(resamples):
            points = rng.uniform(rng.stream_key(_BOOTSTRAP_SEED, number), identities)
            drawn = np.bincount(cells, np.searchsorted(_POISSON, points, "right"), minlength=len(label_of_cell))
            clicks, others = drawn.astype(np.int64).reshape(-1, 2).T
            pairs = doubled_pairs(clicks, others)
            sums[number] = pairs, clicks.sum(), drawn.sum(), drawn @ loss_of_cell, drawn @ predicted_of_cell
            progress.advance(1)
    return sums
