"""The contract of a metric: its sums are additive, so that batches and processes do not affect its value."""

import math
from collections.abc import Callable

import numpy as np

from recmill.contracts import expect
from recmill.protocols import MetricModule

Check = Callable[[MetricModule], None]


def _examples(metric: MetricModule, first: int, last: int) -> tuple[np.ndarray, ...]:
    """Return rows as a metric gets them: logits and labels of clicks, or the ranks of users' targets."""
    random = np.random.default_rng(1)
    logits, labels, ranks = random.normal(size=500), random.random(500) < 0.3, random.integers(0, 200, size=500)
    arrays = (logits.astype(np.float32), labels) if metric.TASK == "ctr" else (ranks,)
    return tuple(array[first:last] for array in arrays)


def the_number_of_its_sums_is_always_the_same(metric: MetricModule) -> None:
    """sums() returns as many numbers for no row or one row as for many."""
    lengths = {rows: len(metric.sums(*_examples(metric, 0, rows))) for rows in (0, 1, 500)}
    expect(len(set(lengths.values())) == 1, f"sums() returns different numbers of values, by rows: {lengths}")


def its_sums_over_parts_add_up_to_the_sums_over_all(metric: MetricModule) -> None:
    """sums() is additive, so that batches and processes do not affect the value."""
    parts = [np.asarray(metric.sums(*_examples(metric, *part)), np.float64) for part in ((0, 123), (123, 500))]
    total = np.asarray(metric.sums(*_examples(metric, 0, 500)), np.float64)
    expect(np.allclose(parts[0] + parts[1], total), f"{parts[0]} + {parts[1]} is not {total}: return sums, not means")


def its_value_is_a_finite_number(metric: MetricModule) -> None:
    """value() makes one float of the sums."""
    value = metric.value(*map(float, metric.sums(*_examples(metric, 0, 500))))
    expect(isinstance(value, float) and math.isfinite(value), f"value() returned {value!r}, expected a float")


CHECKS: tuple[Check, ...] = (
    the_number_of_its_sums_is_always_the_same,
    its_sums_over_parts_add_up_to_the_sums_over_all,
    its_value_is_a_finite_number,
)
