"""Multi-hot ids that are made while loading equal stored ones, in batches and in complete runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare, train
from recmill.commands import assemble
from recmill.config import load_config
from recmill.data.clicks import ClickSource
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, ResourceError
from recmill.schema import ClicksDescription

from .. import group
from ..criteo_raw import write_days
from .runs import close_to, losses

Config = dict[str, Any]
SIZES = [1 + (5 * column) % 4 for column in range(26)]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs") / "raw"
    write_days(directory, [300, 257, 101], smallest=-1)
    return directory


@pytest.fixture(scope="module")
def one_hot(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "one"
    prepare("criteo", path, input=raw)
    return path


@pytest.fixture
def config(dlrm: Config, one_hot: Path) -> Config:
    """6 batches an epoch, the last of 57 rows."""
    return dlrm | {
        "data": {"path": str(one_hot), "multi_hot": {"sizes": SIZES}},
        "train": {"device": "cpu", "global_batch_size": 100, "log_every_steps": 1},
        "eval": {"every_steps": 100},
        "checkpoint": {"every_steps": 100},
    }


def source(config: Config, rank: int = 0, size: int = 1) -> ClickSource:
    checked = load_config(config)
    source = assemble.build_source(checked, assemble.open_matching_dataset(checked), rank, size)
    assert isinstance(source, ClickSource)
    return source


def ids_of(batches: Iterator[Any]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(b.sparse.values().tolist(), b.sparse.lengths().tolist(), b.weights_B.tolist()) for b in batches]


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_batches_are_those_of_the_stored_form(distribution: Any, config: Config, raw: Path, tmp_path: Path) -> None:
    config["data"]["multi_hot"] |= {"distribution": distribution, "seed": 5}
    prepare("criteo", tmp_path / "d", input=raw, multi_hot=SIZES, multi_hot_distribution=distribution, seed=5)
    stored = config | {"data": {"path": str(tmp_path / "d")}}
    for rank in range(2):
        ours, theirs = source(config, rank, 2), source(stored, rank, 2)
        assert ids_of(ours.train_batches(1, 2)) == ids_of(theirs.train_batches(1, 2))
        assert ids_of(ours.eval_batches("val")) == ids_of(theirs.eval_batches("val"))


def test_tables_that_are_too_small_keep_their_one_id(config: Config, one_hot: Path) -> None:
    """The reference's tables of 0: one number for all, and 1 for a table of fewer than 20 rows."""
    description = open_dataset(one_hot).description
    assert isinstance(description, ClicksDescription)
    rows = [feature.rows for feature in description.sparse]
    assert 20 in rows
    expected = [3 if count >= 20 else 1 for count in rows]
    assert {1, 3} == set(expected)
    config["data"]["multi_hot"] = {"sizes": [3], "min_table_size": 20}
    few = source(config)
    config["data"]["multi_hot"] = {"sizes": expected}
    assert ids_of(few.train_batches(0, 0)) == ids_of(source(config).train_batches(0, 0))
    (_, lengths, weights), *_ = ids_of(few.train_batches(0, 0))
    assert lengths == np.repeat(expected, len(weights)).tolist()


def test_a_run_equals_that_on_stored_ids_and_counts_what_it_was_trained_on(
    config: Config, raw: Path, tmp_path: Path
) -> None:
    """8 steps, one epoch and 2 batches: 4 by two processes, the rest by one."""
    prepare("criteo", tmp_path / "d", input=raw, multi_hot=SIZES)
    config["train"] |= {"num_epochs": 2, "max_steps": 8}
    stored = config | {"data": {"path": str(tmp_path / "d")}}
    group.train(stored, tmp_path / "stored")
    group.train(config, tmp_path / "run", procs=2, overrides=["train.max_steps=4"])
    assert not (tmp_path / "run" / "frequencies.npz").exists()
    collect = ["data.multi_hot.collect_frequencies=true"]
    results = group.train(config, tmp_path / "run", overrides=collect)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "stored"), rel=2e-5)
    assert group.evaluate(tmp_path / "run") == close_to(results["test"], rel=1e-6)
    group.train(config, tmp_path / "two", procs=2, overrides=collect)
    with np.load(tmp_path / "run" / "frequencies.npz") as one, np.load(tmp_path / "two" / "frequencies.npz") as two:
        counted = {name: one[name] for name in one.files}
        assert all((counted[name] == two[name]).all() for name in two.files)
    expected = {name: np.zeros_like(count) for name, count in counted.items()}
    batches = [*source(stored).train_batches(0, 0), *list(source(stored).train_batches(1, 0))[:2]]
    for batch in batches:
        for name, size in zip(batch.sparse.keys(), SIZES, strict=True):
            ids = batch.sparse[name].values().numpy().reshape(-1, size)
            expected[f"{name}.before"] += np.bincount(ids[:, 0], minlength=len(expected[f"{name}.before"]))
            expected[f"{name}.after"] += np.bincount(ids.ravel(), minlength=len(expected[f"{name}.after"]))
    assert len(expected) == 52
    assert all((counted[name] == count).all() for name, count in expected.items())
    assert expected["C26.before"].sum() == 557 + 200


@pytest.mark.parametrize(
    ("multi_hot", "expected"),
    [
        ({"sizes": [3, 2]}, r"'data.multi_hot.sizes': 2 numbers for 26 features, C1 to C26. Give one for each"),
        ({"sizes": [3] * 25 + [-1]}, r"'data.multi_hot.sizes.25': should be greater than 0, got -1"),
        ({"sizes": [0]}, r"'data.multi_hot.sizes.0': should be greater than 0, got 0"),
        ({"sizes": [2], "distribution": "normal"}, r"unknown value 'normal'"),
        ({"min_table_size": 5}, r"data.multi_hot.min_table_size without data.multi_hot.sizes does nothing"),
        ({"collect_frequencies": True}, r"collect_frequencies without data.multi_hot.sizes does nothing"),
    ],
)
def test_sizes_that_do_not_fit_are_config_errors(
    multi_hot: Config, expected: str, config: Config, tmp_path: Path
) -> None:
    config["data"]["multi_hot"] = multi_hot
    with pytest.raises(ConfigError, match=expected):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_that_it_does_not_fit_is_a_config_error(
    config: Config, bert4rec: Config, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("criteo", tmp_path / "d", input=raw, multi_hot=[2])
    with pytest.raises(ConfigError, match=r"holds several ids per row already. Remove it"):
        train(config, tmp_path / "run", overrides=[f"data.path={tmp_path / 'd'}"])
    with pytest.raises(ConfigError, match=r"'data.train_on_validation' is for histories, and these are clicks"):
        train(config, tmp_path / "run", overrides=["data.multi_hot.sizes=[]", "data.train_on_validation=true"])
    with pytest.raises(ConfigError, match=r"'data.multi_hot.sizes' is for clicks, and these are histories"):
        train(bert4rec, tmp_path / "run", overrides=["data.multi_hot.sizes=[2]"])
    monkeypatch.setattr(assemble, "memory_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match=r"of ids that belong together, and this machine has 0.0 GB. Store them"):
        train(config, tmp_path / "run")
