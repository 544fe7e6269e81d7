"""Write multi-hot ids: each one-hot id, followed by the companions that a fixed table assigns to it."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from recmill.data.multi_hot import companions
from recmill.datasets.writing import NpyWriter


def companion_paths(directory: Path, features: int) -> list[Path]:
    return [directory / f"companions-{index}.npy" for index in range(features)]


def write_companions(directory: Path, rows: list[int], sizes: list[int], distribution: str, seed: int) -> None:
    """Write the tables of companions as files: together they may be larger than memory."""
    paths = companion_paths(directory, len(rows))
    for index, blocks in enumerate(companions(rows, sizes, distribution, seed)):
        with NpyWriter(paths[index], np.int32, (rows[index], sizes[index])) as file:
            for block in blocks:
                file.append(block)


def write_multi_hot(path: Path, one_hot: Path, tables: list[Path], rows_at_once: int = 1 << 17) -> None:
    """Write the ids [n, features] of the npy file `one_hot` as an npz with one int32 array [n, size] per feature."""
    ids = np.load(one_hot, mmap_mode="r")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for feature, table_path in enumerate(tables):
            table = np.load(table_path, mmap_mode="r")
            # Written as np.savez does: the DLRM reference's reader relies on the length of this header.
            info = zipfile.ZipInfo(f"{feature}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as member:
                header = {"descr": "<i4", "fortran_order": False, "shape": (len(ids), table.shape[1])}
                npy_format.write_array_header_1_0(member, header)
                for start in range(0, len(ids), rows_at_once):
                    chosen = ids[start : start + rows_at_once, feature] % len(table)
                    member.write(np.ascontiguousarray(table[chosen]).data)
