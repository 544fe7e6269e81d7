"""`prepare criteo --compat`: what comes out equals what the originals make of the same rows."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset
from recmill.errors import ResourceError

from ..conftest import REPO
from ..criteo_raw import (
    COLUMNS,
    PARTS,
    contents,
    day_rows,
    dense_of,
    ids_of,
    random_rows,
    reference_tables,
    set_limits,
    sparse,
    split_ranges,
    stored,
    write_days,
    write_rows,
)

REAL_DATA = REPO.parent / "shared" / "data"


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
        write_rows(tmp_path / "raw" / f"day_{day}", rows[day:])
    options: dict[str, Any] = {"compat": "torchrec", "ids": "mod", "shuffle": "global"}
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", table_size=[2**25], **options)
    open_dataset(tmp_path / "d", verify="digests")  # checks every id
    assert set(stored(tmp_path / "d", "day_0_sparse").ravel().tolist()) == {2**25}
    assert {feature["rows"] for feature in description["sparse"]} == {2**25 + 1}


def test_torchrecs_order_that_does_not_fit_in_memory_is_refused(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, memory=557 * 16 - 1)
    with pytest.raises(ResourceError, match=r"needs 8,912 bytes for the original's order of 557 rows"):
        prepare("criteo", tmp_path / "d", input=logs, compat="torchrec", shuffle="global")


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
    assert split_ranges(description) == {
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


# As OneFlow does


def test_oneflows_parquet(logs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Column c: raw id % size + size * c, missing size * (c + 1); dense x + 1, missing 1.0; test before val."""
    caplog.set_level("INFO")
    description = prepare("criteo", tmp_path / "d", input=logs, compat="oneflow", table_size=[1000], shuffle="none")
    assert split_ranges(description)["test"] == [("test-day_2-00000", 0, 101)]
    assert split_ranges(description)["val"] == [("val-day_2-00000", 0, 100)]
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
