"""AUROC over real processes against scikit-learn's of all scores together."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import recmill
from recmill.errors import ConfigError
from recmill.metrics.auc import auroc_over_ranks
from recmill.world import World, joined_world

from ..group import in_group, train
from .runs import close_to, losses


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every rank makes all cases and takes its slice of the rows."""
    generator = np.random.default_rng(11)
    normal = generator.normal(size=30_011).astype(np.float32)
    clicks = generator.random(30_011) < 1 / (1 + np.exp(2 - normal))
    rare = np.zeros(30_011, bool)
    rare[7] = True
    few = np.array([0.5, 0.5, -1.0], np.float32)
    return {
        "no ties": (normal, clicks),
        "heavy ties": (np.round(normal), clicks),
        "all equal": (np.zeros_like(normal), clicks),
        "one score for nearly all": (np.where(generator.random(30_011) < 0.99, 3, normal).astype(np.float32), clicks),
        "skewed by rank": (np.sort(normal), clicks[np.argsort(normal)]),
        "skewed by size": (np.exp(normal * 15), clicks),
        "one click": (normal, rare),
        "fewer rows than ranks have samples": (few, np.array([True, False, False])),
        "one row": (few[:1], np.array([True])),
        "one class": (normal, np.ones_like(clicks)),
        "none": (few[:0], np.empty(0, bool)),
    }


class Watched(World):
    """Asserts that no process gets many more entries than its share, which bounds its memory."""

    def exchange(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        received = super().exchange(parts)
        (entries,) = self.sum([float(sum(map(len, parts)))])
        assert sum(map(len, received)) <= 1.1 * entries / self.size + self.size
        return received


def measure() -> list[dict[str, float | None]] | None:
    """Return the values that each rank found."""
    with joined_world("cpu") as joined:
        world = Watched(**vars(joined))
        found = {}
        for name, (scores, labels) in cases().items():
            low, high = (len(scores) * part // world.size for part in (world.rank, world.rank + 1))
            found[name] = auroc_over_ranks(scores[low:high], labels[low:high], world)
        return world.gather(found)


@pytest.mark.parametrize("size", [1, 3])
def test_auroc_over_ranks_equals_scikit_learns_of_all_scores(size: int) -> None:
    found = in_group(size, measure)
    assert len(found) == size
    assert all(values == found[0] for values in found), "the same on every rank"
    for name, (scores, labels) in cases().items():
        if len(set(labels.tolist())) < 2:
            assert found[0][name] is None, name
        else:
            assert found[0][name] == pytest.approx(roc_auc_score(labels, scores.astype(np.float64)), abs=1e-12), name


SCHEMA = """
[label]
column = "click"

[split]
by = "rows"
val = 0.2
test = 0.2

[keep]
columns = ["user"]
weight = "weight"

[[feature]]
column = "user"
type = "categorical"

[[feature]]
column = "x"
type = "numeric"
"""


def weighted_log(directory: Path) -> pl.DataFrame:
    """Prepare a dataset in `directory`/data and return its log. A quarter of the rows have weight 0."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=600)
    frame = pl.DataFrame(
        {
            "click": (generator.random(600) < 1 / (1 + np.exp(-2 * x))).astype(int),
            "user": generator.integers(0, 20, 600),
            "x": x,
            "weight": generator.choice([0.0, 0.5, 1.0, 4.0], 600),
        }
    )
    frame.write_csv(directory / "log.csv")
    (directory / "schema.toml").write_text(SCHEMA)
    recmill.prepare(
        "clicks", directory / "data", input=str(directory / "log.csv"), schema=str(directory / "schema.toml")
    )
    return frame


def test_weights_and_groups_reach_losses_and_metrics_for_any_number_of_processes(tmp_path: Path) -> None:
    """Metrics against scikit-learn's, from the scores of `predict`; a row of weight 0 counts nowhere."""
    frame = weighted_log(tmp_path)
    config = {
        "data": {"path": str(tmp_path / "data")},
        "model": {"name": "deepfm", "embedding_dim": 6, "deep_mlp": [8], "batch_norm": True},
        "optim": {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "sgd", "lr": 0.1}},
        "train": {"device": "cpu", "global_batch_size": 50, "log_every_steps": 1},
        "eval": {"group": "user"},
    }
    results = {procs: train(config, tmp_path / f"{procs}", procs=procs) for procs in (1, 2, 3)}
    for procs in (2, 3):
        assert losses(tmp_path / f"{procs}") == pytest.approx(losses(tmp_path / "1"), rel=2e-5)
        assert results[procs]["test"] == close_to(results[1]["test"], rel=1e-4)
    last = frame[480:]
    last.write_csv(tmp_path / "test.csv")
    recmill.predict(tmp_path / "1", tmp_path / "test.csv", tmp_path / "scores.parquet")
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy().astype(np.float64)
    labels, weights, users = (last[name].to_numpy() for name in ("click", "weight", "user"))
    found = results[1]["test"]
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights), abs=1e-6)
    assert found["logloss"] == pytest.approx(log_loss(labels, scores, sample_weight=weights), rel=1e-5)
    assert found["rows"] == int((weights > 0).sum())
    areas = {}
    for user in set(users):
        own = (users == user) & (weights > 0)
        if len(set(labels[own])) == 2:
            areas[user] = roc_auc_score(labels[own], scores[own], sample_weight=weights[own]), weights[own].sum()
    assert found["gauc"] == pytest.approx(
        sum(area * rows for area, rows in areas.values()) / sum(rows for _, rows in areas.values()), abs=1e-6
    )
    with pytest.raises(ConfigError, match=r"no kept column 'usr'; it keeps user. Name it in keep.columns"):
        recmill.train(config | {"eval": {"group": "usr"}}, tmp_path / "bad")


def test_rows_of_weight_0_are_not_trained_wherever_the_tables_are(tmp_path: Path) -> None:
    """L2 changes every row that is looked up. A batch of one row of weight 0 would have no loss."""
    train_rows = weighted_log(tmp_path)[:360]
    config = {
        "data": {"path": str(tmp_path / "data")},
        "model": {"name": "fm", "embedding_dim": 4},
        "optim": {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "sgd", "lr": 0.2, "l2": 0.2}},
        "train": {"device": "cpu", "global_batch_size": 5, "log_every_steps": 1, "num_epochs": 1},
    }
    train(config, tmp_path / "1")
    train(config, tmp_path / "2", procs=2, overrides=["sharding.default=data_parallel"])
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-5)
    train(config, tmp_path / "single", overrides=["train.global_batch_size=1"])
    assert len(losses(tmp_path / "single")) == (train_rows["weight"] > 0).sum()
