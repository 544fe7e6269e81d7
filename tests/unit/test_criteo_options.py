"""The options of `prepare criteo`: contradictions are refused before any work, and every default is decided."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare
from recmill.config.options import parse_bytes
from recmill.errors import ConfigError

from ..criteo_raw import dense_of, random_rows, stored, write_days, write_rows


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"ids": "mod"}, "--ids mod needs --table-size"),
        ({"ids": "mod", "table_size": [10], "min_frequency": 2}, "--min-frequency is for contiguous ids, not for mod"),
        ({"ids": "hash64", "id_order": "frequency"}, "--id-order is for contiguous ids, not for hash64"),
        ({"table_size": [10, 20]}, "--table-size takes one number or 26, not 2"),
        ({"table_size": [2]}, "--table-size: should be greater than or equal to 3"),
        ({"table_size": [2**32 + 1]}, "--table-size: should be less than or equal to 4294967296"),
        ({"multi_hot": [3] * 25}, "--multi-hot takes one number or 26, not 25"),
        ({"multi_hot": [0]}, "--multi-hot: should be greater than 0"),
        ({"multi_hot_distribution": "pareto"}, "--multi-hot-distribution needs --multi-hot"),
        ({"multi_hot": [2], "format": "parquet"}, "--multi-hot is written as npy"),
        ({"multi_hot": [2], "ids": "hash64"}, "--multi-hot with hash64 ids needs --table-size"),
        ({"multi_hot": [2], "compat": "oneflow"}, "--compat oneflow has no --multi-hot"),
        ({"max_bad_rows": 5}, "--max-bad-rows needs --on-bad-row skip"),
        ({"spark_master": "local"}, "--spark-master needs --engine spark"),
        ({"engine": "spark", "format": "npy"}, "--engine spark writes parquet"),
        ({"engine": "spark", "multi_hot": [2]}, "--engine spark has no --multi-hot"),
        ({"engine": "spark", "id_order": "first-seen"}, "--engine spark has no first-seen order"),
        ({"engine": "spark", "memory_budget": "4GB"}, "--memory-budget is not for --engine spark"),
        ({"engine": "spark", "shuffle": "day"}, "--engine spark shuffles over all days (global) or not at all"),
        ({"compat": "torchrec", "ids": "hash64"}, "--compat torchrec has no hash64 ids"),
        ({"compat": "mlperf-v2", "ids": "mod"}, "--compat mlperf-v2 has no mod ids"),
        ({"compat": "oneflow", "ids": "contiguous"}, "--compat oneflow has no contiguous ids"),
        ({"compat": "oneflow", "table_size": [10 + c for c in range(26)]}, "--compat oneflow has one --table-size"),
        ({"compat": "torchrec", "id_order": "frequency"}, "--compat torchrec numbers ids in order of occurrence"),
        ({"compat": "torchrec", "format": "parquet"}, "--compat torchrec writes npy"),
        ({"compat": "oneflow", "format": "npy"}, "--compat oneflow writes parquet"),
        ({"compat": "torchrec", "shuffle": "day"}, "--compat torchrec shuffles over all days (global) or not at all"),
        ({"compat": "torchrec", "dense": "log3"}, "--compat torchrec means --dense log-min"),
        ({"compat": "mlperf-v2", "dense": "log2"}, "--compat mlperf-v2 means --dense log3"),
        ({"compat": "torchrec", "table_size": [100]}, "--compat torchrec applies table sizes when it loads"),
        ({"compat": "torchrec", "ids": "mod", "shuffle": "global"}, "--shuffle global keeps 31 bits of an id"),
        ({"compat": "oneflow", "ids": "hash64", "table_size": [9]}, "--compat oneflow has no --table-size for hash64"),
        ({"multi_hot": [2], "ids": "mod", "table_size": [2**32]}, "--multi-hot writes 32-bit ids"),
        ({"engine": "spark", "compat": "torchrec", "format": "parquet"}, "--engine spark has no first-seen order"),
        ({"val_fraction": 0.1}, "--val-fraction 0.1: with 3 days the last one is for val and test"),
        ({"val_fraction": 0.1, "last_day": "val-first"}, "--val-fraction 0.1: with 3 days the last one is"),
        ({"val_fraction": 0.5}, "--val-fraction: should be less than 0.5"),
        ({"memory_budget": "511MB"}, "--memory-budget 511MB: 512MB is the minimum"),
        ({"memory_budget": "much"}, "--memory-budget 'much': expected a size like 4GB"),
        ({"memory_budget": f"{'10' * 200}GB"}, "--memory-budget '10101"),
        ({"seed": -1}, "--seed: should be greater than or equal to 0"),
        ({"seed": 2**32}, "--seed: should be less than"),
        ({"shuffel": "day"}, "Did you mean 'shuffle'"),
        ({"ids": "hash"}, "--ids: should be 'contiguous', 'mod' or 'hash64'"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_is_written(
    options: dict[str, Any], fact: str, logs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(fact)):
        prepare("criteo", tmp_path / "d", input=logs, **options)
    assert list(tmp_path.iterdir()) == []


def test_all_contradictions_are_reported_at_once(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("criteo", tmp_path / "d", input=logs, ids="hash64", min_frequency=2, max_bad_rows=3, table_size=[5, 6])
    assert len(str(caught.value).splitlines()) == 3


def test_a_half_of_the_last_day_needs_two_days(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [20])
    with pytest.raises(ConfigError, match="--last-day val-first needs two days or more"):
        prepare("criteo", tmp_path / "d", input=tmp_path / "raw", last_day="val-first")


def test_default_dense_rules_are_log3_for_days_and_log_min_for_kaggle(logs: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "kaggle" / "train.txt", random_rows(30, 5, smallest=-3))
    kaggle = prepare("criteo", tmp_path / "k", input=tmp_path / "kaggle")
    days = prepare("criteo", tmp_path / "d", input=logs)
    assert (kaggle["recipe"]["dense"], days["recipe"]["dense"]) == ("log-min", "log3")
    numbers = dense_of(random_rows(30, 5, smallest=-3))
    expected = np.log(numbers - numbers.min() + 2.0)
    np.testing.assert_allclose(stored(tmp_path / "k", "train_dense"), expected, rtol=3e-7)


def test_the_recipe_holds_every_decision_and_no_path(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs)
    text = (tmp_path / "d" / "dataset.json").read_text()
    recipe = json.loads(text)["recipe"]
    assert recipe["ids"] == "contiguous"
    assert recipe["id_order"] == "frequency"
    assert list(recipe["files"]) == ["day_0", "day_1", "day_2"]
    assert str(logs) not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("512MB", 512_000_000), ("1.5 gb", 1_500_000_000), ("2KiB", 2048), ("1GiB", 2**30), ("1T", 10**12)],
)
def test_sizes_are_decimal_unless_they_say_binary(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory-budget") == expected


def test_compat_defaults_are_those_of_the_originals(logs: Path, tmp_path: Path) -> None:
    names = ("ids", "id_order", "dense", "shuffle", "format", "last_day", "table_size")
    expected = {
        "torchrec": ("contiguous", "first-seen", "log-min", "none", "npy", "val-first", []),
        "mlperf-v2": ("contiguous", "first-seen", "log3", "global", "npy", "val-first", []),
        "oneflow": ("mod", "first-seen", "log2", "global", "parquet", "test-first", [40_000_000] * 26),
    }
    for compat, values in expected.items():
        recipe = prepare("criteo", tmp_path / compat, input=logs, compat=compat)["recipe"]  # type: ignore[arg-type]
        assert tuple(recipe[name] for name in names) == values
