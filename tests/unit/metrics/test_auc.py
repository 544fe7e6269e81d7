"""AUROC of one process. tests/distributed/test_auroc.py has that of several."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from recmill.metrics.auc import auroc


def test_auroc_of_a_hand_worked_example_counts_a_tie_as_half() -> None:
    """Positives .8 and .5, negatives .5, .3, .9: pairs 1 + 1 + 0 and half + 1 + 0, of 6."""
    assert auroc(np.array([0.8, 0.5, 0.5, 0.3, 0.9]), np.array([1, 1, 0, 0, 0])) == 3.5 / 6


@pytest.mark.parametrize("levels", [1, 2, 7, 10**9])
def test_auroc_equals_scikit_learn(levels: int) -> None:
    """From all scores equal, over heavy ties, to no ties."""
    generator = np.random.default_rng(levels)
    scores = (generator.integers(0, levels, 5000) / levels).astype(np.float64)
    labels = generator.random(5000) < 0.2 + 0.3 * scores
    assert auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3, width=16), st.booleans()), min_size=2, max_size=50))
def test_auroc_equals_scikit_learn_on_any_rows(rows: list[tuple[float, bool]]) -> None:
    scores, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if labels.all() or not labels.any():
        assert auroc(scores, labels) is None
    else:
        assert auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
