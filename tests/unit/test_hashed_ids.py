"""Ids by modulo and by hash, against plain Python and the xxhash package."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import xxhash

from recmill import prepare, rng
from recmill.data.clicks import ClickSource
from recmill.data.opening import open_dataset
from recmill.data.share import Batching
from recmill.errors import DataError

from ..criteo_raw import day_rows, ids_of, sparse, stored, write_rows


def sparks_xxhash64(text: str | None, column: int) -> int:
    """xxhash64(text, column) as Spark chains it: the hash of one value is the seed of the next; NULL leaves the seed.

    The integer is hashed by the published algorithm's tail for 4 bytes.
    """
    word = 2**64 - 1
    p1, p2, p3, p5 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5
    seed = 42 if text is None else xxhash.xxh64_intdigest(text.encode(), seed=42)
    h = (seed + p5 + 4) & word
    h ^= ((column & 0xFFFFFFFF) * p1) & word
    h = ((h << 23 | h >> 41) * p2 + p3) & word
    h = ((h ^ h >> 33) * p2) & word
    h = ((h ^ h >> 29) * p3) & word
    h ^= h >> 32
    return h


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_the_formula_for_an_integer_is_xxhashs_own() -> None:
    number = (17).to_bytes(4, "little")
    assert xxhash.xxh64_intdigest(number, seed=xxhash.xxh64_intdigest(b"0000abcd", seed=42)) == sparks_xxhash64(
        "0000abcd", 17
    )


def test_hash64_is_sparks_xxhash64(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, ids="hash64")
    found = sparse(tmp_path / "d")
    rows = [row for day in range(3) for row in day_rows(logs, day)]
    expected = [[signed(sparks_xxhash64(x or None, c)) for c, x in enumerate(row[14:])] for row in rows]
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_hash64_without_a_size_is_for_dynamic_tables_which_use_62_bits(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, ids="hash64")
    dataset = open_dataset(tmp_path / "d")
    names = {feature.name for feature in dataset.clicks.sparse}
    batching = Batching(order="file", seed=1, train_batch_size=4, eval_batch_size=4, rank=0, size=1)
    with pytest.raises(DataError, match=r"Make their tables dynamic \(tables\.dynamic\), or prepare"):
        ClickSource(dataset, batching, dynamic=names - {"C1"})
    (batch, *_) = ClickSource(dataset, batching, dynamic=names).train_batches(0, 0)
    ids = rng.ids_of_keys(batch.sparse.values().numpy()).reshape(26, 4).T.tolist()
    rows = day_rows(logs, 0)[:4]
    assert ids == [
        [(sparks_xxhash64(x or None, c) + 2**63) % 2**64 >> 2 for c, x in enumerate(row[14:])] for row in rows
    ]


def test_hash64_with_a_size_keeps_row_0_for_missing_ids(logs: Path, tmp_path: Path) -> None:
    sizes = [100 + c for c in range(26)]
    description = prepare("criteo", tmp_path / "d", input=logs, ids="hash64", table_size=sizes)
    rows = [row for day in range(3) for row in day_rows(logs, day)]
    expected = [
        [sparks_xxhash64(x, c) % (sizes[c] - 1) + 1 if x else 0 for c, x in enumerate(row[14:])] for row in rows
    ]
    assert sparse(tmp_path / "d").tolist() == expected
    assert [feature["rows"] for feature in description["sparse"]] == sizes


def test_oneflows_hashes_are_stored_with_all_64_bits(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", ids="hash64", shuffle="none")
    frame = pl.read_parquet(tmp_path / "d" / "train-day_0-00000.parquet")
    rows = day_rows(logs, 0)
    assert frame["C3"].to_list() == [signed(sparks_xxhash64(row[16] or None, 2)) for row in rows]


@pytest.mark.parametrize("size", [3, 1000, 2**31 - 1, 2**31, 2**32])
def test_ids_by_modulo_keep_row_0_for_missing_ids(size: int, logs: Path, tmp_path: Path) -> None:
    description = prepare("criteo", tmp_path / "d", input=logs, ids="mod", table_size=[size])
    raws = [row for day in range(3) for row in ids_of(day_rows(logs, day))]
    found = sparse(tmp_path / "d")
    assert found.tolist() == [[0 if raw is None else raw % (size - 1) + 1 for raw in row] for row in raws]
    assert found.dtype == (np.int32 if size <= 2**31 else np.int64)
    assert {feature["rows"] for feature in description["sparse"]} == {size}


def test_raw_id_0_is_not_a_missing_id(tmp_path: Path) -> None:
    row = ["1", *["0"] * 13, *["00000000"] * 26]
    write_rows(tmp_path / "raw" / "day_0", [row, [*row[:14], "", *row[15:]], [*row[:14], "ff", *row[15:]]])
    write_rows(tmp_path / "raw" / "day_1", [row, row])
    for ids, expected in (("contiguous", [2, 0, 3]), ("mod", [1, 0, 256])):
        sizes: dict[str, Any] = {"table_size": [1000]} if ids == "mod" else {}
        prepare("criteo", tmp_path / ids, input=tmp_path / "raw", ids=ids, **sizes)  # type: ignore[arg-type]
        assert stored(tmp_path / ids, "day_0_sparse")[:, 0].tolist() == expected
