"""Multi-hot ids: the companions are the DLRM reference's, and its reader finds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare
from recmill.data import multi_hot
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset
from recmill.datasets.multi_hot import write_multi_hot

from ..criteo_raw import DAYS, reference_tables, stored


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_companions_are_the_references_in_however_many_blocks_they_are_drawn(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, sizes = [1, 50, 333, 1000], [3, 1, 7, 2]
    expected = reference_tables(rows, sizes, distribution, seed=11)
    for at_once in (1 << 22, 64):
        monkeypatch.setattr(multi_hot, "_DRAWN_AT_ONCE", at_once)
        blocks = [list(found) for found in multi_hot.companions(rows, sizes, distribution, 11)]
        assert (len(blocks[2]) > 1) == (at_once == 64)
        for found, table in zip(blocks, expected, strict=True):
            assert np.concatenate(found).dtype == np.int32
            np.testing.assert_array_equal(np.concatenate(found), table)


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_multi_hot_files_hold_the_references_ids(distribution: Any, logs: Path, tmp_path: Path) -> None:
    sizes = [1 + c % 4 for c in range(26)]
    prepare("criteo", tmp_path / "one", input=logs)
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


def test_the_file_is_the_same_however_many_rows_are_written_at_once(tmp_path: Path) -> None:
    tables = reference_tables([10, 20], [3, 1], "uniform", seed=1)
    paths = [tmp_path / f"{index}.npy" for index in range(2)]
    for path, table in zip(paths, tables, strict=True):
        np.save(path, table)
    ids = np.arange(230).reshape(115, 2)
    np.save(tmp_path / "ids.npy", ids)
    for rows_at_once in (50, 1000):
        write_multi_hot(tmp_path / f"{rows_at_once}.npz", tmp_path / "ids.npy", paths, rows_at_once)
    assert (tmp_path / "50.npz").read_bytes() == (tmp_path / "1000.npz").read_bytes()
    with np.load(tmp_path / "50.npz") as archive:
        np.testing.assert_array_equal(archive["0"], tables[0][ids[:, 0] % 10])
        np.testing.assert_array_equal(archive["1"], tables[1][ids[:, 1] % 20])
