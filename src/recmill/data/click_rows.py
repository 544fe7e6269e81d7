"""The rows of a prepared click log as arrays, whether they are stored as npy, npz (multi-hot) or Parquet."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from recmill.data.npy_files import npz_arrays
from recmill.errors import DataError
from recmill.schema import ClicksDescription, Dataset

BLOCK_ROWS = 1 << 16


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


def concatenate(parts: Sequence[ClickRows]) -> ClickRows:
    if len(parts) == 1:
        return parts[0]
    return ClickRows(
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


class BlockCache:
    """The most recently used blocks that were decoded from Parquet files.

    Threads may share it: training batches are prepared in one, and validation reads in another.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[Path, int], ClickRows] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[Path, int]) -> ClickRows | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: tuple[Path, int], block: ClickRows) -> None:
        with self._lock:
            self._blocks[key] = block
            if len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)


class StoredDay:
    """Random access to the rows of one day. Ids become rows of their tables; values are not checked here.

    Without a `cache` two blocks of a Parquet file are kept, which is enough to read it in order.
    """

    def __init__(self, dataset: Dataset, day: str, cache: BlockCache | None = None) -> None:
        description = dataset.clicks
        self.rows = description.files[description.day_files(day)[-1]].rows
        self._dense_stored = description.dense_stored
        first_ids = np.array([feature.first_id for feature in description.sparse])
        self._first_ids = first_ids if first_ids.any() else None
        self._files: _NpyDay | _ParquetDay
        if description.layout == "parquet":
            self._files = _ParquetDay(dataset.path / f"{day}.parquet", description, self.rows, cache or BlockCache(2))
        else:
            self._files = _NpyDay(dataset, day, self.rows)

    def take(self, rows: np.ndarray | slice) -> ClickRows:
        """Return the rows with these numbers, in this order. For a slice these may be views of read-only files."""
        stored = self._files.take(rows)
        dense, ids = stored.dense, stored.ids
        if self._dense_stored == "plus-one":
            dense = np.log1p(dense)
        if self._first_ids is not None:
            with np.errstate(over="ignore"):  # 64-bit hashes wrap around on purpose
                ids = ids - self._first_ids
        return ClickRows(dense, ids, stored.labels)


@dataclass(frozen=True)
class Block:
    """Rows of one split: those with these `numbers` in the files of a day."""

    split: str
    day: str
    numbers: range | np.ndarray
    rows: ClickRows


def split_blocks(dataset: Dataset, splits: Iterable[str]) -> Iterator[Block]:
    """Yield all rows of these splits in their order, at most BLOCK_ROWS at a time."""
    parts = [(split, part) for split in splits for part in dataset.clicks.splits.get(split, [])]
    for split, part in parts:
        stored = StoredDay(dataset, part.day)
        for start in range(part.start, part.stop, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, part.stop)
            yield Block(split, part.day, range(start, stop), stored.take(slice(start, stop)))


class _NpyDay:
    """A day in TorchRec's layout, memory-mapped."""

    def __init__(self, dataset: Dataset, day: str, num_rows: int) -> None:
        description = dataset.clicks
        self._dense = dataset.array(f"{day}_dense.npy")
        self._labels = dataset.array(f"{day}_labels.npy")
        sparse_file = description.sparse_file(day)
        if not description.multi_hot:
            self._ids = [dataset.array(sparse_file)]
            return
        self._ids = npz_arrays(dataset.path / sparse_file)
        found = [(array.shape, array.dtype.str[1:] in ("i4", "i8") and array.flags.c_contiguous) for array in self._ids]
        if found != [((num_rows, size), True) for size in description.multi_hot]:
            listed = ", ".join(f"{array.dtype} {list(array.shape)}" for array in self._ids)
            expected = ", ".join(str([num_rows, size]) for size in description.multi_hot)
            raise DataError(f"{dataset.path / sparse_file}: {listed}, expected i4 or i8 {expected}. Prepare it again.")

    def take(self, rows: np.ndarray | slice) -> ClickRows:
        ids = [_take(array, rows) for array in self._ids]
        all_ids = ids[0] if len(ids) == 1 else np.concatenate(ids, axis=1)
        return ClickRows(_take(self._dense, rows), all_ids, _take(self._labels, rows)[:, 0])


def _take(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """Return these rows; take() is 2 to 3 times faster than indexing."""
    return array[rows] if isinstance(rows, slice) else np.asarray(array).take(rows, axis=0)


class _ParquetDay:
    """A Parquet file, decoded block by block."""

    def __init__(self, path: Path, description: ClicksDescription, num_rows: int, cache: BlockCache) -> None:
        import polars as pl

        self._path = path
        self._num_rows = num_rows
        self._dense = description.dense
        self._sparse = [feature.name for feature in description.sparse]
        self._columns = ["label", *self._dense, *self._sparse]
        self._cache = cache
        try:
            names = pl.read_parquet_schema(path)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"{path}: not a Parquet file that can be read ({error}). Prepare it again.") from None
        missing = [name for name in self._columns if name not in names]
        if missing:
            raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(names)}. Prepare it again.")

    def take(self, rows: np.ndarray | slice) -> ClickRows:
        if isinstance(rows, slice):
            return self._range(*rows.indices(self._num_rows)[:2])
        numbers = rows // BLOCK_ROWS
        found = []
        positions = []
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            found.append(self._block(int(number))[rows[chosen] - number * BLOCK_ROWS])
            positions.append(chosen)
        if len(found) == 1:
            return found[0]
        return concatenate(found)[np.argsort(np.concatenate(positions), kind="stable")]

    def _range(self, start: int, stop: int) -> ClickRows:
        first_block = start // BLOCK_ROWS
        blocks = ((n * BLOCK_ROWS, self._block(n)) for n in range(first_block, -(-stop // BLOCK_ROWS)))
        return concatenate([block[max(start - first, 0) : stop - first] for first, block in blocks])

    def _block(self, number: int) -> ClickRows:
        key = (self._path, number)
        block = self._cache.get(key)
        if block is None:
            block = self._decode(number)
            self._cache.put(key, block)
        return block

    def _decode(self, number: int) -> ClickRows:
        import polars as pl

        frame = pl.scan_parquet(self._path).slice(number * BLOCK_ROWS, BLOCK_ROWS).collect()
        nulls = [name for name in self._columns if frame[name].null_count()]
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
        return block
