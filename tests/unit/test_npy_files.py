from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.data.npy_files import npy_array, npz_arrays
from recmill.errors import DataError


def test_members_of_an_npz_file_are_memory_mapped(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {str(i): np.arange(6 * (i + 1)).reshape(6, i + 1) for i in range(3)}
    np.savez(tmp_path / "a.npz", **arrays)
    found = npz_arrays(tmp_path / "a.npz")
    assert all(np.array_equal(array, arrays[str(i)]) for i, array in enumerate(found))
    assert len(found) == 3
    assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in found)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"0": np.zeros(9)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match="it is compressed"):
        npz_arrays(tmp_path / "a.npz")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not a NumPy archive"):
        npz_arrays(tmp_path / "a.npz")
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(DataError, match="it is empty"):
        npz_arrays(tmp_path / "empty.npz")
    np.savez(tmp_path / "b.npz", ids=np.zeros(9))
    with pytest.raises(DataError, match="not a NumPy archive"):
        npz_arrays(tmp_path / "b.npz")


@pytest.mark.filterwarnings("ignore:Reading .npy")  # NumPy repairs some headers, and says so
@pytest.mark.parametrize(
    ("name", "read", "error"), [("a.npy", npy_array, ValueError), ("a.npz", npz_arrays, DataError)]
)
def test_a_flipped_bit_in_any_byte_gives_an_array_or_one_kind_of_error(
    name: str, read: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    arrays: dict[str, Any] = {"0": np.zeros((4, 2), np.int32)}
    if name == "a.npz":
        np.savez(tmp_path / name, **arrays)
    else:
        np.save(tmp_path / name, arrays["0"])
    good = (tmp_path / name).read_bytes()
    failed = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        (tmp_path / name).write_bytes(bad)
        try:
            read(tmp_path / name)
        except error:
            failed += 1
    assert failed > 50
