"""Reorder any number of click rows: scatter them to buckets on disk, then sort bucket by bucket."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recmill.data.click_rows import ClickRows


class Buckets:
    """Files of rows by new position: with n rows per bucket, bucket k holds positions k * n to (k + 1) * n.

    `memory` limits the size of a bucket; the resulting order depends on the positions alone.
    """

    def __init__(self, directory: Path, total_rows: int, num_dense: int, num_ids: int, id_type: type, memory: int):
        self._directory = directory
        self._total = total_rows
        fields = [("at", "<u4"), ("label", "<i4"), ("dense", "<f4", (num_dense,)), ("ids", id_type, (num_ids,))]
        self._record = np.dtype(fields)
        # In memory are a bucket, the same bucket in order, and blocks that are being written.
        self._bucket_rows = min(max(memory // 3 // self._record.itemsize, 1), 2**32 - 1, max(total_rows, 1))
        directory.mkdir(exist_ok=True)

    def _file(self, bucket: int) -> Path:
        return self._directory / f"bucket-{bucket}"

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._directory.iterdir()}

    def truncate(self, sizes: dict[str, int]) -> None:
        """Restore earlier sizes: remove what an interrupted run has added."""
        for path in self._directory.iterdir():
            with path.open("r+b") as file:
                file.truncate(sizes.get(path.name, 0))

    def packed(self, rows: ClickRows, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (records sorted by bucket, their buckets). Any thread may call it."""
        buckets = positions // self._bucket_rows
        order = np.argsort(buckets, kind="stable")
        records = np.empty(len(rows), self._record)
        records["at"] = (positions - buckets * self._bucket_rows)[order]
        records["label"] = rows.labels[order]
        records["dense"] = rows.dense[order]
        records["ids"] = rows.ids[order]
        return records, buckets[order]

    def add(self, records: np.ndarray, buckets: np.ndarray) -> None:
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for start, stop in zip(starts, np.append(starts[1:], len(buckets)), strict=True):
            with self._file(int(buckets[start])).open("ab") as file:
                file.write(records[start:stop].data)

    def rows(self, start: int, stop: int, block_rows: int) -> Iterator[ClickRows]:
        """Yield the rows at positions start..stop in order, at most `block_rows` at a time."""
        while start < stop:
            bucket = start // self._bucket_rows
            records = np.fromfile(self._file(bucket), self._record)
            in_order = np.empty_like(records)
            in_order[records["at"]] = records
            del records
            low, high = start - bucket * self._bucket_rows, min(stop - bucket * self._bucket_rows, len(in_order))
            for first in range(low, high, block_rows):
                part = in_order[first : min(first + block_rows, high)]
                yield ClickRows(part["dense"], part["ids"], part["label"])
            start = bucket * self._bucket_rows + high

    def remove_before(self, position: int) -> None:
        """Remove the buckets whose rows are all before `position`."""
        for bucket in range(position // self._bucket_rows):
            self._file(bucket).unlink(missing_ok=True)
        if position >= self._total:
            self._file(position // self._bucket_rows).unlink(missing_ok=True)
