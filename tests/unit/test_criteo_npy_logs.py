"""`prepare criteo` from the npy files of TorchRec's scripts: the same as from the raw logs."""

from pathlib import Path

import numpy as np
import pytest

from recmill import prepare
from recmill.errors import ConfigError, DataError

from ..criteo_raw import contents, reference_tables, sparse, stored, write_days

SIZES = [*range(3, 29)]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("raw")
    write_days(directory, [120, 90, 61])
    return directory


@pytest.fixture(scope="module")
def npys(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw ids, which equal those of TorchRec's own script byte for byte (test_criteo_compat.py)."""
    directory = tmp_path_factory.mktemp("npy") / "npy"
    prepare("criteo", directory, input=raw, compat="torchrec", ids="mod")
    return directory


def npy_contents(directory: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(directory).items() if name.startswith("day_")}


@pytest.mark.parametrize("min_frequency", [0, 3])
def test_ids_are_numbered_as_from_the_raw_logs(min_frequency: int, raw: Path, npys: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "raw", input=raw, compat="torchrec", min_frequency=min_frequency)
    prepare("criteo", tmp_path / "npy", input=npys, compat="torchrec", min_frequency=min_frequency)
    assert len(npy_contents(tmp_path / "npy")) == 9
    assert npy_contents(tmp_path / "npy") == npy_contents(tmp_path / "raw")


def rows_of(directory: Path, days: range) -> list[bytes]:
    """Return each row as bytes: dense values, ids, label."""
    found = []
    for day in days:
        parts = [stored(directory, f"day_{day}_{part}") for part in ("dense", "sparse", "labels")]
        found += [b"".join(np.ascontiguousarray(p[row]).tobytes() for p in parts) for row in range(len(parts[0]))]
    return found


def test_a_shuffle_without_defects_keeps_all_rows_exactly(npys: Path, tmp_path: Path) -> None:
    options = {"compat": "torchrec-fixed", "ids": "mod", "shuffle": "global"}
    description = prepare("criteo", tmp_path / "d", input=npys, **options)  # type: ignore[arg-type]
    before, after = rows_of(npys, range(2)), rows_of(tmp_path / "d", range(2))
    assert sorted(after) == sorted(before)
    assert after != before
    assert rows_of(tmp_path / "d", range(2, 3)) == rows_of(npys, range(2, 3))  # the last day
    assert sparse(npys, 2).max() > 2**24
    assert not any("rounded" in note for note in description["notes"])


def test_all_files_have_one_dense_transform_if_defects_are_fixed(tmp_path: Path) -> None:
    for day, smallest in enumerate([-2, 0, 5]):
        write_days(tmp_path / "one", [50], seed=day + 1, smallest=smallest, missing=0)
        (tmp_path / "one" / "day_0").rename(tmp_path / f"day_{day}")
    (tmp_path / "one").rmdir()
    prepare("criteo", tmp_path / "d", input=tmp_path, compat="torchrec-fixed", ids="mod")
    fields = [line.split("\t")[1:14] for line in (tmp_path / "day_2").read_text().splitlines()]
    expected = np.log(np.array(fields, np.int64) + 2 + 2, dtype=np.float32)  # x - (-2) + 2
    np.testing.assert_array_equal(stored(tmp_path / "d", "day_2_dense"), expected)


def test_ids_are_added_as_the_dlrm_reference_adds_them(npys: Path, tmp_path: Path) -> None:
    added = [1 + column % 3 for column in range(26)]
    options = {"compat": "torchrec-fixed", "ids": "mod", "table_size": SIZES, "multi_hot": added}
    prepare("criteo", tmp_path / "d", input=npys, **options)  # type: ignore[arg-type]
    tables = reference_tables(SIZES, added, "uniform", 0)
    with np.load(tmp_path / "d" / "day_1_sparse_multi_hot.npz") as found:
        for column, table in enumerate(tables):
            ids = stored(npys, "day_1_sparse")[:, column] % SIZES[column]
            np.testing.assert_array_equal(found[str(column)], table[ids])


def test_ids_may_be_in_another_directory_and_bad_files_are_named(npys: Path, tmp_path: Path) -> None:
    for part in ("others", "ids"):
        (tmp_path / part).mkdir()
    for file in npys.glob("day_*.npy"):
        target = tmp_path / ("ids" if "sparse" in file.name else "others") / file.name
        target.write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="no day_0, day_1"):
        prepare("criteo", tmp_path / "d", input=tmp_path / "others")
    with pytest.raises(DataError, match=r"day_0_dense.npy: no such file.* --sparse-input"):
        prepare("criteo", tmp_path / "d", input=tmp_path / "ids")
    options = {"input": tmp_path / "others", "sparse_input": str(tmp_path / "ids"), "compat": "torchrec-fixed"}
    prepare("criteo", tmp_path / "d", **options)  # type: ignore[arg-type]
    prepare("criteo", tmp_path / "e", input=npys, compat="torchrec-fixed")
    assert npy_contents(tmp_path / "d") == npy_contents(tmp_path / "e")
    with pytest.raises(ConfigError, match="--dense log3 is for raw logs"):
        prepare("criteo", tmp_path / "f", input=npys, dense="log3")
    ids = stored(tmp_path / "ids", "day_1_sparse")
    ids[7, 3] = 2**32
    np.save(tmp_path / "ids" / "day_1_sparse.npy", ids)
    with pytest.raises(DataError, match=r"day_1_sparse.npy: \[7, 3\] is 4294967296, which cannot be used"):
        prepare("criteo", tmp_path / "f", **options)  # type: ignore[arg-type]
    (tmp_path / "ids" / "day_1_sparse.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"day_1_sparse.npy: not a complete NumPy file"):
        prepare("criteo", tmp_path / "f", **options)  # type: ignore[arg-type]
