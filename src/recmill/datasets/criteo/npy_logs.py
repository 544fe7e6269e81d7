"""Read the npy files that TorchRec's scripts write as if they were raw logs: to number ids, shuffle, or add ids."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from recmill.data.click_rows import BLOCK_ROWS
from recmill.data.npy_files import npy_array
from recmill.datasets.click_log import LogBlock, ParsedLog
from recmill.errors import DataError


def open_npy(file: Path) -> np.ndarray:
    """Memory-map an npy file, or raise a DataError."""
    try:
        return npy_array(file)
    except ValueError as error:
        raise DataError(f"{file}: not a complete NumPy file ({error}). Write it again.") from None


def read_npy_log(sparse: Path, others: Path, target: ParsedLog, progress: Callable[[int], None]) -> ParsedLog:
    """Write a day to `target`: its ids are those of the file, and the bits of its dense values stand for integers."""
    name = sparse.name.removesuffix("_sparse.npy")
    files = [sparse, others / f"{name}_dense.npy", others / f"{name}_labels.npy"]
    arrays = [open_npy(file) for file in files]
    columns = [target.format.num_sparse, target.format.num_dense, 1]
    for file, array, width, kinds in zip(files, arrays, columns, ("iu", "f", "i"), strict=True):
        if array.shape != (len(arrays[0]), width) or array.dtype.kind not in kinds or not len(array):
            found = f"{array.dtype} {list(array.shape)}"
            raise DataError(f"{file}: {found}, expected [{len(arrays[0]):,}, {width}] as TorchRec writes it.")
    with target.path.open("wb") as output:
        for first in range(0, len(arrays[0]), BLOCK_ROWS):
            stored, dense, labels = (np.asarray(array[first : first + BLOCK_ROWS]) for array in arrays)
            block = LogBlock(
                labels[:, 0].astype(np.int32),
                dense.astype(np.float32).view(np.int32),
                np.zeros(len(labels), np.uint32),
                np.ascontiguousarray(stored.astype(np.uint32).T),
            )
            _check(files, first, stored, block, dense, target.format.has_labels)
            for part in (block.labels, block.dense, block.missing, block.ids):
                output.write(np.ascontiguousarray(part).data)
            target.block_rows.append(len(block))
            progress(len(block))
    return target


def _check(
    files: list[Path], first: int, stored: np.ndarray, block: LogBlock, dense: np.ndarray, has_labels: bool
) -> None:
    """Raise a DataError for the first id that is no 32-bit hash, the first number that is none, the first bad label."""
    labels = block.labels[:, None]
    is_bad = [
        stored != (block.ids.T.view(np.int32) if stored.itemsize == 4 else block.ids.T),  # int32: TorchRec's until 2024
        ~np.isfinite(dense),
        (labels & ~1 != 0) if has_labels else (labels != -1),
    ]
    for file, values, bad in zip(files, (stored, dense, labels), is_bad, strict=True):
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            fact = f"[{first + row}, {column}] is {values[row, column]}, which cannot be used"
            raise DataError(f"{file}: {fact}. Write it again.")
