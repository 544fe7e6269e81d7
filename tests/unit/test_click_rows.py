from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest

from recmill.data import click_rows
from recmill.data.click_rows import Block, StoredDay, block_decoder, split_blocks
from recmill.errors import DataError
from recmill.schema import ClicksDescription, Dataset, FileInfo, RowRange, SparseFeature

ROWS = 100


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """100 rows in blocks of 8: row n has dense value n, id 2 * n and label n % 2."""
    monkeypatch.setattr(click_rows, "BLOCK_ROWS", 8)
    numbers = np.arange(ROWS)
    write(tmp_path, label=numbers % 2, I1=numbers.astype(np.float32), C1=numbers * 2)
    return described(tmp_path, layout="parquet")


def write(path: Path, **columns: Any) -> None:
    pl.DataFrame(columns).write_parquet(path / "day.parquet")


def described(path: Path, **changes: Any) -> Dataset:
    description = ClicksDescription(
        name="by hand",
        made_by="a test",
        recipe={},
        files={name: FileInfo(bytes=0, rows=ROWS, xxh3="") for name in ("day.parquet", "day_labels.npy")},
        dense=["I1"],
        sparse=[SparseFeature(name="C1", rows=200)],
        splits={"train": [RowRange(day="day", start=3, stop=90)], "val": [RowRange(day="day", start=90, stop=ROWS)]},
    )
    return Dataset(path, description.model_copy(update=changes), fingerprint="")


@pytest.mark.parametrize(
    "rows",
    [slice(0, ROWS), slice(5, 23), slice(8, 16), np.array([0]), np.array([99, 3, 50, 3]), np.arange(ROWS)[::-1]],
)
def test_parquet_rows_come_in_the_requested_order(parquet: Dataset, rows: Any) -> None:
    found = StoredDay(parquet, "day").take(rows)
    expected = np.arange(ROWS)[rows]
    assert found.dense[:, 0].tolist() == expected.tolist()
    assert found.ids[:, 0].tolist() == (expected * 2).tolist()
    assert found.labels.tolist() == (expected % 2).tolist()


def test_blocks_of_a_split_hold_its_rows_in_order(parquet: Dataset) -> None:
    blocks = list(split_blocks(parquet, ["val", "train", "test"]))
    assert [(block.split, block.numbers) for block in blocks[:3]] == [
        ("val", range(90, 98)),
        ("val", range(98, 100)),
        ("train", range(3, 11)),
    ]
    assert [n for block in blocks for n in block.numbers] == [*range(90, 100), *range(3, 90)]
    assert all(_dense(block) == list(block.numbers) for block in blocks)


def _dense(block: Block) -> list[float]:
    return block.rows.dense[:, 0].tolist()


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Mock:
    counted = Mock(side_effect=pl.scan_parquet)
    monkeypatch.setattr(pl, "scan_parquet", counted)
    return counted


def test_a_decoder_keeps_the_blocks_that_were_used_last(parquet: Dataset, scanned: Mock) -> None:
    decode = block_decoder(parquet.clicks, 2)
    file = parquet.path / "day.parquet"
    first = decode(file, 0)
    decode(file, 8)
    assert decode(file, 0) is first
    decode(file, 16)
    assert decode(file, 0) is first
    assert scanned.call_count == 3
    decode(file, 8)
    assert scanned.call_count == 4


def test_a_block_is_decoded_once_while_it_is_cached(parquet: Dataset, scanned: Mock) -> None:
    day = StoredDay(parquet, "day", block_decoder(parquet.clicks, 3))
    for _ in range(4):
        day.take(np.array([0, 8, 16, 1, 9, 17]))
    assert scanned.call_count == 1 + 3, "the columns, and three blocks"


@pytest.mark.parametrize(
    ("columns", "fact"),
    [
        ({"label": [0] * ROWS, "C1": [0] * ROWS}, r"no column I1; it has label, C1"),
        ({"label": [0] * ROWS, "I1": [0.0] * ROWS, "C1": [0] * 42 + [None] * 58}, r"row 42, column C1: no value"),
        (
            {"label": [0] * ROWS, "I1": [0.0] * ROWS, "C1": ["a"] * ROWS},
            r"column C1 is String, not numbers",
        ),
        ({"label": [0] * 90, "I1": [0.0] * 90, "C1": [0] * 90}, r"day.parquet: 2 rows from row 88 on, expected 8"),
    ],
)
def test_parquet_files_with_other_columns_rows_or_values_are_refused(
    parquet: Dataset, columns: dict[str, Any], fact: str
) -> None:
    write(parquet.path, **columns)
    with pytest.raises(DataError, match=fact):
        StoredDay(parquet, "day").take(slice(0, ROWS))


def test_a_file_that_is_no_parquet_is_refused(parquet: Dataset) -> None:
    (parquet.path / "day.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file that can be read"):
        StoredDay(parquet, "day")


def test_a_corrupt_block_of_a_parquet_file_names_the_file(parquet: Dataset) -> None:
    day = StoredDay(parquet, "day")
    content = bytearray((parquet.path / "day.parquet").read_bytes())
    content[4:40] = bytes(36)  # the beginning of the first column
    (parquet.path / "day.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"day.parquet: not a Parquet file that can be read \(.+\)\. Prepare it again"):
        day.take(slice(0, ROWS))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda ids: ids[:-1], r"int32 \[99, 2\], expected i4 or i8 \[100, 2\]"),
        (lambda ids: ids.astype(np.float32), r"float32 \[100, 2\], expected i4 or i8"),
        (np.asfortranarray, r"int32 \[100, 2\], expected i4 or i8"),
    ],
)
def test_multi_hot_ids_of_another_shape_or_type_are_refused(tmp_path: Path, change: Any, fact: str) -> None:
    ids = np.arange(2 * ROWS, dtype=np.int32).reshape(ROWS, 2)
    np.save(tmp_path / "day_dense.npy", np.zeros((ROWS, 1), np.float32))
    np.save(tmp_path / "day_labels.npy", np.zeros((ROWS, 1), np.int32))
    arrays: dict[str, Any] = {"0": ids}
    np.savez(tmp_path / "day_sparse_multi_hot.npz", **arrays)
    dataset = described(tmp_path, multi_hot=[2])
    assert np.array_equal(StoredDay(dataset, "day").take(slice(3, 5)).ids, ids[3:5])
    arrays["0"] = change(ids)
    np.savez(tmp_path / "day_sparse_multi_hot.npz", **arrays)
    with pytest.raises(DataError, match=fact):
        StoredDay(dataset, "day")
