import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.commands.assemble import build_source
from recmill.config import load_config
from recmill.data import checks
from recmill.data.checks import ClickChecks, checked_items, value_problems
from recmill.data.click_rows import Block, ClickRows
from recmill.data.clicks import SplitRows
from recmill.data.opening import open_dataset
from recmill.errors import DataError
from recmill.schema import ClicksDescription, SparseFeature


def damage(path: Path, file: str, index: Any, value: float) -> None:
    values = np.load(path / file, mmap_mode="r+")
    values[index] = value
    values.flush()


@pytest.fixture
def copy(clicks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clicks, tmp_path / "copy"))


@pytest.fixture
def bad_item(histories: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(histories, tmp_path / "copy"))
    damage(path, "items.npy", 77, 201)
    return path


def described(sizes: list[int], multi_hot: list[int]) -> ClicksDescription:
    sparse = [SparseFeature(name=f"C{i + 1}", rows=rows) for i, rows in enumerate(sizes)]
    return ClicksDescription(
        name="by hand",
        made_by="a test",
        recipe={},
        files={},
        dense=["I1"],
        sparse=sparse,
        multi_hot=multi_hot,
        splits={},
    )


def block(ids: np.ndarray, dense: float = 0.0, label: int = 0, split: str = "train") -> Block:
    """Rows 100, 101, ... of day_0, which differ in their ids only."""
    count = len(ids)
    rows = ClickRows(np.full((count, 1), dense, np.float32), ids, np.full(count, label, np.int32))
    return Block(split, "day_0", range(100, 100 + count), rows)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bad_ids_are_counted_and_the_first_one_is_described(dtype: type) -> None:
    ids: np.ndarray = np.array([[0, 0, 4], [2, 4, 0], [3, 0, -1]], dtype=dtype)
    (bad,) = ClickChecks(described([3, 5], [1, 2])).find(block(ids))
    assert (bad.kind, bad.count, bad.value) == ("id", 2, 3)
    assert str(bad) == "day_0_sparse_multi_hot.npz: row 102, column C1: id 3 is not in 0..2 (table of 3 rows)"
    ids[2, 0] = 0
    (bad,) = ClickChecks(described([3, 5], [1, 2])).find(block(ids))
    assert (bad.count, bad.where) == (1, "row 102, column C2")


def test_tables_beyond_32_bits_take_every_int32_but_the_negative_ones() -> None:
    found = ClickChecks(described([2**40], [])).find(block(np.array([[2**31 - 1], [-1]], dtype=np.int32)))
    assert [(bad.count, bad.value) for bad in found] == [(1, -1)]


@pytest.mark.parametrize(
    ("split", "label", "fact"),
    [
        ("train", 0, None),
        ("val", 1, None),
        ("test", -1, "label -1 is neither 0 nor 1"),
        ("unlabelled", -1, None),
        ("unlabelled", 1, "label 1 is not -1"),
    ],
)
def test_labels_are_0_or_1_except_in_the_unlabelled_split(split: str, label: int, fact: str | None) -> None:
    found = ClickChecks(described([3], [])).find(block(np.zeros((2, 1), np.int64), label=label, split=split))
    assert [bad.fact for bad in found] == ([fact] if fact else [])


def test_all_kinds_of_bad_values_are_found_together() -> None:
    found = ClickChecks(described([3], [])).find(block(np.full((2, 1), 9), dense=np.inf, label=2))
    assert [(bad.kind, bad.count) for bad in found] == [("id", 2), ("dense", 2), ("label", 2)]


@pytest.mark.parametrize("rows", [np.arange(500, 600), np.arange(500, 600)[::-1]])
@pytest.mark.parametrize(("column", "value"), [(2, 300), (0, -1), (3, 2000)])
def test_training_refuses_a_bad_id_with_its_location(copy: Path, rows: np.ndarray, column: int, value: int) -> None:
    damage(copy, "day_1_sparse.npy", (7, column), value)
    with pytest.raises(DataError) as caught:
        SplitRows(open_dataset(copy), "train").take(rows)
    assert f"{copy}/day_1_sparse.npy: row 7, column C{column + 1}: id {value} is not in 0.." in str(caught.value)


@pytest.mark.parametrize(
    ("file", "index", "value", "fact"),
    [
        ("day_0_dense.npy", (42, 1), np.nan, "day_0_dense.npy: row 42, column I2: nan is not a finite number"),
        ("day_0_labels.npy", (42, 0), 7, "day_0_labels.npy: row 42: label 7 is neither 0 nor 1"),
    ],
)
def test_training_and_verify_refuse_bad_dense_values_and_labels(
    copy: Path, file: str, index: Any, value: float, fact: str
) -> None:
    damage(copy, file, index, value)
    with pytest.raises(DataError, match=fact):
        SplitRows(open_dataset(copy), "train").take(np.arange(100))
    assert value_problems(open_dataset(copy)) == [fact]


@pytest.mark.parametrize("value", [-1, 0, 201])
def test_an_unknown_item_is_named_with_its_row(
    histories: Path, tmp_path: Path, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(histories, tmp_path / "copy"))
    damage(path, "items.npy", 77, value)
    monkeypatch.setattr(checks, "_ITEMS_AT_ONCE", 10)
    fact = f"items.npy: row 77: item {value} is not in 1..200"
    with pytest.raises(DataError, match=fact):
        checked_items(open_dataset(path))
    assert value_problems(open_dataset(path)) == [fact]


def test_training_refuses_an_unknown_item_before_its_first_batch(bad_item: Path, bert4rec: dict[str, Any]) -> None:
    config = load_config({**bert4rec, "data": {"path": str(bad_item)}})
    with pytest.raises(DataError, match="row 77: item 201 is not in 1"):
        build_source(config, open_dataset(bad_item), 0, 1)
