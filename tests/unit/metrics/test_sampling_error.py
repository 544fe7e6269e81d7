"""Sampling errors, against errors of drawn data."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from recmill.metrics.sampling_error import standard_error


@pytest.mark.parametrize(("rate", "users"), [(0.3, 200), (0.02, 500)])
def test_the_error_of_a_hit_rate_is_that_of_drawn_users(rate: float, users: int) -> None:
    drawn = np.random.default_rng(1).binomial(users, rate, 20_000) / users
    found = standard_error("full/hr@10", {"full/hr@10": rate, "users": users})
    assert found == pytest.approx(drawn.std(), rel=0.12)


def test_the_error_of_a_mean_rank_is_at_least_that_of_drawn_users() -> None:
    random = np.random.default_rng(1)
    gains = np.where(random.random((5000, 300)) < 0.4, 1 / np.log2(random.integers(2, 12, (5000, 300))), 0)
    found = standard_error("ndcg@10", {"ndcg@10": float(gains.mean()), "users": 300})
    assert found is not None
    assert gains.mean(axis=1).std() < found < 3 * gains.mean(axis=1).std()


def test_the_error_of_an_auroc_is_about_that_of_drawn_rows() -> None:
    random, drawn = np.random.default_rng(1), []
    labels = np.arange(1000) < 100
    for _ in range(500):
        drawn.append(roc_auc_score(labels, random.normal(labels, 1)))
    entropy = -(0.1 * np.log(0.1) + 0.9 * np.log(0.9))
    values = {"auroc": float(np.mean(drawn)), "logloss": 0.3, "normalised_entropy": 0.3 / entropy, "rows": 1000}
    found = standard_error("auroc", values)
    assert found is not None
    assert found == pytest.approx(np.std(drawn), rel=0.15)


def test_no_hit_among_few_users_is_no_proof_of_none() -> None:
    found = standard_error("full/hr@1", {"full/hr@1": 0.0, "users": 20})
    assert found is not None
    assert 0.03 < found < 0.06


def test_intervals_are_taken_and_other_metrics_have_no_error() -> None:
    values = {"logloss": 0.4, "low/logloss": 0.3, "high/logloss": 0.496, "rows": 100}
    assert standard_error("logloss", values) == pytest.approx(0.05)
    assert standard_error("calibration", {"calibration": 1.0, "rows": 100}) is None
    assert standard_error("auroc", {"auroc": 0.7, "rows": 100}) is None, "the click rate is unknown"
    assert standard_error("full/hr@1", {"full/hr@1": "undefined", "users": 0}) is None
