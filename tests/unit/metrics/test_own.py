"""Metrics that users wrote, beside those of a task."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from recmill.metrics.binary import BinaryMetrics
from recmill.metrics.own import UNDEFINED, OwnMetrics
from recmill.metrics.ranking import RankingMetrics
from recmill.world import joined_world

ACCURACY: Any = SimpleNamespace(
    TASK="ctr", sums=lambda x, y: [((x > 0) == y).sum(), len(y)], value=lambda right, rows: right / rows
)
MEAN_RANK: Any = SimpleNamespace(
    TASK="next_item", sums=lambda ranks: [ranks.sum(), len(ranks)], value=lambda total, users: total / users
)


def test_the_sums_of_all_batches_are_added_before_the_value_is_computed() -> None:
    metrics = BinaryMetrics({"accuracy": ACCURACY})
    metrics.update(np.array([2.0, -1.0, 0.5]), np.array([1, 1, 0]))
    metrics.update(np.array([-3.0]), np.array([0]))
    with joined_world("cpu") as world:
        values = metrics.compute(world)
    assert values["accuracy"] == 2 / 4  # right, wrong, wrong; right
    assert list(values)[-2:] == ["rows", "accuracy"]


def test_rankings_have_one_value_per_protocol_of_ranks_that_are_not_cut_off() -> None:
    metrics = RankingMetrics(["full", "pop100"], [1], own={"mean_rank": MEAN_RANK})
    metrics.update("full", np.array([0, 50]))
    metrics.update("full", np.array([10]))
    metrics.update("pop100", np.array([7]))
    values = metrics.compute(None)
    assert (values["full/mean_rank"], values["pop100/mean_rank"]) == (20.0, 7.0)


def test_a_value_of_no_rows_or_that_is_not_finite_is_undefined() -> None:
    bad: Any = SimpleNamespace(sums=lambda *_: [], value=lambda: float("nan"))
    own = OwnMetrics({"accuracy": ACCURACY, "bad": bad})
    assert own.compute(None) == {"accuracy": UNDEFINED, "bad": UNDEFINED}
    own.update(np.array([1.0]), np.array([True]))
    assert own.compute(None) == {"accuracy": 1.0, "bad": UNDEFINED}
