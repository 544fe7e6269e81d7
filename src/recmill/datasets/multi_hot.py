"""Several ids per row and feature, made from one: a fixed table per feature says which others go with an id.

The tables equal those of the DLRM reference for one seed: its random stream, drawn feature after feature.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from recmill.datasets.writing import NpyWriter

_DRAWN_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 1 << 17


def companions(rows: list[int], sizes: list[int], distribution: str, seed: int) -> Iterator[Iterator[np.ndarray]]:
    """For each feature the blocks of its table [rows, size] int32: an id itself, then those that go with it."""
    stream = np.random.RandomState(seed)  # the legacy stream is part of the published recipe

    def blocks(count: int, size: int) -> Iterator[np.ndarray]:
        drawn: np.ndarray
        step = max(_DRAWN_AT_ONCE // size, 1)
        for start in range(0, count, step):
            shape = (min(step, count - start), size - 1)
            if distribution == "uniform":
                drawn = stream.randint(0, count, size=shape)
            else:
                with np.errstate(invalid="ignore"):  # far values overflow int32, as they do in the reference
                    drawn = stream.pareto(a=0.25, size=shape).astype(np.int32) % count
            own = np.arange(start, start + shape[0])[:, None]
            yield np.concatenate([own, drawn], axis=1).astype(np.int32)

    for count, size in zip(rows, sizes, strict=True):
        yield blocks(count, size)


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
