"""Metrics of click probabilities: AUROC, log loss, normalised entropy, calibration."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from recmill.metrics.auc import auroc_over_ranks
from recmill.metrics.own import UNDEFINED, OwnMetrics, Values

if TYPE_CHECKING:
    from recmill.protocols import MetricModule
    from recmill.world import World

_NAMES = ("auroc", "logloss", "normalised_entropy", "calibration")


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return probabilities in float64, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))


def log_loss_sum(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of -log p(label), in float64: a rounded probability could be 0 or 1."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN in, NaN out: the caller decides
        return float(np.sum(np.logaddexp(0.0, logits) - labels * logits))


class BinaryMetrics:
    """Keeps every score of this rank, because AUROC is exact; the other metrics are sums."""

    def __init__(self, own: "Mapping[str, MetricModule] | None" = None) -> None:
        self._own = OwnMetrics(own or {})
        self._logits = [np.empty(0, np.float32)]
        self._labels = [np.empty(0, np.bool_)]

    def update(self, logits: np.ndarray, labels: np.ndarray) -> None:
        self._logits.append(logits.astype(np.float32))
        self._labels.append(labels.astype(np.bool_))
        self._own.update(self._logits[-1], self._labels[-1])

    def compute(self, world: "World") -> Values:
        """Return the metrics by name. All ranks take part and get the same values."""
        logits, labels = np.concatenate(self._logits), np.concatenate(self._labels)
        loss, predicted, clicks, rows = world.sum(
            [log_loss_sum(logits, labels), float(sigmoid(logits).sum()), float(labels.sum()), float(len(labels))]
        )
        area = auroc_over_ranks(logits, labels, world)
        own = self._own.compute(world)
        if not rows or not np.isfinite(loss):  # no rows, or NaN logits
            return dict.fromkeys(_NAMES, UNDEFINED) | {"rows": int(rows), **own}
        rate = clicks / rows
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if 0 < rate < 1 else 0.0
        return {
            "auroc": UNDEFINED if area is None else area,
            "logloss": loss / rows,
            # Log loss relative to that of always predicting the click rate: below 1, the model has learnt something.
            "normalised_entropy": float(loss / rows / entropy) if entropy else UNDEFINED,
            "calibration": predicted / clicks if clicks else UNDEFINED,  # predicted clicks per click
            "rows": int(rows),
            **own,
        }
