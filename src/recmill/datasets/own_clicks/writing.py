"""Write the files of one split, block by block."""

import io
import os
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

from recmill.data.click_rows import ClickRows
from recmill.datasets.writing import NpyWriter
from recmill.errors import ResourceError

_GROUP_ROWS = 1 << 18


def write_arrow(path: Path, frame: pl.DataFrame) -> None:
    """Write the frame through a buffer in memory: on a full disk, Polars raises errors that do not say so."""
    buffer = io.BytesIO()
    frame.write_ipc(buffer)
    with replaced(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def read_arrow(path: Path) -> pl.DataFrame:
    """Read what `write_arrow` wrote. `pl.read_ipc` would take [, * and ? in the path for a pattern."""
    return pl.scan_ipc(path, glob=False).collect()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary file that becomes `path`, complete at once: a Spark task may run twice at the same time."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class SplitWriter:
    """Writes dense values, ids and labels of a known number of rows; several ids per feature as an npz.

    Weights and kept columns of the rows may follow.
    """

    def __init__(self, directory: Path, name: str, rows: int, sizes: list[int], id_type: type) -> None:
        self._directory, self._name, self._rows = directory, name, rows
        self._weights: NpyWriter | None = None
        self._kept: list[Path] = []
        self._sizes = sizes
        self._is_bag = max(sizes) > 1
        self._labels = NpyWriter(directory / f"{name}_labels.npy", np.int32, (rows, 1))
        self._dense: NpyWriter | None = None
        self._ids = [NpyWriter(path, id_type, (rows, width)) for path, width in self._id_files()]

    def _id_files(self) -> list[tuple[Path, int]]:
        if not self._is_bag:
            return [(self._directory / f"{self._name}_sparse.npy", len(self._sizes))]
        return [(self._directory / f".{self._name}_ids_{i}.npy", size) for i, size in enumerate(self._sizes)]

    def append(self, block: ClickRows) -> None:
        if self._dense is None:
            path = self._directory / f"{self._name}_dense.npy"
            self._dense = NpyWriter(path, np.float32, (self._rows, block.dense.shape[1]))
        self._dense.append(block.dense)
        self._labels.append(block.labels[:, None])
        ends = np.cumsum(self._sizes)[:-1].tolist() if self._is_bag else []
        for writer, ids in zip(self._ids, np.split(block.ids, ends, axis=1), strict=True):
            writer.append(ids)

    def append_weights(self, weights: np.ndarray) -> None:
        if self._weights is None:
            self._weights = NpyWriter(self._directory / f"{self._name}_weights.npy", np.float32, (self._rows,))
        self._weights.append(weights)

    def append_kept(self, columns: pl.DataFrame) -> None:
        self._kept.append(self._directory / f".{self._name}_keep_{len(self._kept)}.arrow")
        write_arrow(self._kept[-1], columns)

    def close(self) -> None:
        assert self._dense
        for writer in (self._dense, self._labels, *self._ids, *([self._weights] if self._weights else [])):
            writer.__exit__(None)
        if self._kept:
            self._join_kept()
        if self._is_bag:
            self._join_ids()

    def _join_kept(self) -> None:
        path = self._directory / f"{self._name}_keep.parquet"
        try:
            pl.scan_ipc(self._kept, glob=False).sink_parquet(path, row_group_size=_GROUP_ROWS)
        except pl.exceptions.ComputeError as error:
            raise ResourceError(f"{path}: could not be written ({error}). Is the disk full?") from error
        for piece in self._kept:
            piece.unlink()

    def _join_ids(self) -> None:
        npz = self._directory / f"{self._name}_sparse_multi_hot.npz"
        with zipfile.ZipFile(npz, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for index, (path, _) in enumerate(self._id_files()):
                info = zipfile.ZipInfo(f"{index}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                with archive.open(info, "w", force_zip64=True) as member, path.open("rb") as file:
                    shutil.copyfileobj(file, member, 1 << 20)
                path.unlink()
