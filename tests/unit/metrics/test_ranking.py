from itertools import permutations

import numpy as np
import pytest
import torch

from recmill.metrics.binary import UNDEFINED, Values
from recmill.metrics.ranking import Negatives, Popularity, RankingMetrics
from recmill.observe import progress
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def ranked(ks: list[int], *batches: list[int]) -> Values:
    metrics = RankingMetrics(["full"], ks)
    for ranks in batches:
        metrics.update("full", np.array(ranks, dtype=np.int64))
    return metrics.compute(ALONE)


def test_ranking_metrics_of_a_hand_worked_example() -> None:
    """Targets at positions 1, 3, 5 and 11 (ranks start at 0): NDCG 1, 1/log2(4), 1/log2(6), 1/log2(12).

    MRR is 1/position.
    """
    assert ranked([1, 3, 10], [0, 2, 4, 10]) == {
        "full/hr@1": 1 / 4,
        "full/hr@3": 2 / 4,
        "full/hr@10": 3 / 4,
        "full/ndcg@1": 1 / 4,
        "full/ndcg@3": 1.5 / 4,
        "full/ndcg@10": pytest.approx((1.5 + 1 / np.log2(6)) / 4),
        "full/mrr@1": 1 / 4,
        "full/mrr@3": pytest.approx((1 + 1 / 3) / 4),
        "full/mrr@10": pytest.approx((1 + 1 / 3 + 1 / 5) / 4),
        "users": 4,
    }


def test_ranking_metrics_are_sums_over_users_not_means_of_batch_means() -> None:
    """A batch of one hit and a batch of three misses: 1/4, where the mean of means would be 1/2."""
    values = ranked([5], [0], [9, 9, 9])
    assert (values["full/hr@5"], values["full/ndcg@5"], values["users"]) == (0.25, 0.25, 4)


def test_ranking_metrics_of_nobody_are_undefined() -> None:
    assert (
        ranked([1, 10], [])
        == ranked([1, 10])
        == {
            "full/hr@1": UNDEFINED,
            "full/hr@10": UNDEFINED,
            "full/ndcg@1": UNDEFINED,
            "full/ndcg@10": UNDEFINED,
            "full/mrr@1": UNDEFINED,
            "full/mrr@10": UNDEFINED,
            "users": 0,
        }
    )


def test_protocols_are_counted_separately() -> None:
    metrics = RankingMetrics(["full", "pop100"], [1])
    metrics.update("full", np.array([3, 0]))
    metrics.update("pop100", np.array([0, 0]))
    values = metrics.compute(ALONE)
    assert (values["full/hr@1"], values["pop100/hr@1"], values["users"]) == (0.5, 1.0, 2)


def test_intervals_are_those_of_drawing_users_again_and_again() -> None:
    """Against the bootstrap as it is defined, user by user. Each end has a standard error of about
    sqrt(p (1 - p) / 4000) / density = 0.042 standard errors of the mean, and two are compared: 0.25 is over four."""
    ranks = np.random.default_rng(0).geometric(0.05, 500) - 1
    metrics = RankingMetrics(["full"], [1, 5, 10], resamples=4000)
    metrics.update("full", ranks)
    values = metrics.compute(ALONE)
    gains = {
        f"{name}@{k}": np.where(ranks < k, gain, 0.0)
        for name, gain in {"hr": np.ones(500), "ndcg": 1 / np.log2(ranks + 2), "mrr": 1 / (ranks + 1)}.items()
        for k in (1, 5, 10)
    }
    drawn = np.random.default_rng(1).integers(0, 500, (4000, 500))
    for name, gain in gains.items():
        low, high = np.quantile(gain[drawn].mean(axis=1), [0.025, 0.975])
        tolerance = 0.25 * gain.std() / np.sqrt(500)
        assert values[f"low/full/{name}"] == pytest.approx(low, abs=tolerance)
        assert values[f"high/full/{name}"] == pytest.approx(high, abs=tolerance)
        assert low < values[f"full/{name}"] < high


def test_intervals_do_not_depend_on_how_users_were_batched() -> None:
    ranks = np.random.default_rng(0).integers(0, 40, 300)
    one, other = (RankingMetrics(["full"], [10], resamples=50) for _ in range(2))
    one.update("full", ranks)
    for part in np.array_split(np.sort(ranks), 7):
        other.update("full", part)
    assert one.compute(ALONE) == other.compute(ALONE)
    assert len(one.compute(ALONE)) == 3 * 3 + 1


def test_intervals_do_not_depend_on_other_cut_offs() -> None:
    ranks = np.random.default_rng(0).integers(0, 40, 300)
    few, many = RankingMetrics(["full"], [10], resamples=50), RankingMetrics(["full"], [1, 10, 35], resamples=50)
    few.update("full", ranks)
    many.update("full", ranks)
    values = many.compute(ALONE)
    assert few.compute(ALONE) == pytest.approx({name: values[name] for name in few.compute(ALONE)}, rel=1e-12)


def test_resampling_reports_its_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    metrics = RankingMetrics(["full"], [10], resamples=200)
    metrics.update("full", np.arange(20))
    with caplog.at_level("INFO"):
        metrics.compute(ALONE)
    assert [line.split(" resamples,")[0] for line in caplog.messages] == [
        "resampling the users, full: 100 of about 200",
        "resampling the users, full: 200 of about 200",
    ]


# Items 1 to 6 have 5, 3, 3, 8, 0 and 1 training interactions: in order 4, 1, then 2 and 3 alike, 6, 5.
POPULARITY = Popularity(np.array([5, 3, 3, 8, 0, 1]))


@pytest.mark.parametrize(
    ("answer", "seen", "rank"),
    [
        (4, [], 0),
        (1, [], 1),
        (2, [], 3),  # 4 and 1 are before it, and 3 ties
        (2, [4, 6], 2),
        (2, [3, 3, 1], 1),  # seen twice counts once
        (2, [2], 3),  # seen before, and the target all the same
        (5, [], 5),
        (5, [1, 2, 3, 4], 1),
    ],
)
def test_popularity_ranks_a_target_among_unseen_items_with_ties_against_it(
    answer: int, seen: list[int], rank: int
) -> None:
    """Between two other rows, of which one has seen everything."""
    rows = [0] * 6 + [1] * len(seen)
    items = [1, 2, 3, 4, 5, 6, *seen]
    assert POPULARITY.full_ranks(np.array([1, answer, 5]), np.array(rows), np.array(items)).tolist() == [0, rank, 5]


def test_popularity_ranks_a_target_among_negatives_with_ties_against_it() -> None:
    negatives = np.array([[1, 4, 5], [1, 3, 5], [1, 2, 3]])
    assert POPULARITY.ranks_among(np.array([6, 2, 4]), negatives).tolist() == [2, 2, 0]


COUNTS = np.arange(300, 0, -1) ** 2
SEEN = np.array([1, 2, 3, 50, 300], dtype=np.int32)


PROTOCOLS = ["pop100", "uni100"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("split", ["val", "test"])
def test_negatives_are_100_different_items_never_met(split: str, protocol: str) -> None:
    for user in range(20):
        drawn = Negatives(protocol, COUNTS).draw(split, user, SEEN)
        assert drawn.shape == (100,)
        assert len(set(drawn.tolist())) == 100
        assert set(drawn.tolist()) <= set(range(1, 301)) - set(SEEN.tolist())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_negatives_are_the_same_each_time_and_differ_by_split_and_user(protocol: str) -> None:
    negatives = Negatives(protocol, COUNTS)
    first = negatives.draw("test", 7, SEEN).tolist()
    negatives.draw("test", 8, SEEN)
    again = Negatives(protocol, COUNTS).draw("test", 7, SEEN).tolist()
    assert again == negatives.draw("test", 7, SEEN).tolist() == first
    for split, user in (("val", 7), ("test", 8)):
        assert set(negatives.draw(split, user, SEEN).tolist()) != set(first)


def test_popular_negatives_never_change() -> None:
    """They are part of the protocol: results of different versions must stay comparable."""
    assert Negatives("pop100", COUNTS).draw("test", 7, SEEN)[:8].tolist() == [83, 153, 26, 103, 91, 124, 44, 14]


@pytest.mark.parametrize("kind", ["pop", "uni"])
def test_other_numbers_of_negatives_are_the_first_of_more(kind: str) -> None:
    few, hundred, many = (Negatives(f"{kind}{count}", COUNTS).draw("test", 7, SEEN).tolist() for count in (9, 100, 250))
    assert (len(few), len(many)) == (9, 250)
    assert many[:100] == hundred
    assert hundred[:9] == few


def test_popular_negatives_never_hold_an_item_nobody_met_and_may_be_all_that_is_left() -> None:
    """100 unseen items of wildly different popularity: all must be found."""
    counts = np.concatenate([np.zeros(10), np.geomspace(1, 10_000, 105)]).astype(int)
    drawn = Negatives("pop100", counts).draw("val", 0, np.arange(111, 116))
    assert sorted(drawn.tolist()) == list(range(11, 111))


@pytest.mark.parametrize(
    ("protocol", "weights"), [("pop2", {1: 8, 2: 4, 3: 2, 5: 1}), ("uni2", {1: 1, 2: 1, 3: 1, 5: 1, 6: 1})]
)
def test_negatives_come_with_the_probability_of_drawing_without_replacement(
    protocol: str, weights: dict[int, int]
) -> None:
    """Against all ordered pairs of unseen items. The user has met the most popular item of all; nobody has met item 6,
    which `uni2` draws all the same."""
    negatives = Negatives(protocol, np.array([8, 4, 2, 20, 1, 0]))
    users = 3000
    found = [tuple(negatives.draw("test", user, np.array([4])).tolist()) for user in range(users)]
    total = sum(weights.values())
    for one, other in permutations(weights, 2):
        probability = weights[one] / total * weights[other] / (total - weights[one])
        deviation = np.sqrt(probability * (1 - probability) / users)
        assert found.count((one, other)) / users == pytest.approx(probability, abs=4 * deviation), (one, other)
