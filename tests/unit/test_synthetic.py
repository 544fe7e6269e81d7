import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from recmill import prepare
from recmill.datasets.synthetic import clicks as synthetic_clicks
from recmill.datasets.synthetic import histories as synthetic_histories
from recmill.datasets.synthetic.clicks import PlantedModel
from recmill.datasets.synthetic.histories import Chain
from recmill.errors import ConfigError
from recmill.metrics.ranking import Negatives

TABLES = [5, 50, 300, 2000, 20]  # the last one is in no pair


@dataclass
class Clicks:
    """A prepared dataset and its planted model."""

    path: Path
    description: dict[str, Any]

    def files(self, part: str, *days: int) -> np.ndarray:
        return np.concatenate([np.load(self.path / f"day_{day}_{part}.npy") for day in days])

    @cached_property
    def planted(self) -> PlantedModel:
        return PlantedModel(synthetic_clicks.Options(**self.description["recipe"]))


@pytest.fixture(scope="module")
def planted_clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    path = tmp_path_factory.mktemp("synthetic") / "clicks"
    return Clicks(path, prepare("synthetic-clicks", path, rows=60_001, days=3, dense=4, tables=TABLES))


@pytest.mark.parametrize(("split", "rows"), [("val", slice(0, 10_001)), ("test", slice(10_001, None))])
def test_the_stated_best_is_the_score_of_the_planted_probability_of_the_files(
    planted_clicks: Clicks, split: str, rows: slice
) -> None:
    dense, ids, labels = (planted_clicks.files(part, 2)[rows] for part in ("dense", "sparse", "labels"))
    assert dense.dtype == np.float32
    probability = expit(planted_clicks.planted.logit(dense, ids))
    truth = planted_clicks.description["truth"][split]
    assert truth["auroc"] == pytest.approx(roc_auc_score(labels[:, 0], probability), abs=1e-12)
    assert truth["logloss"] == pytest.approx(log_loss(labels[:, 0], probability), rel=1e-12)


def test_labels_are_coins_of_the_planted_probability(planted_clicks: Clicks) -> None:
    """In each tenth of the rows by probability; five standard deviations."""
    dense, ids, labels = (planted_clicks.files(part, 0, 1, 2) for part in ("dense", "sparse", "labels"))
    probability = expit(planted_clicks.planted.logit(dense, ids))
    for rows in np.array_split(np.argsort(probability), 10):
        p = probability[rows]
        assert labels[rows].sum() == pytest.approx(p.sum(), abs=5 * np.sqrt(np.sum(p * (1 - p))))
    assert labels.mean() == pytest.approx(0.25, abs=0.1)


def test_ids_follow_zipfs_law(planted_clicks: Clicks) -> None:
    """P(id) = log((id + 2) / (id + 1)) / log(table + 1), so about 1 / id; five standard deviations."""
    ids = planted_clicks.files("sparse", 0, 1, 2)
    for column, size in enumerate(TABLES):
        counts = np.bincount(ids[:, column], minlength=size)
        assert len(counts) == size
        assert counts.argmax() == 0
        id_ = np.arange(min(size, 20))
        p = np.log((id_ + 2) / (id_ + 1)) / np.log(size + 1)
        assert np.all(np.abs(counts[id_] - len(ids) * p) < 5 * np.sqrt(len(ids) * p * (1 - p)))


def test_tables_and_dense_features_are_drawn_independently(planted_clicks: Clicks) -> None:
    columns = np.column_stack(
        [planted_clicks.files("dense", 0, 1, 2), np.log1p(planted_clicks.files("sparse", 0, 1, 2))]
    )
    correlation = np.corrcoef(columns, rowvar=False) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 0.02
    assert not np.array_equal(planted_clicks.files("dense", 0)[:100], planted_clicks.files("dense", 1)[:100])


def test_knowing_less_than_the_planted_model_scores_lower(planted_clicks: Clicks) -> None:
    """Dense values alone, ids alone, and all but one table each: every part carries signal of its own."""
    dense, ids, labels = (planted_clicks.files(part, 0, 1, 2) for part in ("dense", "sparse", "labels"))

    def score(dense: np.ndarray, ids: np.ndarray) -> float:
        return float(roc_auc_score(labels[:, 0], expit(planted_clicks.planted.logit(dense, ids))))

    best = score(dense, ids)
    only_dense, only_ids = score(dense, np.zeros_like(ids)), score(np.zeros_like(dense), ids)
    assert 0.55 < only_dense < best - 0.02
    assert 0.55 < only_ids < best - 0.02
    for table in range(len(TABLES)):
        without = ids.copy()
        without[:, table] = np.roll(ids[:, table], 1)
        assert score(dense, without) < best - 0.005


def test_a_stronger_signal_is_easier(tmp_path: Path) -> None:
    areas = [
        prepare("synthetic-clicks", tmp_path / str(signal), rows=4000, days=2, signal=signal)["truth"]["val"]["auroc"]
        for signal in (0.1, 1.0, 4.0)
    ]
    assert 0.5 < areas[0] < 0.6 < areas[1] < 0.85 < areas[2] < 1.0


def test_the_block_size_of_the_writer_does_not_change_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"rows": 300, "days": 2, "dense": 2, "tables": [5, 50]}
    whole = prepare("synthetic-clicks", tmp_path / "whole", **options)
    monkeypatch.setattr(synthetic_clicks, "BLOCK_ROWS", 64)
    assert prepare("synthetic-clicks", tmp_path / "blocks", **options) == whole


@dataclass
class Histories:
    path: Path
    description: dict[str, Any]

    @cached_property
    def users(self) -> list[np.ndarray]:
        """Items from 0, as in the chain."""
        return np.split(np.load(self.path / "items.npy") - 1, np.load(self.path / "offsets.npy")[1:-1])

    @cached_property
    def chain(self) -> Chain:
        return Chain.planted(synthetic_histories.Options(**self.description["recipe"]))

    def scores(self, current: int) -> np.ndarray:
        """What comes after an item, by the definition: noise by popularity, else .4, .3, .2, .1 of its successors."""
        noise = self.description["recipe"]["noise"]
        scores = noise * self.chain.popularity
        for successor, share in zip(self.chain.successors[current], (0.4, 0.3, 0.2, 0.1), strict=True):
            scores[successor] += (1 - noise) * share
        return scores


@pytest.fixture(scope="module")
def planted_histories(tmp_path_factory: pytest.TempPathFactory) -> Histories:
    path = tmp_path_factory.mktemp("synthetic") / "histories"
    options: dict[str, Any] = {"users": 800, "items": 300, "interactions": 16_001, "noise": 0.25}
    return Histories(path, prepare("synthetic-histories", path, **options))


def test_histories_have_the_asked_number_of_interactions_and_no_item_twice(planted_histories: Histories) -> None:
    lengths = [len(items) for items in planted_histories.users]
    assert len(lengths) == 800
    assert sum(lengths) == 16_001
    assert min(lengths) >= 5
    assert max(lengths) <= 150
    assert np.mean(lengths) > np.median(lengths) + 1, "a few are long"
    assert all(len(np.unique(items)) == len(items) for items in planted_histories.users)


@pytest.mark.parametrize(("users", "items", "interactions"), [(7, 20, 35), (7, 20, 70), (7, 20, 69), (1, 41, 13)])
def test_lengths_are_exact_up_to_the_limits(users: int, items: int, interactions: int) -> None:
    options = synthetic_histories.Options(users=users, items=items, interactions=interactions)
    lengths = synthetic_histories.history_lengths(options)
    assert len(lengths) == users
    assert lengths.sum() == interactions
    assert lengths.min() >= 5
    assert lengths.max() <= items // 2


@pytest.mark.parametrize("seed", range(3))
def test_an_item_has_four_successors_and_is_none_of_them(seed: int) -> None:
    chain = Chain.planted(synthetic_histories.Options(items=20, interactions=40_000, seed=seed))
    assert chain.successors.shape == (20, 4)
    assert all(len({item, *row}) == 5 for item, row in enumerate(chain.successors.tolist()))
    assert chain.successors.min() >= 0
    assert chain.successors.max() == 19, "the last item can be one too"
    assert chain.popularity.sum() == pytest.approx(1.0)
    assert chain.popularity.min() > 0


def test_steps_follow_the_planted_chain(planted_histories: Histories) -> None:
    """Steps to each of the four successors, and by noise, against the exact probability given what was met."""
    expected, variance, found = np.zeros(5), np.zeros(5), np.zeros(5)
    for items in planted_histories.users:
        for place in range(1, len(items)):
            probability = planted_histories.scores(items[place - 1])
            probability[items[:place]] = 0.0
            probability /= probability.sum()
            successors = planted_histories.chain.successors[items[place - 1]]
            shares = np.append(probability[successors], 1 - probability[successors].sum())
            expected += shares
            variance += shares * (1 - shares)
            found += np.append(successors == items[place], items[place] not in successors)
    assert np.all(np.abs(found - expected) < 4 * np.sqrt(variance)), (found, expected)
    first_steps = [items[1] == planted_histories.chain.successors[items[0], 0] for items in planted_histories.users]
    assert np.mean(first_steps) == pytest.approx(0.4 * 0.75, abs=0.06)  # nothing met yet


@pytest.mark.parametrize(("split", "from_end"), [("test", 1), ("val", 2)])
def test_the_stated_best_is_the_score_of_the_planted_chain(
    planted_histories: Histories, split: str, from_end: int
) -> None:
    """Candidates sorted one by one, the target after its equals; pop100 by likelihood ratio."""
    places: dict[str, list[int]] = {"full": [], "pop100": [], "uni100": []}
    counts = np.bincount(np.concatenate(planted_histories.users), minlength=300)
    negatives = {protocol: Negatives(protocol, counts) for protocol in ("pop100", "uni100")}
    for user, items in enumerate(planted_histories.users):
        target, before = int(items[-from_end]), items[:-from_end].tolist()
        scores = planted_histories.scores(before[-1]) + 1e-12 * planted_histories.chain.popularity
        candidates = {
            "full": set(range(300)) - set(before),
            **{
                protocol: {target, *(drawn.draw(split, user, items + 1) - 1).tolist()}
                for protocol, drawn in negatives.items()
            },
        }
        for protocol, chosen in candidates.items():
            ratio = scores / np.maximum(counts, 1) if protocol == "pop100" else scores
            best_first = sorted(chosen, key=lambda item: (-ratio[item], item == target))
            places[protocol].append(best_first.index(target) + 1)
    truth = planted_histories.description["truth"][split]
    expected = {}
    for protocol, found in places.items():
        for k in (1, 5, 10):
            expected[f"{protocol}/hr@{k}"] = np.mean([place <= k for place in found])
            expected[f"{protocol}/ndcg@{k}"] = np.mean([(place <= k) / np.log2(place + 1) for place in found])
            expected[f"{protocol}/mrr@{k}"] = np.mean([(place <= k) / place for place in found])
    assert truth == pytest.approx(expected)


def test_ranking_by_popularity_alone_is_far_from_the_stated_best(planted_histories: Histories) -> None:
    hits = []
    for items in planted_histories.users:
        scores = planted_histories.chain.popularity.copy()
        scores[items[:-1]] = -1.0
        hits.append(items[-1] in np.argsort(-scores)[:10])
    assert np.mean(hits) < planted_histories.description["truth"]["test"]["full/hr@10"] - 0.3


def test_users_are_made_in_blocks_without_losing_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_histories, "SEEN_CELLS", 40 * 7)  # 7 users at once
    description = prepare("synthetic-histories", tmp_path / "d", users=25, items=40, interactions=200)
    users = Histories(tmp_path / "d", description).users
    assert len(users) == 25
    assert sum(map(len, users)) == 200
    assert all(len(np.unique(items)) == len(items) for items in users)
    assert len({tuple(items[:3]) for items in users}) > 20, "blocks do not repeat each other"


def test_too_few_items_for_100_negatives_leave_them_out_of_the_truth(tmp_path: Path) -> None:
    description = prepare("synthetic-histories", tmp_path / "d", users=10, items=60, interactions=80)
    assert {name.split("/")[0] for name in description["truth"]["test"]} == {"full"}


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("synthetic-histories", {"users": 10, "items": 20, "interactions": 49}, "interactions 49.* 50 to 100"),
        ("synthetic-histories", {"users": 10, "items": 20, "interactions": 101}, "interactions 101.* 50 to 100"),
        ("synthetic-histories", {"noise": 1.5}, "--noise"),
        ("synthetic-histories", {"users": 0}, "--users"),
        ("synthetic-histories", {"items": 19}, "--items"),
        ("synthetic-clicks", {"rows": 3}, "--rows"),
        ("synthetic-clicks", {"days": 1}, "--days"),
        ("synthetic-clicks", {"click_rate": 1.0}, "--click-rate"),
        ("synthetic-clicks", {"signal": 0.0}, "--signal"),
        ("synthetic-clicks", {"tables": []}, "--tables"),
        ("random-clicks", {"tables": [5, 0]}, "--tables"),
        ("random-clicks", {"dense": 0}, "--dense"),
        ("random-histories", {"random_size": 2}, "random-size 2: none of 10 users"),
        ("random-histories", {"random_user_count": 0}, "--random-user-count"),
    ],
)
def test_impossible_options_are_a_config_error_and_write_nothing(
    tmp_path: Path, name: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        prepare(name, tmp_path / "d", **options)
    assert list(tmp_path.iterdir()) == []


def test_random_clicks_are_uniform_ids_normal_values_and_fair_coins(tmp_path: Path) -> None:
    description = prepare("random-clicks", tmp_path / "d", rows=20_000, days=2, dense=2, tables=[4, 1000])
    data = Clicks(tmp_path / "d", description)
    dense, ids, labels = (data.files(part, 0, 1) for part in ("dense", "sparse", "labels"))
    assert dense.mean(axis=0) == pytest.approx([0, 0], abs=0.04)
    assert dense.var(axis=0) == pytest.approx([1, 1], abs=0.05)
    assert np.bincount(ids[:, 0]) == pytest.approx(np.full(4, 5000), abs=300)
    assert np.histogram(ids[:, 1], bins=10, range=(0, 1000))[0] == pytest.approx(np.full(10, 2000), abs=220)
    assert (ids[:, 1].min(), ids[:, 1].max()) == (0, 999)
    assert np.bincount(labels[:, 0]) == pytest.approx(np.full(2, 10_000), abs=350)
    assert description["truth"] == {"val": {"auroc": 0.5}, "test": {"auroc": 0.5}}


@dataclass
class RandomHistories:
    description: dict[str, Any]
    users: list[np.ndarray]
    times: list[np.ndarray]
    user_names: pl.DataFrame
    item_names: pl.DataFrame


def random_histories(path: Path, **options: Any) -> RandomHistories:
    description = prepare("random-histories", path, **options)
    items, times, offsets = (np.load(path / f"{name}.npy") for name in ("items", "timestamps", "offsets"))
    names = (pl.read_parquet(path / f"{name}.parquet") for name in ("users", "items"))
    return RandomHistories(description, np.split(items, offsets[1:-1]), np.split(times, offsets[1:-1]), *names)


def test_random_histories_rise_in_time_and_take_each_interaction_once(tmp_path: Path) -> None:
    data = random_histories(tmp_path / "d", random_user_count=12, random_item_count=30, random_size=400)
    assert all(np.all(np.diff(times) > 0) for times in data.times)
    assert sorted(np.concatenate(data.times).tolist()) == list(range(400))
    assert data.description["notes"] == []
    assert data.description["num_users"] == 12


def test_random_users_with_fewer_than_three_interactions_are_dropped_and_counted(tmp_path: Path) -> None:
    data = random_histories(tmp_path / "d", random_user_count=40, random_item_count=30, random_size=120)
    lengths = [len(items) for items in data.users]
    dropped = 120 - sum(lengths)
    assert min(lengths) == 3
    assert 0 < dropped <= 2 * (40 - len(lengths)), "a dropped user had one or two"
    assert data.description["notes"] == [f"dropped {dropped} interactions of users with fewer than 3"]


def test_random_items_that_are_rare_are_dropped_before_users(tmp_path: Path) -> None:
    draw = {"random_user_count": 20, "random_item_count": 60, "random_size": 300}
    every = random_histories(tmp_path / "every", **draw)
    kept = random_histories(tmp_path / "kept", **draw, min_item_count=5, min_user_count=12)
    is_common = np.array(every.item_names["count"]) >= 5
    common = [items[is_common[items - 1]] for items in every.users]
    assert [len(items) for items in kept.users] == [len(items) for items in common if len(items) >= 12]
    dropped = 300 - sum(map(len, kept.users))
    words = f"dropped {dropped} interactions of users with fewer than 12 or items with fewer than 5"
    assert kept.description["notes"] == [words]


def test_random_items_and_users_are_numbered_without_gaps_and_keep_their_names(tmp_path: Path) -> None:
    """60 items for 40 interactions: most do not occur, and get no number."""
    data = random_histories(tmp_path / "d", random_user_count=8, random_item_count=60, random_size=40)
    items = np.concatenate(data.users)
    assert (
        sorted(set(items.tolist()))
        == list(range(1, data.description["num_items"] + 1))
        == data.item_names["id"].to_list()
    )
    assert data.item_names["count"].to_list() == np.bincount(items)[1:].tolist()
    assert data.user_names["count"].to_list() == [len(items) for items in data.users]
    for names, most in ((data.item_names, 60), (data.user_names, 8)):
        originals = [int(name) for name in names["original_id"]]
        assert originals == sorted(set(originals))
        assert max(originals) < most
    assert all(re.fullmatch(r"item \d+", title) for title in data.item_names["title"])
