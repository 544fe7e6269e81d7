"""New rows of Criteo's logs are encoded as `prepare criteo` encoded them."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.data.click_rows import split_blocks
from recmill.data.opening import open_dataset
from recmill.datasets.criteo.encoding import CriteoEncoder
from recmill.datasets.own_clicks.values import RawRows
from recmill.errors import DataError
from tests.criteo_raw import COLUMNS, day_rows, write_days

NAMES = ["label", *(f"I{i + 1}" for i in range(13)), *COLUMNS]

RULES: list[dict[str, Any]] = [
    {},
    {"dense": "log-min", "min_frequency": 3, "table_size": [20]},
    {"dense": "log1-clip", "ids": "mod", "table_size": [50], "format": "parquet"},
    {"ids": "hash64", "table_size": [50]},
    {"ids": "hash64", "format": "parquet"},
    {"table_size": [40], "multi_hot": [2], "multi_hot_distribution": "pareto", "seed": 3},
    {"compat": "torchrec-fixed"},
    {"compat": "mlperf-v2"},
    {"compat": "oneflow"},
    {"format": "bin"},
]


def raw_rows(directory: Path, day: int) -> RawRows:
    rows = day_rows(directory, day)
    frame = pl.DataFrame(rows, schema=dict.fromkeys(NAMES, pl.String), orient="row")
    return RawRows(frame, f"day_{day}", range(1, len(rows) + 1))


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_rows_of_the_last_day_become_the_arrays_that_were_prepared(rules: dict[str, Any], tmp_path: Path) -> None:
    smallest = 0 if rules.get("compat") == "oneflow" else -1
    write_days(tmp_path / "raw", [200, 150], smallest=smallest)
    prepare("criteo", tmp_path / "data", input=str(tmp_path / "raw"), **rules)
    dataset = open_dataset(tmp_path / "data")
    found = CriteoEncoder(dataset).encode(raw_rows(tmp_path / "raw", 1))
    splits = ["test", "val"] if rules.get("compat") == "oneflow" else ["val", "test"]
    prepared = [block.rows for block in split_blocks(dataset, splits)]
    assert np.array_equal(found.dense, np.concatenate([rows.dense for rows in prepared]))
    assert np.array_equal(found.ids, np.concatenate([rows.ids for rows in prepared]))
    assert np.array_equal(found.labels, np.concatenate([rows.labels for rows in prepared]))


def test_rows_may_lack_labels_and_frames_may_hold_numbers(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [200, 150], smallest=-1)
    prepare("criteo", tmp_path / "data", input=str(tmp_path / "raw"))
    encoder = CriteoEncoder(open_dataset(tmp_path / "data"))
    rows = raw_rows(tmp_path / "raw", 1)
    expected = encoder.encode(rows)
    gaps = rows.frame.with_columns(label=pl.Series([None, *rows.frame["label"][1:]]))
    found = encoder.encode(RawRows(gaps, "x", rows.numbers), may_be_missing=True)
    assert found.labels.tolist() == [-1, *expected.labels[1:].tolist()]
    with pytest.raises(DataError, match="x: row 1, column label: no label"):
        encoder.encode(RawRows(gaps, "x", rows.numbers))
    floats = rows.frame.with_columns(pl.col("I1", "I2").replace("", None).cast(pl.Float64)).drop("label")
    found = encoder.encode(RawRows(floats, "x", rows.numbers), with_labels=False)
    assert np.array_equal(found.dense, expected.dense)
    assert set(found.labels.tolist()) == {-1}


def test_a_bad_value_is_named(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [200, 150], smallest=-1)
    prepare("criteo", tmp_path / "data", input=str(tmp_path / "raw"))
    encoder = CriteoEncoder(open_dataset(tmp_path / "data"))
    rows = raw_rows(tmp_path / "raw", 1)

    def refused(column: str, values: list[Any], text: str) -> None:
        frame = rows.frame.with_columns(pl.Series(column, values + rows.frame[column].to_list()[len(values) :]))
        with pytest.raises(DataError, match=text):
            encoder.encode(RawRows(frame, "x", range(11, 161)))

    refused("C3", ["", "xyz"], "x: row 12, column C3: 'xyz' is not a hexadecimal id")
    refused("I2", ["1.5"], "x: row 11, column I2: '1.5' is not a whole number")
    refused("I2", ["1", "2\t3"], r"x: row 12, column I2: '2\\t3' is no value of Criteo's logs")
    with pytest.raises(DataError, match="x: column C1 holds Int64, not hexadecimal text"):
        encoder.encode(RawRows(rows.frame.with_columns(C1=pl.lit(1, pl.Int64)), "x", rows.numbers))


def test_a_dataset_whose_files_have_different_transforms_is_refused(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [200, 150], smallest=-1)
    prepare("criteo", tmp_path / "data", input=str(tmp_path / "raw"), compat="torchrec")
    with pytest.raises(DataError, match=r"another transform.*--overwrite and --compat torchrec-fixed"):
        CriteoEncoder(open_dataset(tmp_path / "data"))
