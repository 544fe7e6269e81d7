"""Stored multi-hot ids: tables of companions as files, and what they make of one-hot ids."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from recmill.data.companions import companions
from recmill.datasets.writing import NpyWriter

_ROWS_AT_ONCE = 1 << 17


def companion_paths(directory: Path, features: int) -> list[Path]:
    return [directory / f"companions-{index}.npy" for index in range(features)]


def write_companions(directory: Path, rows: list[int], sizes: list[int], distribution: str, seed: int) -> None:
    """The tables as files: together they may be larger than memory."""
    paths = companion_paths(directory, len(rows))
    for index, blocks in enumerate(companions(rows, sizes, distribution, seed)):
        with NpyWriter(paths[index], np.int32, (rows[index], sizes[index])) as file:
            for block in blocks:
                file.append(block)


def write_multi_hot(path: Path, ids: np.ndarray, tables: list[Path]) -> None:
    """`ids` [n, features] -> an uncompressed npz with one int32 array [n, size] per feature, written in a stream."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for feature, table_path in enumerate(tables):
            table = np.load(table_path, mmap_mode="r")
            # numpy's own savez writes this kind of member; readers of the reference count on its header's length
            info = zipfile.ZipInfo(f"{feature}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as member:
                header = {"descr": "<i4", "fortran_order": False, "shape": (len(ids), table.shape[1])}
                npy_format.write_array_header_1_0(member, header)
                for start in range(0, len(ids), _ROWS_AT_ONCE):
                    chosen = ids[start : start + _ROWS_AT_ONCE, feature] % len(table)
                    member.write(np.ascontiguousarray(table[chosen]).data)
