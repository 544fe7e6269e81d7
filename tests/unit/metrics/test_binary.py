import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from recmill.metrics.binary import UNDEFINED, BinaryMetrics, Values, log_loss_sum
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def binary(*parts: tuple[list[float], list[int]]) -> Values:
    metrics = BinaryMetrics()
    for logits, labels in parts:
        metrics.update(np.array(logits), np.array(labels))
    return metrics.compute(ALONE)


def logits_of(*probabilities: float) -> list[float]:
    return [float(np.log(p / (1 - p))) for p in probabilities]


def test_log_loss_equals_scikit_learn() -> None:
    generator = np.random.default_rng(5)
    logits = generator.normal(size=1000) * 3
    labels = generator.integers(0, 2, 1000)
    assert log_loss_sum(logits, labels) / 1000 == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-9)


def test_weighted_metrics_and_those_of_groups_equal_scikit_learn() -> None:
    generator = np.random.default_rng(6)
    logits = generator.normal(size=900).round(1).astype(np.float32)  # with ties
    labels = generator.random(900) < 1 / (1 + np.exp(1 - logits))
    weights = generator.choice([0.25, 1.0, 3.0], 900).astype(np.float32)
    groups = generator.integers(0, 60, 900)
    groups[labels & (groups == 7)] = 0  # group 7 has no click, group 0 stands for no value
    metrics = BinaryMetrics()
    for part in np.array_split(np.arange(900), 4):
        metrics.update(logits[part], labels[part], weights[part], groups[part])
    found = metrics.compute(ALONE)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), rel=1e-9)
    assert found["logloss"] == pytest.approx(log_loss(labels, probabilities, sample_weight=weights), rel=1e-6)
    assert found["calibration"] == pytest.approx(weights @ probabilities / weights[labels].sum(), rel=1e-6)
    areas, shares = [], []
    for group in range(1, 60):
        own = groups == group
        if len(set(labels[own])) == 2:
            areas.append(roc_auc_score(labels[own], logits[own], sample_weight=weights[own]))
            shares.append(weights[own].sum())
    assert 40 < len(areas) < 59
    assert found["gauc"] == pytest.approx(np.average(areas, weights=shares), rel=1e-9)
    assert found["rows"] == 900


@pytest.mark.filterwarnings("error")
def test_log_loss_is_exact_for_huge_logits() -> None:
    """Two certain and right answers cost nothing, two certain and wrong ones 1000 each."""
    values = binary(([1000.0, -1000.0, 1000.0, -1000.0], [1, 0, 0, 1]))
    assert values["logloss"] == 500.0
    assert values["calibration"] == 1.0
    assert values["auroc"] == 0.5


def test_binary_metrics_of_a_hand_worked_example() -> None:
    values = binary((logits_of(0.8, 0.5, 0.4, 0.1), [1, 1, 0, 0]))
    loss = -(np.log(0.8) + np.log(0.5) + np.log(0.6) + np.log(0.9)) / 4
    assert values == {
        "auroc": 1.0,
        "logloss": pytest.approx(loss, rel=1e-6),
        "normalised_entropy": pytest.approx(loss / np.log(2), rel=1e-6),  # half of the rows are clicks
        "calibration": pytest.approx(1.8 / 2, rel=1e-6),
        "rows": 4,
    }


def test_always_predicting_the_click_rate_has_a_normalised_entropy_of_one() -> None:
    values = binary((logits_of(*[0.2] * 10), [1, 1] + [0] * 8))
    assert values["normalised_entropy"] == pytest.approx(1.0, rel=1e-6)
    assert values["calibration"] == pytest.approx(1.0, rel=1e-6)
    assert values["auroc"] == 0.5


@pytest.mark.parametrize(("label", "calibration"), [(1, 0.6), (0, UNDEFINED)])
def test_one_class_alone_has_no_auroc_and_no_entropy(label: int, calibration: float | str) -> None:
    values = binary((logits_of(0.4, 0.8), [label, label]))
    assert (values["auroc"], values["normalised_entropy"]) == (UNDEFINED, UNDEFINED)
    assert values["calibration"] == (calibration if calibration == UNDEFINED else pytest.approx(calibration, rel=1e-6))
    assert values["logloss"] == pytest.approx(-np.mean(np.log([0.4, 0.8] if label else [0.6, 0.2])), rel=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "parts", [[], [([], [])], [([0.3, np.nan], [1, 0])], [([np.nan], [1]), ([0.0, 1.0, 2.0], [0, 1, 0])]]
)
def test_nan_answers_and_no_rows_make_every_metric_undefined(parts: list[tuple[list[float], list[int]]]) -> None:
    names = ("auroc", "logloss", "normalised_entropy", "calibration")
    assert binary(*parts) == dict.fromkeys(names, UNDEFINED) | {"rows": sum(len(labels) for _, labels in parts)}


def test_binary_metrics_of_several_batches_equal_those_of_one() -> None:
    generator = np.random.default_rng(3)
    logits, labels = np.round(generator.normal(size=100), 1).tolist(), generator.integers(0, 2, 100).tolist()
    batches = [(logits[a:b], labels[a:b]) for a, b in ((0, 1), (1, 60), (60, 60), (60, 100))]
    assert binary(*batches) == binary((logits, labels))


def test_intervals_are_those_of_a_bootstrap_that_draws_rows() -> None:
    """The reference draws the rows of 300 resamples with NumPy and scores each with scikit-learn.

    Some scores occur several times, with both labels. The ends vary by about 5 % of the length.
    """
    generator = np.random.default_rng(3)
    logits = np.round(generator.normal(size=500), 2).astype(np.float32)
    labels = (generator.random(500) < 1 / (1 + np.exp(-logits))).astype(int)
    metrics = BinaryMetrics(resamples=1000)
    metrics.update(logits, labels, numbers=np.arange(500))
    values = metrics.compute(ALONE)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    drawn = [generator.integers(0, 500, 500) for _ in range(300)]
    rates = [labels[rows].mean() for rows in drawn]
    losses = [log_loss(labels[rows], probabilities[rows]) for rows in drawn]
    reference = {
        "auroc": [roc_auc_score(labels[rows], logits[rows]) for rows in drawn],
        "logloss": losses,
        "normalised_entropy": [
            loss / log_loss([0, 1], [rate, rate], sample_weight=[1 - rate, rate])
            for loss, rate in zip(losses, rates, strict=True)
        ],
        "calibration": [probabilities[rows].sum() / labels[rows].sum() for rows in drawn],
    }
    for name, resampled in reference.items():
        low, high = np.quantile(resampled, (0.025, 0.975))
        assert (values[f"low/{name}"], values[f"high/{name}"]) == pytest.approx((low, high), abs=0.2 * (high - low))
        assert values[f"low/{name}"] < values[name] < values[f"high/{name}"]  # type: ignore[operator]


def test_intervals_depend_neither_on_the_order_of_rows_nor_on_the_last_bit_of_scores() -> None:
    """Matrix products of batches of other sizes may round differently, as with another number of processes."""
    generator = np.random.default_rng(4)
    logits = generator.normal(size=200).astype(np.float32)
    labels, order = generator.integers(0, 2, 200), generator.permutation(200)
    found = []
    for scores, rows in ((logits, np.arange(200)), (np.nextafter(logits, np.float32(9)), order)):
        metrics = BinaryMetrics(resamples=20)
        for part in np.split(rows, (70,)):
            metrics.update(scores[part], labels[part], numbers=part)
        found.append(metrics.compute(ALONE))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_metrics_that_no_resample_defines_have_no_interval() -> None:
    metrics = BinaryMetrics(resamples=5)
    metrics.update(np.array(logits_of(0.4, 0.8)), np.array([1, 1]), numbers=np.arange(2))
    assert {"low/auroc", "low/normalised_entropy"}.isdisjoint(metrics.compute(ALONE))
    assert "low/logloss" in metrics.compute(ALONE)


def test_a_process_that_has_no_group_finds_no_gauc() -> None:
    """Here no row has a group. Of two processes, one has none if there is a single group."""
    metrics = BinaryMetrics()
    metrics.update(np.array(logits_of(0.4, 0.8)), np.array([1, 0]), groups=np.array([0, 0]))
    assert metrics.compute(ALONE)["gauc"] == UNDEFINED
