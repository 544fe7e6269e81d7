"""The rows of a prepared click log as arrays, whatever they are stored as: npy, npz (multi-hot) or Parquet."""

import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from recmill.errors import DataError
from recmill.schema import ClicksDescription, Dataset, SparseFeature

BLOCK_ROWS = 1 << 16
_BLOCKS_KEPT = 36  # decoded ones of all Parquet files: two windows of the loader's shuffling, and a few that they cut


@dataclass(frozen=True)
class ClickRows:
    """dense float32 [n, features]; ids int [n, tables], for multi-hot [n, all ids of all tables]; labels int32 [n]."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Any) -> "ClickRows":
        return ClickRows(self.dense[which], self.ids[which], self.labels[which])


def _taken(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """take() is 2 to 3 times faster than indexing."""
    return array[rows] if isinstance(rows, slice) else np.asarray(array).take(rows, axis=0)


class StoredDay:
    """Random access to the rows of one day. Ids come as rows of their tables; nothing is checked here."""

    def __init__(self, dataset: Dataset, day: str) -> None:
        description = dataset.description
        assert isinstance(description, ClicksDescription)
        self.description, self.day = description, day
        self.rows = description.files[description.day_files(day)[-1]].rows
        first_ids = np.array([feature.first_id for feature in description.sparse])
        self._first_ids = first_ids if first_ids.any() else None
        if description.layout == "parquet":
            self._parquet: _ParquetFile | None = _ParquetFile(dataset.path / f"{day}.parquet", description)
            return
        self._parquet = None
        self._dense, self._labels = dataset.array(f"{day}_dense.npy"), dataset.array(f"{day}_labels.npy")
        if description.multi_hot:
            self._ids = npz_arrays(dataset.path / description.sparse_file(day), description.multi_hot, self.rows)
        else:
            self._ids = [dataset.array(description.sparse_file(day))]

    def take(self, rows: np.ndarray | slice) -> ClickRows:
        """The stored rows of these numbers, in this order; of a slice maybe the stored arrays themselves, read-only."""
        if self._parquet:
            parquet, span = self._parquet, rows.indices(self.rows) if isinstance(rows, slice) else None
            found = parquet.between(*span[:2]) if span else parquet.take(np.asarray(rows))
        else:
            ids = [_taken(array, rows) for array in self._ids]
            all_ids = ids[0] if len(ids) == 1 else np.concatenate(ids, axis=1)
            found = ClickRows(_taken(self._dense, rows), all_ids, _taken(self._labels, rows)[:, 0])
        dense, ids_n = found.dense, found.ids
        if self.description.dense_stored == "plus-one":
            dense = np.log1p(dense)
        if self._first_ids is not None:
            with np.errstate(over="ignore"):  # 64-bit hashes wrap round on purpose
                ids_n = ids_n - self._first_ids
        return ClickRows(dense, ids_n, found.labels)

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, ClickRows]]:
        """(number of the first row, rows), in order."""
        for first in range(start, self.rows if stop is None else stop, BLOCK_ROWS):
            yield first, self.take(slice(first, min(first + BLOCK_ROWS, self.rows if stop is None else stop)))


_BLOCKS: "OrderedDict[tuple[object, ...], ClickRows]" = OrderedDict()
_BLOCKS_LOCK = Lock()  # training's batches are prepared in a thread, and validation reads meanwhile


class _ParquetFile:
    """Decoded block by block; the newest blocks of all files are kept."""

    def __init__(self, path: Path, description: ClicksDescription) -> None:
        import polars as pl

        self._path, self._dense, self._sparse = (
            path,
            description.dense,
            [feature.name for feature in description.sparse],
        )
        self._key = (path, path.stat().st_mtime_ns)  # another file may come to stand in its place
        try:
            names = pl.read_parquet_schema(path)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"{path}: not a Parquet file that can be read ({error}). Prepare it again.") from None
        missing = [name for name in ["label", *self._dense, *self._sparse] if name not in names]
        if missing:
            raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(names)}. Prepare it again.")

    def take(self, rows: np.ndarray) -> ClickRows:
        numbers = rows // BLOCK_ROWS
        found = []
        places = []
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            found.append(self._block(int(number))[rows[chosen] - number * BLOCK_ROWS])
            places.append(chosen)
        if len(found) == 1:
            return found[0]
        back = np.argsort(np.concatenate(places), kind="stable")
        parts = ([f.dense for f in found], [f.ids for f in found], [f.labels for f in found])
        dense, ids, labels = (np.concatenate(part)[back] for part in parts)
        return ClickRows(dense, ids, labels)

    def between(self, start: int, stop: int) -> ClickRows:
        found = []
        for first in range(start - start % BLOCK_ROWS, stop, BLOCK_ROWS):
            block = self._block(first // BLOCK_ROWS)
            found.append(block[max(start - first, 0) : stop - first])
        if len(found) == 1:
            return found[0]
        parts = ([f.dense for f in found], [f.ids for f in found], [f.labels for f in found])
        return ClickRows(*(np.concatenate(part) for part in parts))

    def _block(self, number: int) -> ClickRows:
        import polars as pl

        key = (*self._key, number)
        with _BLOCKS_LOCK:
            if key in _BLOCKS:
                _BLOCKS.move_to_end(key)
                return _BLOCKS[key]
        frame = pl.scan_parquet(self._path).slice(number * BLOCK_ROWS, BLOCK_ROWS).collect()
        nulls = [name for name in ["label", *self._dense, *self._sparse] if frame[name].null_count()]
        if nulls:
            row = number * BLOCK_ROWS + int(np.argmax(frame[nulls[0]].is_null().to_numpy()))
            raise DataError(f"{self._path}: row {row:,}, column {nulls[0]}: no value. Prepare the dataset again.")
        block = ClickRows(
            dense=np.stack([frame[name].to_numpy() for name in self._dense], axis=1).astype(np.float32, copy=False),
            ids=np.stack([frame[name].to_numpy() for name in self._sparse], axis=1),
            labels=frame["label"].to_numpy().astype(np.int32),
        )
        for array in (block.dense, block.ids, block.labels):
            array.flags.writeable = False
        with _BLOCKS_LOCK:
            _BLOCKS[key] = block
            if len(_BLOCKS) > _BLOCKS_KEPT:
                _BLOCKS.popitem(last=False)
        return block


def npz_arrays(path: Path, sizes: list[int], rows: int) -> list[np.ndarray]:
    """The members "0", "1", ... of an uncompressed npz, memory-mapped: np.load would read them whole."""
    arrays: list[np.ndarray] = []
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            whole = np.memmap(path, np.uint8, "r")  # one mapping for all: each would keep the file open
            for index, size in enumerate(sizes):
                member = archive.getinfo(f"{index}.npy")
                if member.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{path}: it is compressed. Save it with np.savez, not np.savez_compressed.")
                file.seek(member.header_offset)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(30)[26:30])
                file.seek(name_bytes + extra_bytes, 1)
                version = npy_format.read_magic(file)
                read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
                shape, fortran, dtype = read(file)
                if shape != (rows, size) or fortran or dtype.str[1:] not in ("i4", "i8"):
                    raise DataError(f"{path}: '{index}' is {dtype} {list(shape)}, expected i4 or i8 {[rows, size]}.")
                values = whole[file.tell() : file.tell() + rows * size * dtype.itemsize]
                arrays.append(values.view(dtype).reshape(shape))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"{path}: not a NumPy archive of {len(sizes)} arrays ({error}). Prepare it again.") from None
    return arrays


def id_limits(description: ClicksDescription) -> np.ndarray:
    """uint64, one per column of ids: the first id that is too large (the largest uint64 for 64-bit hashes)."""
    limits = np.array([min(feature.rows, 2**64 - 1) for feature in description.sparse], dtype=np.uint64)
    return np.repeat(limits, description.multi_hot) if description.multi_hot else limits


def feature_of_column(description: ClicksDescription, column: int) -> SparseFeature:
    if not description.multi_hot:
        return description.sparse[column]
    return description.sparse[int(np.searchsorted(np.cumsum(description.multi_hot), column, side="right"))]


def first_bad_id(ids: np.ndarray, limits: np.ndarray) -> tuple[int, int] | None:
    """(row, column) of the first id outside 0..rows-1; one unsigned comparison finds negatives too."""
    if ids.dtype == np.int32:  # as it is: copies would cost three times the comparison
        bad = ids.view(np.uint32) >= np.minimum(limits, 1 << 31).astype(np.uint32)
    else:
        bad = ids.astype(np.int64, copy=False).view(np.uint64) >= limits
    if not bad.any():
        return None
    row, column = np.argwhere(bad)[0]
    return int(row), int(column)


def bad_id_text(file: str, row: int, feature: SparseFeature, value: int) -> str:
    fact = f"id {value} is not in 0..{feature.rows - 1} (table of {feature.rows:,} rows)"
    return f"{file}: row {row:,}, column {feature.name}: {fact}"


def id_problems(dataset: Dataset) -> list[str]:
    """Every id of every row; training checks the same per batch."""
    description = dataset.description
    assert isinstance(description, ClicksDescription)
    problems = []
    limits = id_limits(description)
    for day in description.days:
        for start, rows in StoredDay(dataset, day).blocks():
            if bad := first_bad_id(rows.ids, limits):
                row, column = bad
                feature = feature_of_column(description, column)
                problems.append(
                    bad_id_text(description.sparse_file(day), start + row, feature, int(rows.ids[row, column]))
                )
                break
    return problems
