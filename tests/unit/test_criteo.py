"""`prepare criteo`: what comes out equals what the originals, plain Python or numpy make of the same rows."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
import xxhash

from recmill import prepare
from recmill.batch import CtrBatch
from recmill.data import companions
from recmill.data.click_rows import StoredDay
from recmill.data.clicks import ClickSource
from recmill.data.opening import open_dataset
from recmill.data.share import Batching
from recmill.datasets import clicks, multi_hot, shuffle
from recmill.datasets.criteo import ids as criteo_ids
from recmill.datasets.criteo import plan as criteo_plan
from recmill.datasets.criteo import steps as criteo
from recmill.errors import ConfigError, ResourceError

from ..conftest import REPO
from ..criteo_raw import (
    Row,
    contents,
    dense_of,
    ids_of,
    labels_of,
    random_rows,
    to_text,
    write_days,
    write_rows,
    write_text,
)

REAL_DATA = REPO.parent / "shared" / "data"
PARTS = ("dense", "sparse", "labels")
COLUMNS = [f"C{c + 1}" for c in range(26)]
DAYS = [300, 257, 201]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of 300, 257 and 201 rows."""
    directory = tmp_path_factory.mktemp("logs") / "raw"
    write_days(directory, DAYS, smallest=-1)
    return directory


def day_rows(logs: Path, day: int) -> list[Row]:
    return [line.split("\t") for line in (logs / f"day_{day}").read_text().splitlines()]


def stored(path: Path, name: str) -> np.ndarray:
    return np.load(path / f"{name}.npy")


def sparse(path: Path, days: int = 3) -> np.ndarray:
    return np.concatenate([stored(path, f"day_{day}_sparse") for day in range(days)])


def split_rows(description: dict[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    return {
        split: [(r["day"], r["start"], r["stop"]) for r in ranges] for split, ranges in description["splits"].items()
    }


# As TorchRec does


@pytest.fixture(scope="module")
def torchrec_criteo() -> ModuleType:
    pytest.importorskip("iopath", reason="TorchRec's own preparation needs iopath")
    from torchrec.datasets import criteo as theirs

    return theirs


@pytest.fixture(scope="module")
def torchrecs_own(logs: Path, torchrec_criteo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TorchRec's npy files of `logs`, with raw ids."""
    directory = tmp_path_factory.mktemp("theirs")
    for day in range(3):
        files = [str(directory / f"day_{day}_{part}.npy") for part in PARTS]
        torchrec_criteo.BinaryCriteoUtils.tsv_to_npys(str(logs / f"day_{day}"), *files)
    return directory


def make_contiguous(theirs: ModuleType, raw: Path, out: Path, threshold: int) -> Path:
    out.mkdir()
    in_files = [str(raw / f"day_{day}_sparse.npy") for day in range(3)]
    theirs.BinaryCriteoUtils.sparse_to_contiguous(in_files, str(out), threshold, output_file_suffix=".npy")
    return out


def test_labels_dense_and_raw_ids_are_torchrecs_byte_for_byte(logs: Path, torchrecs_own: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", ids="mod")
    ours, expected = contents(tmp_path / "d"), contents(torchrecs_own)
    assert len(expected) == 9
    assert {name: ours[name] for name in expected} == expected
    assert stored(tmp_path / "d", "day_1_sparse").dtype == np.int64


@pytest.mark.parametrize("threshold", [0, 2, 3])
def test_contiguous_ids_are_torchrecs_byte_for_byte(
    threshold: int, logs: Path, torchrecs_own: Path, torchrec_criteo: ModuleType, tmp_path: Path
) -> None:
    make_contiguous(torchrec_criteo, torchrecs_own, tmp_path / "theirs", threshold)
    description = prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", min_frequency=threshold)
    ours, expected = contents(tmp_path / "d"), contents(tmp_path / "theirs")
    assert len(expected) == 3
    assert {name: ours[name] for name in expected} == expected
    largest = sparse(tmp_path / "theirs").max(axis=0)
    assert [feature["rows"] for feature in description["sparse"]] == (largest + 1).tolist()
    assert any("vocabularies were made from val and test rows too" in note for note in description["notes"])


def test_the_example_in_torchrecs_docstring_comes_out_as_printed_there(tmp_path: Path) -> None:
    """day_0 [abc, xyz], [iop, xyz]; day_1 [iop, tuv], [lkj, xyz]; less than 2 is rare."""
    row = ["0", *["5"] * 13, *["0000000a"] * 26]
    for day, pairs in enumerate([[("abc", "1f"), ("dd", "1f")], [("dd", "2f"), ("ee", "1f")]]):
        write_rows(tmp_path / "raw" / f"day_{day}", [[*row[:14], *pair, *row[16:]] for pair in pairs])
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", compat="torchrec", min_frequency=2)
    assert stored(tmp_path / "d", "day_0_sparse")[:, :3].tolist() == [[1, 2, 2], [2, 2, 2]]
    assert stored(tmp_path / "d", "day_1_sparse")[:, :3].tolist() == [[2, 1, 2], [1, 2, 2]]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_shuffled_files_are_torchrecs_byte_for_byte(
    seed: int, logs: Path, torchrecs_own: Path, torchrec_criteo: ModuleType, tmp_path: Path
) -> None:
    contiguous = make_contiguous(torchrec_criteo, torchrecs_own, tmp_path / "contiguous", 0)
    (tmp_path / "theirs").mkdir()
    torchrec_criteo.BinaryCriteoUtils.shuffle(
        str(torchrecs_own), str(contiguous), str(tmp_path / "theirs"), {0: 300, 1: 257}, days=3, random_seed=seed
    )
    description = prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", shuffle="global", seed=seed)
    ours, expected = contents(tmp_path / "d"), contents(tmp_path / "theirs")
    assert len(expected) == 9
    assert {name: ours[name] for name in expected} == expected
    assert not any("2^24" in note for note in description["notes"])  # no id is that large


def test_ids_above_2_24_are_rounded_as_in_torchrecs_shuffle_and_the_notes_say_how_many(
    torchrec_criteo: ModuleType, tmp_path: Path
) -> None:
    """Raw ids, since no small log has 16 million contiguous ones."""
    write_days(tmp_path / "raw", [120, 90, 60], largest_id=2**31 - 200)
    for folder in ("theirs", "shuffled"):
        (tmp_path / folder).mkdir()
    for day in range(3):
        files = [str(tmp_path / "theirs" / f"day_{day}_{part}.npy") for part in PARTS]
        torchrec_criteo.BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "raw" / f"day_{day}"), *files)
    source, target = str(tmp_path / "theirs"), str(tmp_path / "shuffled")
    torchrec_criteo.BinaryCriteoUtils.shuffle(source, source, target, {0: 120, 1: 90}, days=3, random_seed=3)
    options: dict[str, Any] = {"compat": "torchrec", "ids": "mod", "table_size": [2**31 - 128]}  # keeps ids as they are
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", shuffle="global", seed=3, **options)
    ours, expected = contents(tmp_path / "d"), contents(tmp_path / "shuffled")
    assert {name: ours[name] for name in expected} == expected
    before = np.concatenate([stored(tmp_path / "theirs", f"day_{day}_sparse") for day in (0, 1)])
    changed = int((before != before.astype(np.float32).astype(np.int64)).sum())
    assert changed > 1000
    assert any(f"{changed:,} training ids above 2^24 were rounded to float32" in note for note in description["notes"])
    open_dataset(tmp_path / "d", verify="digests")


def test_an_id_that_is_rounded_up_is_still_inside_its_table(tmp_path: Path) -> None:
    """float32 makes 2^25 of 2^25 - 1: a table of 2^25 rows has no such row."""
    rows = random_rows(40, 1, missing=0)
    for row in rows:
        row[14:] = [f"{2**25 - 1:08x}"] * 26
    for day in range(2):
        write_rows(tmp_path / "raw" / f"day_{day}", rows)
    options: dict[str, Any] = {"compat": "torchrec", "ids": "mod", "shuffle": "global"}
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", table_size=[2**25], **options)
    open_dataset(tmp_path / "d", verify="digests")  # checks every id


def test_shuffled_raw_ids_that_need_more_than_31_bits_are_refused_or_whole(logs: Path, tmp_path: Path) -> None:
    """TorchRec's shuffle makes -2^31 of each of them."""
    try:
        prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", ids="mod", shuffle="global")
    except ConfigError:
        return
    open_dataset(tmp_path / "d", verify="digests")


def test_kaggle_files_are_torchrecs_byte_for_byte(
    torchrec_criteo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # TorchRec takes a path with "test" anywhere in it for the file without labels
    (tmp_path / "theirs").mkdir()
    write_rows(tmp_path / "train.txt", random_rows(150, 1, smallest=-3))
    write_rows(tmp_path / "test.txt", [row[1:] for row in random_rows(70, 2, smallest=-1)])
    for name in ("train", "test"):
        files = [f"theirs/{name}_{part}.npy" for part in PARTS]
        torchrec_criteo.BinaryCriteoUtils.tsv_to_npys(f"{name}.txt", *files, dataset_name="criteo_kaggle")
    description = prepare("criteo", tmp_path / "d", input=tmp_path, compat="torchrec", ids="mod")
    ours, expected = contents(tmp_path / "d"), contents(tmp_path / "theirs")
    assert {name: ours[name] for name in expected} == expected
    assert split_rows(description) == {
        "train": [("train", 0, 120)],
        "val": [("train", 120, 135)],
        "test": [("train", 135, 150)],
        "unlabelled": [("test", 0, 70)],
    }
    assert set(stored(tmp_path / "d", "test_labels").ravel().tolist()) == {-1}


@pytest.mark.parametrize("name", ["criteo-kaggle/train.txt", "criteo-1tb/day_0"])
def test_real_rows_are_torchrecs_byte_for_byte(
    name: str, torchrec_criteo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (REAL_DATA / name).is_file():
        pytest.skip(f"no real Criteo rows: {name} is not there")
    monkeypatch.chdir(tmp_path)
    raw = Path(name)
    day = raw.stem
    raw.parent.mkdir()
    raw.symlink_to(REAL_DATA / name)
    out = tmp_path / "theirs"
    out.mkdir()
    torchrec_criteo.BinaryCriteoUtils.tsv_to_npys(name, *(f"theirs/{day}_{part}.npy" for part in PARTS))
    prepare("criteo", tmp_path / "raw-ids", input=raw, compat="torchrec", ids="mod")
    ours, expected = contents(tmp_path / "raw-ids"), contents(out)
    assert len(expected) == 3
    assert {file: ours[file] for file in expected} == expected
    torchrec_criteo.BinaryCriteoUtils.sparse_to_contiguous(
        [f"theirs/{day}_sparse.npy"], "theirs", 3, output_file_suffix=".npy"
    )
    prepare("criteo", tmp_path / "contiguous", input=raw, compat="torchrec", min_frequency=3)
    assert (tmp_path / "contiguous" / f"{day}_sparse.npy").read_bytes() == (out / f"{day}_sparse.npy").read_bytes()


# As OneFlow does


def test_oneflows_parquet(logs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Column c: raw id % size + size * c, missing size * (c + 1); dense x + 1, missing 1.0; test before val."""
    caplog.set_level("INFO")
    description = prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", table_size=[1000], shuffle="none")
    assert split_rows(description)["test"] == [("test-day_2-00000", 0, 101)]
    assert split_rows(description)["val"] == [("val-day_2-00000", 0, 100)]
    last_day = day_rows(logs, 2)
    for name, rows in (
        ("test-day_2", last_day[:101]),
        ("val-day_2", last_day[101:]),
        ("train-day_0", day_rows(logs, 0)),
    ):
        frame = pl.read_parquet(tmp_path / "d" / f"{name}-00000.parquet")
        assert frame.columns == ["label", *(f"I{i + 1}" for i in range(13)), *COLUMNS]
        assert [str(dtype) for dtype in frame.dtypes] == ["Float32"] * 14 + ["Int64"] * 26
        assert frame["label"].to_list() == [float(row[0]) for row in rows]
        expected = [
            [float(row[0]), *(float(x) + 1 if x else 1.0 for x in row[1:14])]
            + [int(x, 16) % 1000 + 1000 * c if x else 1000 * (c + 1) for c, x in enumerate(row[14:])]
            for row in rows
        ]
        assert [list(row) for row in frame.rows()] == expected
    collision = "the missing id of each column equals the first id of the next"
    assert any(collision in note for note in description["notes"])
    assert collision in caplog.text


def test_our_loader_keeps_oneflows_columns_apart(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", table_size=[1000], shuffle="none")
    dataset = open_dataset(tmp_path / "d", verify="digests")
    rows = day_rows(logs, 0)
    found = StoredDay(dataset, "train-day_0-00000").take(slice(0, 300))
    np.testing.assert_allclose(found.dense, np.log(dense_of(rows) + 2.0), rtol=1e-6, atol=1e-7)
    expected = [[1000 if raw is None else raw % 1000 for raw in row] for row in ids_of(rows)]
    assert found.ids.tolist() == expected  # the missing one has a row of its own, 1000
    assert {feature.rows for feature in dataset.description.sparse} == {1001}  # type: ignore[union-attr]


def test_oneflow_ids_are_as_wide_as_its_own_default_size(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, compat="oneflow")
    frame = pl.concat([pl.read_parquet(file) for file in sorted((tmp_path / "d").glob("*.parquet"))])
    raws = [row[25] for day in range(3) for row in ids_of(day_rows(logs, day))]
    expected = [40_000_000 * 26 if raw is None else raw % 40_000_000 + 40_000_000 * 25 for raw in raws]
    assert sorted(frame["C26"].to_list()) == sorted(expected)
    open_dataset(tmp_path / "d", verify="digests")


def sparks_xxhash64(text: str | None, column: int) -> int:
    """xxhash64(text, column) as Spark chains it: the hash of one value is the seed of the next; NULL leaves the seed.

    The whole number is hashed by the published algorithm's tail for 4 bytes.
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


def test_the_formula_for_a_whole_number_is_xxhashs_own() -> None:
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


def test_hash64_with_a_size_keeps_row_0_for_missing_ids(logs: Path, tmp_path: Path) -> None:
    sizes = [100 + c for c in range(26)]
    description = prepare("criteo", tmp_path / "d", input=logs, ids="hash64", table_size=sizes)
    rows = [row for day in range(3) for row in day_rows(logs, day)]
    expected = [
        [sparks_xxhash64(x, c) % (sizes[c] - 1) + 1 if x else 0 for c, x in enumerate(row[14:])] for row in rows
    ]
    assert sparse(tmp_path / "d").tolist() == expected
    assert [feature["rows"] for feature in description["sparse"]] == sizes


def test_oneflows_hashes_are_stored_whole(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", ids="hash64", shuffle="none")
    frame = pl.read_parquet(tmp_path / "d" / "train-day_0-00000.parquet")
    rows = day_rows(logs, 0)
    assert frame["C3"].to_list() == [signed(sparks_xxhash64(row[16] or None, 2)) for row in rows]


def test_oneflows_hashes_with_a_size_are_refused_or_inside_their_tables(logs: Path, tmp_path: Path) -> None:
    try:
        prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", ids="hash64", table_size=[100])
    except ConfigError:
        return
    dataset = open_dataset(tmp_path / "d", verify="digests")
    found = StoredDay(dataset, "test-day_2-00000").take(slice(0, 101))
    assert found.ids.min() >= 0


# Our own ids


def expected_ids(
    train: list[list[int | None]], rows: list[list[int | None]], min_frequency: int = 1, sizes: list[int] | None = None
) -> tuple[list[list[int]], list[dict[int, int]]]:
    """By dictionaries: 0 missing, 1 rare or unseen, then falling frequency, ties by raw value."""
    vocabularies = []
    for column in range(26):
        counts = Counter(row[column] for row in train if row[column] is not None)
        order = sorted((-count, raw) for raw, count in counts.items() if count >= min_frequency)
        kept = order[: sizes[column] - 2 if sizes else None]
        vocabularies.append({raw: 2 + place for place, (_, raw) in enumerate(kept)})
    found = [[0 if raw is None else vocabularies[c].get(raw, 1) for c, raw in enumerate(row)] for row in rows]
    return found, vocabularies  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "min_frequency", "sizes"),
    [
        ({}, 1, None),
        ({"min_frequency": 3}, 3, None),
        ({"table_size": [12]}, 1, [12] * 26),
        ({"table_size": [3 + c for c in range(26)], "min_frequency": 2}, 2, [3 + c for c in range(26)]),
    ],
)
def test_contiguous_ids_by_falling_frequency_in_the_training_rows(
    options: dict[str, Any], min_frequency: int, sizes: list[int] | None, logs: Path, tmp_path: Path
) -> None:
    description = prepare("criteo", tmp_path / "d", input=logs, **options)
    by_day = [ids_of(day_rows(logs, day)) for day in range(3)]
    train, everything = by_day[0] + by_day[1], by_day[0] + by_day[1] + by_day[2]
    expected, vocabularies = expected_ids(train, everything, min_frequency, sizes)
    found = sparse(tmp_path / "d")
    assert found.dtype == np.int32
    assert found.tolist() == expected
    assert (np.array(expected[-201:]) == 1).any()  # some of the last day are unseen or rare
    assert (np.array(expected) == 0).any()
    for column, vocabulary in enumerate(vocabularies):
        assert stored(tmp_path / "d", f"vocabulary_C{column + 1}").tolist() == [
            list(p) for p in sorted(vocabulary.items())
        ]
        assert description["sparse"][column]["rows"] == len(vocabulary) + 2


def test_ids_in_order_of_occurrence(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs, id_order="first-seen")
    by_day = [ids_of(day_rows(logs, day)) for day in range(3)]
    seen: list[dict[int, int]] = [{} for _ in range(26)]
    for row in by_day[0] + by_day[1]:
        for column, raw in enumerate(row):
            if raw is not None:
                seen[column].setdefault(raw, 2 + len(seen[column]))
    expected = [
        [0 if raw is None else seen[c].get(raw, 1) for c, raw in enumerate(row)] for day in by_day for row in day
    ]
    assert sparse(tmp_path / "d").tolist() == expected


@pytest.mark.parametrize(
    "id_order",
    [
        "frequency",
        "first-seen",
    ],
)
def test_a_column_without_any_id_is_all_missing(id_order: str, tmp_path: Path) -> None:
    days = [random_rows(30, seed) for seed in (1, 2)]
    for day, rows in enumerate(days):
        for row in rows:
            row[14 + 7] = ""
        write_rows(tmp_path / "raw" / f"day_{day}", rows)
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", id_order=id_order)
    assert set(sparse(tmp_path / "d", 2)[:, 7].tolist()) == {0}
    assert description["sparse"][7]["rows"] == 2
    assert stored(tmp_path / "d", "vocabulary_C8").shape == (0, 2)


def test_raw_id_0_is_not_a_missing_id(tmp_path: Path) -> None:
    row = ["1", *["0"] * 13, *["00000000"] * 26]
    write_rows(tmp_path / "raw" / "day_0", [row, [*row[:14], "", *row[15:]], [*row[:14], "ff", *row[15:]]])
    write_rows(tmp_path / "raw" / "day_1", [row, row])
    for ids, expected in (("contiguous", [2, 0, 3]), ("mod", [1, 0, 256])):
        sizes: dict[str, Any] = {"table_size": [1000]} if ids == "mod" else {}
        prepare("criteo", tmp_path / ids, input=tmp_path / "raw", ids=ids, **sizes)
        assert stored(tmp_path / ids, "day_0_sparse")[:, 0].tolist() == expected


@pytest.mark.parametrize("size", [3, 1000, 2**31 - 1, 2**31, 2**32])
def test_ids_by_modulo_keep_row_0_for_missing_ids(size: int, logs: Path, tmp_path: Path) -> None:
    description = prepare("criteo", tmp_path / "d", input=logs, ids="mod", table_size=[size])
    raws = [row for day in range(3) for row in ids_of(day_rows(logs, day))]
    found = sparse(tmp_path / "d")
    assert found.tolist() == [[0 if raw is None else raw % (size - 1) + 1 for raw in row] for row in raws]
    assert found.dtype == (np.int32 if size <= 2**31 else np.int64)
    assert {feature["rows"] for feature in description["sparse"]} == {size}


# Dense features


@pytest.mark.parametrize(
    ("rule", "smallest", "formula"),
    [
        ("log3", -2, lambda x, least: math.log(x + 3)),
        ("log2", -1, lambda x, least: math.log(x + 2)),
        ("log-min", -700, lambda x, least: math.log(x - least + 2)),
        ("log1-clip", -700, lambda x, least: math.log(1 + max(x, 0))),
    ],
)
def test_dense_rules(rule: str, smallest: int, formula: Callable[[int, int], float], tmp_path: Path) -> None:
    """With log-min, all days share the smallest number of all: here it is in day 1."""
    days = [random_rows(40, 1, smallest=-1), random_rows(40, 2, smallest=smallest), random_rows(40, 3, smallest=-1)]
    days[0][0][1], days[1][0][1] = str(2**31 - 1), str(smallest)
    for day, rows in enumerate(days):
        write_rows(tmp_path / "raw" / f"day_{day}", rows)
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", dense=rule)
    for day, rows in enumerate(days):
        found = stored(tmp_path / "d", f"day_{day}_dense")
        expected = [[formula(x, smallest) for x in row] for row in dense_of(rows).tolist()]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=3e-7, atol=1e-7)


def test_default_dense_rules_are_log3_for_days_and_log_min_for_kaggle(logs: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "kaggle" / "train.txt", random_rows(30, 5, smallest=-3))
    kaggle = prepare("criteo", tmp_path / "k", input=tmp_path / "kaggle")
    days = prepare("criteo", tmp_path / "d", input=logs)
    assert (kaggle["recipe"]["dense"], days["recipe"]["dense"]) == ("log-min", "log3")
    numbers = dense_of(random_rows(30, 5, smallest=-3))
    expected = np.log(numbers - numbers.min() + 2.0)
    np.testing.assert_allclose(stored(tmp_path / "k", "train_dense"), expected, rtol=3e-7)


# Splits


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        (
            [10, 7],
            {},
            {"train": [("day_0", 0, 10)], "val": [("day_1", 0, 4)], "test": [("day_1", 4, 7)]},
        ),
        (
            [10, 7],
            {"last_day": "test-first"},
            {"train": [("day_0", 0, 10)], "test": [("day_1", 0, 4)], "val": [("day_1", 4, 7)]},
        ),
        ([10, 7], {"last_day": "none"}, {"train": [("day_0", 0, 10), ("day_1", 0, 7)], "val": [], "test": []}),
        (
            [10, 7],
            {"last_day": "none", "val_fraction": 0.25},
            {"train": [("day_0", 0, 9)], "val": [("day_0", 9, 10), ("day_1", 0, 3)], "test": [("day_1", 3, 7)]},
        ),
        ([25], {}, {"train": [("day_0", 0, 21)], "val": [("day_0", 21, 23)], "test": [("day_0", 23, 25)]}),
        (
            [25],
            {"val_fraction": 0.2},
            {"train": [("day_0", 0, 15)], "val": [("day_0", 15, 20)], "test": [("day_0", 20, 25)]},
        ),
        ([25], {"last_day": "none"}, {"train": [("day_0", 0, 25)], "val": [], "test": []}),
    ],
)
def test_splits(
    counts: list[int], options: dict[str, Any], expected: dict[str, list[tuple[str, int, int]]], tmp_path: Path
) -> None:
    write_days(tmp_path / "raw", counts)
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", **options)
    assert split_rows(description) == expected
    assert [(source["name"], source["rows"]) for source in description["source"]] == [
        (f"day_{day}", count) for day, count in enumerate(counts)
    ]
    assert {name: file["rows"] for name, file in description["files"].items() if "vocabulary" not in name} == {
        f"day_{day}_{part}.npy": count for day, count in enumerate(counts) for part in PARTS
    }


def test_in_parquet_the_splits_hold_the_same_rows_as_in_npy(logs: Path, tmp_path: Path) -> None:
    description = prepare("criteo", tmp_path / "p", input=logs, format="parquet", last_day="test-first")
    prepare("criteo", tmp_path / "n", input=logs, last_day="test-first")
    assert split_rows(description) == {
        "train": [("train-day_0-00000", 0, 300), ("train-day_1-00000", 0, 257)],
        "test": [("test-day_2-00000", 0, 101)],
        "val": [("val-day_2-00000", 0, 100)],
    }
    for split, rows in (("test", slice(0, 101)), ("val", slice(101, 201))):
        frame = pl.read_parquet(tmp_path / "p" / f"{split}-day_2-00000.parquet")
        assert frame.select(COLUMNS).to_numpy().tolist() == stored(tmp_path / "n", "day_2_sparse")[rows].tolist()
        assert frame["label"].to_list() == stored(tmp_path / "n", "day_2_labels")[rows, 0].tolist()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_logs_give_the_same_bytes(suffix: str, logs: Path, tmp_path: Path) -> None:
    for day in range(3):
        write_text(tmp_path / "raw" / f"day_{day}{suffix if day else ''}", (logs / f"day_{day}").read_bytes())
    prepare("criteo", tmp_path / "plain", input=logs)
    prepare("criteo", tmp_path / "packed", input=tmp_path / "raw")
    plain, packed = contents(tmp_path / "plain"), contents(tmp_path / "packed")
    assert plain.pop("dataset.json") != packed.pop("dataset.json")  # it names the raw files
    assert plain == packed


# Orders


def day_records(path: Path, day: int) -> list[bytes]:
    """A row's label, dense values and ids, as bytes that compare well."""
    parts = [stored(path, f"day_{day}_{part}") for part in PARTS]
    return [b"".join(part[row].tobytes() for part in parts) for row in range(len(parts[0]))]


@pytest.mark.parametrize("how", ["day", "global"])
def test_shuffling_moves_training_rows_and_nothing_else(how: str, logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "none", input=logs)
    for name, seed in (("one", 4), ("again", 4), ("other", 5)):
        prepare("criteo", tmp_path / name, input=logs, shuffle=how, seed=seed)
    before, one, other = ([day_records(tmp_path / n, day) for day in range(3)] for n in ("none", "one", "other"))
    assert contents(tmp_path / "one") == contents(tmp_path / "again")
    assert one[2] == before[2]
    assert one[0] != before[0] != other[0] != one[0]
    assert Counter(one[0] + one[1]) == Counter(before[0] + before[1])
    stays = [Counter(one[day]) == Counter(before[day]) for day in (0, 1)]
    assert stays == [how == "day"] * 2
    moved = sum(a != b for a, b in zip(one[0], before[0], strict=True))
    assert moved > 280  # of 300: no long stretches are left as they were


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_shuffling_one_log_leaves_its_val_and_test_rows(format: str, tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [200])
    for how in ("none", "global"):
        prepare("criteo", tmp_path / how, input=tmp_path / "raw", shuffle=how, val_fraction=0.2, format=format)
    rows = {}
    for how in ("none", "global"):
        dataset = open_dataset(tmp_path / how, verify="digests")
        assert dataset.description.kind == "clicks"
        for split, ranges in dataset.description.splits.items():
            found = [StoredDay(dataset, r.day).take(slice(r.start, r.stop)).ids.tolist() for r in ranges]
            rows[how, split] = [tuple(row) for part in found for row in part]
    assert rows["none", "val"] == rows["global", "val"]
    assert rows["none", "test"] == rows["global", "test"]
    assert len(rows["none", "train"]) == 120
    assert rows["none", "train"] != rows["global", "train"]
    assert sorted(rows["none", "train"]) == sorted(rows["global", "train"])


# Multi-hot


def reference_tables(rows: list[int], sizes: list[int], distribution: str, seed: int) -> list[np.ndarray]:
    """The DLRM reference's recipe: one legacy stream, feature after feature."""
    np.random.seed(seed)
    tables = []
    for count, size in zip(rows, sizes, strict=True):
        others: np.ndarray
        if distribution == "uniform":
            others = np.random.randint(0, count, size=(count, size - 1))
        else:
            with np.errstate(invalid="ignore"):
                others = np.random.pareto(a=0.25, size=(count, size - 1)).astype(np.int32) % count
        tables.append(np.concatenate((np.arange(count)[:, None], others), axis=1).astype(np.int32))
    return tables


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_companions_are_the_references_in_however_many_blocks_they_are_drawn(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, sizes = [1, 50, 333, 1000], [3, 1, 7, 2]
    expected = reference_tables(rows, sizes, distribution, seed=11)
    for at_once in (1 << 22, 64):
        monkeypatch.setattr(companions, "_DRAWN_AT_ONCE", at_once)
        blocks = [list(found) for found in companions.companions(rows, sizes, distribution, 11)]
        assert (len(blocks[2]) > 1) == (at_once == 64)
        for found, table in zip(blocks, expected, strict=True):
            assert np.concatenate(found).dtype == np.int32
            np.testing.assert_array_equal(np.concatenate(found), table)


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_multi_hot_files_hold_the_references_ids(
    distribution: str, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1 + c % 4 for c in range(26)]
    prepare("criteo", tmp_path / "one", input=logs)
    monkeypatch.setattr(multi_hot, "_ROWS_AT_ONCE", 50)
    description = prepare(
        "criteo", tmp_path / "d", input=logs, multi_hot=sizes, multi_hot_distribution=distribution, seed=5
    )
    tables = reference_tables([f["rows"] for f in description["sparse"]], sizes, distribution, seed=5)
    dataset = open_dataset(tmp_path / "d", verify="digests")
    for day in range(3):
        ids = stored(tmp_path / "one", f"day_{day}_sparse")
        expected = [table[ids[:, column]] for column, table in enumerate(tables)]
        with np.load(tmp_path / "d" / f"day_{day}_sparse_multi_hot.npz") as archive:
            assert archive.files == [str(column) for column in range(26)]
            for column in range(26):
                assert archive[str(column)].dtype == np.int32
                np.testing.assert_array_equal(archive[str(column)], expected[column])
        np.testing.assert_array_equal(
            StoredDay(dataset, f"day_{day}").take(slice(0, DAYS[day])).ids, np.concatenate(expected, axis=1)
        )
    assert not list((tmp_path / "d").glob("*_sparse.npy"))


def test_the_original_multi_hot_reader_finds_the_arrays_where_it_looks(logs: Path, tmp_path: Path) -> None:
    """It takes a member to start 20 bytes behind its name, where np.savez puts it."""
    import zipfile

    prepare("criteo", tmp_path / "d", input=logs, multi_hot=[2])
    file = tmp_path / "d" / "day_0_sparse_multi_hot.npz"
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            assert member.compress_type == zipfile.ZIP_STORED
            start = member.header_offset + len(member.FileHeader()) + 20
            assert file.read_bytes()[start : start + 6] == b"\x93NUMPY"


def test_compat_with_multi_hot_takes_ids_modulo_the_table_size(
    logs: Path, torchrecs_own: Path, torchrec_criteo: ModuleType, tmp_path: Path
) -> None:
    contiguous = make_contiguous(torchrec_criteo, torchrecs_own, tmp_path / "contiguous", 0)
    rows, sizes = [10 + c for c in range(26)], [3] * 26
    prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", multi_hot=[3], table_size=rows)
    tables = reference_tables(rows, sizes, "uniform", seed=0)
    ids = np.load(contiguous / "day_1_sparse.npy")
    assert (ids.max(axis=0) > np.array(rows)).any()
    with np.load(tmp_path / "d" / "day_1_sparse_multi_hot.npz") as archive:
        for column, table in enumerate(tables):
            np.testing.assert_array_equal(archive[str(column)], table[ids[:, column] % rows[column]])
    open_dataset(tmp_path / "d", verify="digests")


# The same bytes whatever the memory, the threads and the pieces

MANY_ROWS = [6000, 5200, 1501]
WAYS: dict[str, dict[str, Any]] = {
    "frequency": {"min_frequency": 2},
    "first-seen": {"id_order": "first-seen"},
    "torchrec": {"compat": "torchrec", "shuffle": "global"},
    "global": {"shuffle": "global", "seed": 3},
    "day": {"shuffle": "day", "format": "parquet"},
    "capped": {"table_size": [700], "shuffle": "global"},
    "multi-hot": {"multi_hot": [2]},
}


@pytest.fixture(scope="module")
def long_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 8,192 training rows, up to thousands of ids in a column."""
    directory = tmp_path_factory.mktemp("long") / "raw"
    write_days(directory, MANY_ROWS, missing=0.05, distinct=30_000)
    return directory


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """200 kB and chunks of 64 kB. Says how much was spilled, and how many rounds, pieces and buckets there were."""
    seen = {"spilled": 0, "rounds": 0, "pieces": 0, "buckets": 0, "blocks": 0}
    monkeypatch.setattr(criteo_plan, "_PROGRAM_BYTES", 512_000_000 - 200_000)
    parse, spill, rounds, pieces, add = (
        criteo.parse_log,
        criteo_ids._spilled,
        criteo_ids.Vocabularies.rounds,
        criteo_ids._pieces,
        shuffle.Buckets.add,
    )

    def parse_in_small_chunks(*args: Any, **options: Any) -> Any:
        parsed = parse(*args, **{**options, "chunk_bytes": 1 << 16})
        seen["blocks"] += len(parsed.block_rows)
        return parsed

    def spilled(*args: Any) -> Any:
        seen["spilled"] += 1
        return spill(*args)

    def counted_rounds(self: Any, memory: int) -> Any:
        found = rounds(self, memory)
        seen["rounds"] = max(seen["rounds"], len(found))
        return found

    def counted_pieces(*args: Any) -> Any:
        found = pieces(*args)
        seen["pieces"] = max(seen["pieces"], sum(1 for _ in found()))
        return found

    def counted_buckets(self: Any, records: np.ndarray, buckets: np.ndarray) -> None:
        seen["buckets"] = max(seen["buckets"], int(buckets.max()) + 1)
        add(self, records, buckets)

    monkeypatch.setattr(criteo, "parse_log", parse_in_small_chunks)
    monkeypatch.setattr(criteo_ids, "_spilled", spilled)
    monkeypatch.setattr(criteo_ids.Vocabularies, "rounds", counted_rounds)
    monkeypatch.setattr(criteo_ids, "_pieces", counted_pieces)
    monkeypatch.setattr(shuffle.Buckets, "add", counted_buckets)
    monkeypatch.setattr(shuffle, "_BLOCK_ROWS", 70)
    return seen


@pytest.fixture(scope="module")
def with_plenty(long_logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plenty")
    for name, options in WAYS.items():
        prepare("criteo", directory / name, input=long_logs, **options)
    return directory


@pytest.mark.parametrize("way", WAYS)
def test_little_memory_gives_the_same_bytes(
    way: str, long_logs: Path, with_plenty: Path, little_memory: dict[str, int], tmp_path: Path
) -> None:
    if way == "torchrec":
        # numpy's order of all rows needs an array of all rows: 16 bytes each
        assert sum(MANY_ROWS[:2]) * 16 < 200_000
    prepare("criteo", tmp_path / "d", input=long_logs, memory_budget="512MB", **WAYS[way])
    assert contents(tmp_path / "d") == contents(with_plenty / way)
    assert little_memory["blocks"] > 40
    assert little_memory["spilled"] >= 2
    assert little_memory["pieces"] >= 2
    assert little_memory["rounds"] >= 2
    assert (little_memory["buckets"] >= 20) == ("shuffle" in WAYS[way])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", ["frequency", "torchrec", "day"])
def test_any_number_of_threads_gives_the_same_bytes(
    threads: int, way: str, long_logs: Path, with_plenty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(threads)))
    prepare("criteo", tmp_path / "d", input=long_logs, **WAYS[way])
    assert contents(tmp_path / "d") == contents(with_plenty / way)


@pytest.mark.parametrize("budget", ["512MB", "1GiB", "8 gb"])
def test_the_memory_budget_is_no_part_of_the_result(budget: str, logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "default", input=logs, shuffle="global")
    prepare("criteo", tmp_path / "d", input=logs, shuffle="global", memory_budget=budget)
    assert contents(tmp_path / "d") == contents(tmp_path / "default")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 255, 5000, 1 << 24])
def test_chunks_of_any_size_give_the_same_rows(
    suffix: str, chunk_bytes: int, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may end before, in or after a line break."""
    raw = write_text(tmp_path / f"day_0{suffix}", to_text(day_rows(logs, 0)[:40]))
    real = criteo.parse_log
    monkeypatch.setattr(criteo, "parse_log", lambda *a, **k: real(*a, **{**k, "chunk_bytes": chunk_bytes}))
    prepare("criteo", tmp_path / "d", input=raw, ids="mod", compat="torchrec")
    expected = [[raw_id or 0 for raw_id in row] for row in ids_of(day_rows(logs, 0)[:40])]
    assert stored(tmp_path / "d", "day_0_sparse").tolist() == expected
    assert stored(tmp_path / "d", "day_0_labels").ravel().tolist() == labels_of(day_rows(logs, 0)[:40]).tolist()


def test_torchrecs_order_that_does_not_fit_in_memory_is_refused(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_plan, "_PROGRAM_BYTES", 512_000_000 - 557 * 16 + 1)
    with pytest.raises(ResourceError, match=r"needs 8,912 bytes for the original's order of 557 rows"):
        prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", shuffle="global", memory_budget="512MB")


# Parquet


@pytest.fixture(scope="module")
def parquet(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "d"
    prepare("criteo", path, input=logs, format="parquet")
    return path


@pytest.fixture(scope="module")
def npy(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("npy") / "d"
    prepare("criteo", path, input=logs)
    return path


def train_table(npy: Path) -> list[tuple[float, ...]]:
    days = [np.hstack([stored(npy, f"day_{day}_{part}") for part in ("labels", "dense", "sparse")]) for day in (0, 1)]
    return [tuple(row) for row in np.concatenate(days).tolist()]


def test_polars_and_pyarrow_read_it(parquet: Path, npy: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    files = [parquet / f"train-day_{day}-00000.parquet" for day in (0, 1)]
    assert pl.read_parquet(files).rows() == train_table(npy)
    table = dataset.dataset([str(file) for file in files], format="parquet").to_table()
    assert [tuple(row.values()) for row in table.to_pylist()] == train_table(npy)
    assert {str(table.schema.field(name).type) for name in COLUMNS} == {"int32"}


def test_hugging_face_datasets_reads_it_split_by_split(
    parquet: Path, npy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("parquet", data_dir=str(parquet), cache_dir=str(tmp_path / "cache"))
    assert {str(split): len(rows) for split, rows in found.items()} == {"train": 557, "validation": 101, "test": 100}
    assert [tuple(row.values()) for row in found["train"]] == train_table(npy)


@pytest.mark.parametrize("order", ["stored", "shuffled"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["npy", "parquet"])
def test_our_loader_gives_every_row_once_an_epoch(
    order: str, ranks: int, layout: str, npy: Path, parquet: Path
) -> None:
    dataset = open_dataset(npy if layout == "npy" else parquet)
    rows: list[tuple[float, ...]] = []
    for rank in range(ranks):
        source = ClickSource(
            dataset, Batching(order, 2, train_batch_size=100, eval_batch_size=64, rank=rank, size=ranks)
        )
        for batch in source.train_batches(epoch=0, first=0):
            assert isinstance(batch, CtrBatch)
            real = batch.weights_B > 0
            ids = batch.sparse.values().reshape(26, -1).T[real]
            labels, dense = batch.labels_B[real].tolist(), batch.dense_BF[real].tolist()
            rows += [(y, *d, *i) for y, d, i in zip(labels, dense, ids.tolist(), strict=True)]
    assert len(rows) == 557
    assert sorted(rows) == sorted(train_table(npy))
    if ranks == 1:
        assert (rows == train_table(npy)) == (order == "stored")


def test_large_parquet_parts_are_cut_and_joined_again(
    long_logs: Path, with_plenty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clicks, "PARQUET_ROWS", 1000)
    description = prepare("criteo", tmp_path / "d", input=long_logs, format="parquet", min_frequency=2)
    assert [day for day, _, _ in split_rows(description)["train"]][:7] == [
        *(f"train-day_0-{part:05d}" for part in range(6)),
        "train-day_1-00000",
    ]
    assert [stop for _, _, stop in split_rows(description)["train"]] == [1000] * 6 + [1000] * 5 + [200]
    found = pl.read_parquet([tmp_path / "d" / f"{day}.parquet" for day, _, _ in split_rows(description)["train"]])
    assert found.select(COLUMNS).to_numpy().tolist() == sparse(with_plenty / "frequency", 2).tolist()


# Options


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
        ({"engine": "spark", "shuffle": "day"}, "--engine spark shuffles all"),
        ({"compat": "torchrec", "ids": "hash64"}, "--compat torchrec has no hash64 ids"),
        ({"compat": "mlperf-v2", "ids": "mod"}, "--compat mlperf-v2 has no mod ids"),
        ({"compat": "oneflow", "ids": "contiguous"}, "--compat oneflow has no contiguous ids"),
        ({"compat": "oneflow", "table_size": [10 + c for c in range(26)]}, "--compat oneflow has one --table-size"),
        ({"compat": "torchrec", "id_order": "frequency"}, "--compat torchrec numbers ids in order of occurrence"),
        ({"compat": "torchrec", "format": "parquet"}, "--compat torchrec writes npy"),
        ({"compat": "oneflow", "format": "npy"}, "--compat oneflow writes parquet"),
        ({"compat": "torchrec", "shuffle": "day"}, "--compat torchrec shuffles all"),
        ({"compat": "torchrec", "dense": "log3"}, "--compat torchrec means --dense log-min"),
        ({"compat": "mlperf-v2", "dense": "log2"}, "--compat mlperf-v2 means --dense log3"),
        ({"compat": "torchrec", "table_size": [100]}, "--compat torchrec applies table sizes when it loads"),
        ({"val_fraction": 0.1}, "--val-fraction is for one log"),
        ({"val_fraction": 0.1, "last_day": "val-first"}, "--val-fraction is for one log"),
        ({"val_fraction": 0.5}, "--val-fraction: should be less than 0.5"),
        ({"memory_budget": "511MB"}, "--memory-budget 511MB: 512MB is the least"),
        ({"memory_budget": "much"}, "--memory-budget 'much': expected a size like 4GB"),
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


def test_all_contradictions_are_told_at_once(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare("criteo", tmp_path / "d", input=logs, ids="hash64", min_frequency=2, max_bad_rows=3, table_size=[5, 6])
    assert len(str(caught.value).splitlines()) == 3


def test_a_half_of_the_last_day_needs_two_days(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [20])
    with pytest.raises(ConfigError, match="--last-day val-first needs two days or more"):
        prepare("criteo", tmp_path / "d", input=tmp_path / "raw", last_day="val-first")


def test_mlperf_v2_is_torchrecs_way_with_log3_shuffled_and_in_32_bits(
    logs: Path, torchrecs_own: Path, torchrec_criteo: ModuleType, tmp_path: Path
) -> None:
    contiguous = make_contiguous(torchrec_criteo, torchrecs_own, tmp_path / "contiguous", 3)
    (tmp_path / "theirs").mkdir()
    dense = tmp_path / "log3"
    dense.mkdir()
    for day in range(3):
        numbers = dense_of(day_rows(logs, day)).astype(np.int32) + 3
        np.save(dense / f"day_{day}_dense.npy", np.log(numbers, dtype=np.float32))
        np.save(dense / f"day_{day}_labels.npy", stored(torchrecs_own, f"day_{day}_labels"))
        np.save(contiguous / f"day_{day}_sparse.npy", stored(contiguous, f"day_{day}_sparse").astype(np.int32))
    torchrec_criteo.BinaryCriteoUtils.shuffle(
        str(dense), str(contiguous), str(tmp_path / "theirs"), {0: 300, 1: 257}, days=3, random_seed=0
    )
    prepare("criteo", tmp_path / "d", input=logs, compat="mlperf-v2", min_frequency=3)
    ours, expected = contents(tmp_path / "d"), contents(tmp_path / "theirs")
    assert {name: ours[name] for name in expected} == expected


def test_the_recipe_holds_every_decision_and_no_path(logs: Path, npy: Path) -> None:
    recipe = json.loads((npy / "dataset.json").read_text())["recipe"]
    assert recipe["ids"] == "contiguous"
    assert recipe["id_order"] == "frequency"
    assert list(recipe["files"]) == ["day_0", "day_1", "day_2"]
    assert str(logs) not in (npy / "dataset.json").read_text()
