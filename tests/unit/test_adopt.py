import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare, train
from recmill.commands import adopt as adopt_module
from recmill.commands.adopt import adopt
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, DataError

from ..conftest import RunCli

SIZES = [4, 30, 500]


def write_day(path: Path, day: str, rows: int, *, id_dtype: type = np.int32) -> None:
    """As TorchRec's npy_preproc_criteo.py leaves it, but with 2 dense and 3 sparse columns."""
    random = np.random.default_rng(rows)
    path.mkdir(exist_ok=True)
    ids = random.integers(0, SIZES, size=(rows, len(SIZES)))
    ids[0] = np.array(SIZES) - 1
    np.save(path / f"{day}_dense.npy", np.log(random.integers(3, 50, size=(rows, 2)), dtype=np.float32))
    np.save(path / f"{day}_sparse.npy", ids.astype(id_dtype))
    np.save(path / f"{day}_labels.npy", random.integers(0, 2, size=(rows, 1), dtype=np.int32))


@pytest.fixture
def npys(tmp_path: Path) -> Path:
    """Three days of 40, 50 and 61 rows."""
    for day, rows in enumerate((40, 50, 61)):
        write_day(tmp_path / "npys", f"day_{day}", rows)
    return tmp_path / "npys"


def problem(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        adopt(path, **options)
    assert not (path / "dataset.json").exists()
    return str(caught.value)


def change(file: Path, do: Callable[[np.ndarray], Any]) -> None:
    """`do` changes the array in place, or returns another one."""
    array = np.load(file)
    changed = do(array)
    np.save(file, array if changed is None else changed)


def ranges(description: dict[str, Any], split: str) -> list[tuple[str, int, int]]:
    return [(r["day"], r["start"], r["stop"]) for r in description["splits"][split]]


def test_only_the_description_is_written(npys: Path) -> None:
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in npys.iterdir()}
    description = adopt(npys, dense_transform="log(x+3)")
    assert {file.name for file in npys.iterdir()} - set(before) == {"dataset.json"}
    assert {name: ((npys / name).read_bytes(), (npys / name).stat().st_mtime_ns) for name in before} == before
    assert description["name"] == "adopted"
    assert description["dense"] == ["I1", "I2"]
    assert [(feature["name"], feature["rows"]) for feature in description["sparse"]] == [
        ("C1", 4),
        ("C2", 30),
        ("C3", 500),
    ]
    assert "dense values: log(x+3)" in description["notes"]
    assert set(description["files"]) == set(before)
    open_dataset(npys, verify="digests")


@pytest.mark.parametrize(
    ("options", "train", "val", "test"),
    [
        ({}, [("day_0", 0, 40), ("day_1", 0, 50)], [("day_2", 0, 31)], [("day_2", 31, 61)]),
        (
            {"last_day": "test-first"},
            [("day_0", 0, 40), ("day_1", 0, 50)],
            [("day_2", 31, 61)],
            [("day_2", 0, 31)],
        ),
        (
            {"last_day": "none", "val_fraction": 0.3},  # 45 of 151 each
            [("day_0", 0, 40), ("day_1", 0, 21)],
            [("day_1", 21, 50), ("day_2", 0, 16)],
            [("day_2", 16, 61)],
        ),
    ],
)
def test_the_last_rows_are_for_validation_and_test(
    options: dict[str, Any], train: Any, val: Any, test: Any, npys: Path
) -> None:
    description = adopt(npys, **options)
    assert [ranges(description, split) for split in ("train", "val", "test")] == [train, val, test]


def test_without_a_last_day_everything_is_for_training(npys: Path) -> None:
    description = adopt(npys, last_day="none")
    assert set(description["splits"]) == {"train"}
    assert sum(stop - start for _, start, stop in ranges(description, "train")) == 151


@pytest.mark.parametrize(("fraction", "train_stop", "val_stop"), [(None, 40, 45), (0.2, 30, 40)])
def test_of_a_single_day_the_last_rows_are_held_out(
    fraction: float | None, train_stop: int, val_stop: int, tmp_path: Path
) -> None:
    write_day(tmp_path / "one", "day_0", 50)
    description = adopt(tmp_path / "one", val_fraction=fraction)
    assert ranges(description, "train") == [("day_0", 0, train_stop)]
    assert ranges(description, "val") == [("day_0", train_stop, val_stop)]
    assert ranges(description, "test") == [("day_0", val_stop, 50)]


def test_the_last_of_a_single_day_is_no_option(tmp_path: Path) -> None:
    write_day(tmp_path / "one", "day_0", 50)
    with pytest.raises(ConfigError, match=r"--last-day test-first needs two days or more\. Use --val-fraction"):
        adopt(tmp_path / "one", last_day="test-first")


def test_a_damaged_header_is_named(npys: Path) -> None:
    file = npys / "day_1_labels.npy"
    file.write_bytes(file.read_bytes().replace(b"(50, 1)", b"(50, 1("))
    with pytest.raises(DataError, match=r"day_1_labels\.npy: not a complete NumPy file \(bad header"):
        adopt(npys)


@pytest.mark.timeout(20)  # a pipe must not be waited for
def test_only_regular_files_are_read(npys: Path) -> None:
    for name, replace in (("dense", os.mkfifo), ("labels", os.mkdir)):
        (npys / f"day_1_{name}.npy").unlink()
        replace(npys / f"day_1_{name}.npy")
    text = problem(npys)
    assert "day_1_dense.npy: not a complete NumPy file (not a regular file)" in text
    assert "day_1_labels.npy: not a complete NumPy file (not a regular file)" in text


def test_a_fraction_of_the_last_of_several_days_is_no_option(npys: Path) -> None:
    with pytest.raises(ConfigError, match="add --last-day none"):
        adopt(npys, val_fraction=0.1)
    with pytest.raises(ConfigError, match=r"--val-fraction: should be less than 0\.5"):
        adopt(npys, val_fraction=0.5)


def test_too_few_rows_for_three_splits_are_an_error(tmp_path: Path) -> None:
    write_day(tmp_path / "one", "day_0", 4)
    assert "4 labelled rows are too few for all of train, val and test. Use --last-day none" in problem(
        tmp_path / "one"
    )


def test_kaggle_s_test_rows_have_no_labels(tmp_path: Path) -> None:
    write_day(tmp_path / "k", "train", 50)
    write_day(tmp_path / "k", "test", 20)
    change(tmp_path / "k" / "test_labels.npy", lambda labels: np.full_like(labels, -1))
    description = adopt(tmp_path / "k")
    assert ranges(description, "train") == [("train", 0, 40)]
    assert ranges(description, "unlabelled") == [("test", 0, 20)]
    assert any("unlabelled" in note for note in description["notes"])


def test_several_ids_per_feature(npys: Path) -> None:
    hot = [1, 3, 2]
    arrays = {}
    for day in range(3):
        file = npys / f"day_{day}_sparse.npy"
        ids = np.load(file)
        arrays[day] = [ids[:, [i]] // np.arange(size, 0, -1, dtype=np.int32) for i, size in enumerate(hot)]
        np.savez(npys / f"day_{day}_sparse_multi_hot.npz", **{str(i): array for i, array in enumerate(arrays[day])})
        file.unlink()
    description = adopt(npys)
    assert description["multi_hot"] == hot
    assert [feature["rows"] for feature in description["sparse"]] == SIZES
    stored = StoredDay(open_dataset(npys, verify="digests"), "day_1").take(slice(0, None))
    assert np.array_equal(stored.ids, np.concatenate(arrays[1], axis=1))


def test_all_problems_are_reported_at_once(npys: Path) -> None:
    (npys / "day_0_dense.npy").unlink()
    change(npys / "day_1_dense.npy", lambda a: a.astype(np.float64))
    change(npys / "day_2_dense.npy", np.asfortranarray)
    change(npys / "day_2_labels.npy", lambda a: a[:, 0])
    os.truncate(npys / "day_1_sparse.npy", 500)
    text = problem(npys)
    assert "day_0_dense.npy: missing" in text
    assert "day_1_dense.npy: float64 [50, 2], expected float32 [rows, columns]" in text
    assert "day_1_sparse.npy: not a complete NumPy file" in text
    assert "day_2_dense.npy: in Fortran order (column by column); save np.ascontiguousarray(array) instead" in text
    assert "day_2_labels.npy: int32 [61], expected int32 [rows, columns]" in text


def test_rows_and_columns_must_agree(npys: Path) -> None:
    change(npys / "day_0_dense.npy", lambda a: a[:-1])
    change(npys / "day_1_sparse.npy", lambda a: a[:, :2])
    for day in range(3):
        change(npys / f"day_{day}_labels.npy", lambda a: np.repeat(a, 2, axis=1))
    text = problem(npys)
    assert "day_0_dense.npy: [39, 2], expected [40, 2]" in text
    assert "day_1_sparse.npy: [50, 2], expected [50, 3]" in text
    assert "day_2_labels.npy: [61, 2], expected [61, 1]" in text


def test_bad_values_are_reported_with_their_locations(npys: Path) -> None:
    change(npys / "day_0_dense.npy", lambda a: a.__setitem__((7, 1), np.nan))
    change(npys / "day_0_sparse.npy", lambda a: a.__setitem__((3, 2), -5))
    change(npys / "day_1_dense.npy", lambda a: a.__setitem__((8, 0), -np.inf))
    text = problem(npys)
    assert "day_0_dense.npy: row 7, column I2: nan is not a finite number" in text
    assert "day_0_sparse.npy: row 3, column C3: id -5 is negative" in text
    assert "day_1_dense.npy: row 8, column I1: -inf is not a finite number" in text


def test_labels_are_checked(npys: Path) -> None:
    change(npys / "day_1_labels.npy", lambda a: a.__setitem__((9, 0), -1))
    assert "day_1_labels.npy: row 9: label -1 is neither 0 nor 1" in problem(npys)


def test_a_missing_day_is_named(npys: Path) -> None:
    for file in npys.glob("day_1_*"):
        file.unlink()
    assert "day_1: no files; days are numbered from 0 without gaps" in problem(npys)


def test_files_that_were_not_renamed_are_recognised(npys: Path) -> None:
    for day in range(3):
        (npys / f"day_{day}_sparse.npy").rename(npys / f"day_{day}_sparse_contig_freq.npy")
    assert "day_2_sparse.npy: missing; rename day_2_sparse_contig_freq.npy to it" in problem(npys)


def test_two_kinds_of_ids_are_ambiguous(npys: Path) -> None:
    shutil.copy(npys / "day_0_sparse.npy", npys / "day_0_sparse_contig_freq.npy")
    assert "day_0_sparse.npy or day_0_sparse_contig_freq.npy? Keep one" in problem(npys)


def test_days_and_kaggle_s_names_do_not_mix(npys: Path) -> None:
    write_day(npys, "train", 10)
    assert "train: its files do not belong together with those of day_0" in problem(npys)


def test_a_directory_without_such_files_is_an_error(tmp_path: Path) -> None:
    assert "no day_0_dense.npy" in problem(tmp_path)
    with pytest.raises(DataError, match="no such directory"):
        adopt(tmp_path / "nowhere")


def test_table_sizes_can_be_given(npys: Path) -> None:
    assert [feature["rows"] for feature in adopt(npys, table_size=[1000])["sparse"]] == [1000, 1000, 1000]
    (npys / "dataset.json").unlink()
    with pytest.raises(ConfigError) as caught:
        adopt(npys, table_size=[4, 29, 501])
    assert "--table-size" in str(caught.value)
    assert "day_0_sparse.npy: row 0, column C2: id 29 is not in 0..28" in str(caught.value)
    change(npys / "day_1_sparse.npy", lambda a: a.__setitem__((0, 0), -7))
    assert "day_1_sparse.npy: row 0, column C1: id -7 is negative" in problem(npys, table_size=[4, 29, 501])
    assert not (npys / "dataset.json").exists()
    with pytest.raises(ConfigError, match="2 sizes, 3 columns of ids"):
        adopt(npys, table_size=[4, 30])


def test_adopting_the_same_again_does_nothing(npys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first = adopt(npys)
    before = (npys / "dataset.json").stat().st_mtime_ns
    assert adopt(npys) == first
    assert (npys / "dataset.json").stat().st_mtime_ns == before
    assert "already adopted: nothing to do" in caplog.messages[-1]


def test_prepare_never_overwrites_adopted_files(npys: Path) -> None:
    """They are the user's, though their description is ours."""
    adopt(npys)
    before = {file.name: file.read_bytes() for file in npys.iterdir()}
    with pytest.raises(DataError, match="holds files that recmill did not write"):
        prepare("random-clicks", npys, rows=100, overwrite=True)
    assert {file.name: file.read_bytes() for file in npys.iterdir()} == before


def test_another_description_is_not_replaced(npys: Path, clicks: Path) -> None:
    adopt(npys)
    with pytest.raises(DataError, match=r"exists already:\n  last_day: was val-first, is none\nRemove it to"):
        adopt(npys, last_day="none")
    file = npys / "dataset.json"
    file.write_text(file.read_text().replace('"adopted"', '"mine"'))
    with pytest.raises(DataError, match=r"exists already:\n  dataset: was mine, is adopted\n"):
        adopt(npys)
    before = (clicks / "dataset.json").read_bytes()
    with pytest.raises(DataError, match=r"exists already:\n  dataset: was synthetic-clicks, is adopted\n"):
        adopt(clicks)
    assert (clicks / "dataset.json").read_bytes() == before


def test_files_that_changed_since_are_found(npys: Path) -> None:
    adopt(npys)
    change(npys / "day_0_labels.npy", lambda labels: 1 - labels)
    with pytest.raises(DataError, match=r"day_0_labels.npy: its content changed[\s\S]*remove .*dataset\.json"):
        adopt(npys)


def criteo_line(random: np.random.Generator, label: str) -> str:
    """13 counts and 26 hashes; some of each are missing."""
    dense = [str(n) if n < 30 else "" for n in random.integers(-1, 40, size=13)]
    ids = [f"{n:08x}" if n else "" for n in random.integers(0, 6, size=26) * 0x1357_9BDF % 2**32]
    return "\t".join([label, *dense, *ids]) + "\n"


def test_what_torchrec_s_own_scripts_write_can_be_trained_on(tmp_path: Path, dlrm: dict[str, Any]) -> None:
    from torchrec.datasets.criteo import BinaryCriteoUtils

    random, raw, out = np.random.default_rng(1), tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    out.mkdir()
    for day in range(3):
        (raw / f"day_{day}").write_text("".join(criteo_line(random, str(row % 2)) for row in range(60)))
        parts = [
            str((out if part != "sparse" else raw) / f"day_{day}_{part}.npy") for part in ("dense", "sparse", "labels")
        ]
        BinaryCriteoUtils.tsv_to_npys(str(raw / f"day_{day}"), *parts)
    sparse = [str(raw / f"day_{day}_sparse.npy") for day in range(3)]
    BinaryCriteoUtils.sparse_to_contiguous(sparse, str(out), frequency_threshold=0)
    assert "rename day_0_sparse_contig_freq.npy" in problem(out)
    for day in range(3):
        (out / f"day_{day}_sparse_contig_freq.npy").rename(out / f"day_{day}_sparse.npy")
    description = adopt(out, dense_transform="log(x - min + 2)")
    assert len(description["dense"]) == 13
    assert [feature["rows"] for feature in description["sparse"]] == [8] * 26  # 6 hashes, numbered from 2
    results = train({**dlrm, "data": {"path": str(out)}}, tmp_path / "run")
    assert results["test"]["rows"] == 30


def test_files_are_compared_with_mlperf_s_before_they_are_adopted(npys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = problem(npys, verify_mlperf=True)
    assert "  day_3_dense.npy: missing\n  day_3_labels.npy: missing\n  day_3_sparse.npy: missing\n" in text
    assert "multi_hot" not in text
    published = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in npys.iterdir()}
    monkeypatch.setattr(adopt_module, "published_md5s", {"mlperf_v2": published}.get)
    description = adopt(npys, verify_mlperf=True)
    assert "the MD5s of all files are those that MLPerf published" in description["notes"]
    assert adopt(npys) == description  # it is no part of the recipe
    published["day_1_dense.npy"] = "0" * 32
    found = hashlib.md5((npys / "day_1_dense.npy").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"day_1_dense.npy: md5 {found}, MLPerf's is {'0' * 32}\n"):
        adopt(npys, verify_mlperf=True)
    for kind in ("dense", "sparse", "labels"):
        published.pop(f"day_2_{kind}.npy")
    with pytest.raises(DataError, match="day_2: not one of MLPerf's days"):
        adopt(npys, verify_mlperf=True)


def test_the_command_does_the_same(npys: Path, run_cli: RunCli) -> None:
    done = run_cli("adopt", npys, "--last-day", "test-first", "--table-size", "4,30,501")
    assert done.returncode == 0, done.stderr
    assert "adopted: rows train 90, val 30, test 31; 2 numeric, 3 categorical features" in done.stdout
    description = json.loads((npys / "dataset.json").read_text())
    assert description["recipe"] == {
        "last_day": "test-first",
        "val_fraction": None,
        "table_size": [4, 30, 501],
        "dense_transform": None,
    }
