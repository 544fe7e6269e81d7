"""Rows of click logs into another order, however many there are: out to buckets on disk, then bucket by bucket."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recmill.data.click_rows import ClickRows

_BLOCK_ROWS = 1 << 17


class Buckets:
    """Bucket k takes the rows whose new position is in k * bucket_rows .. (k + 1) * bucket_rows.

    The order that comes out depends on the positions alone, not on `memory`, which sets the size of a bucket.
    """

    def __init__(self, directory: Path, total_rows: int, num_dense: int, num_ids: int, id_type: type, memory: int):
        self._directory, self._total = directory, total_rows
        fields = [("at", "<u4"), ("label", "<i4"), ("dense", "<f4", (num_dense,)), ("ids", id_type, (num_ids,))]
        self._record = np.dtype(fields)
        in_memory = 3  # a bucket, the same in order, and blocks on their way
        self._rows = min(max(memory // in_memory // self._record.itemsize, 1), 2**32 - 1, max(total_rows, 1))
        directory.mkdir(exist_ok=True)

    def _file(self, bucket: int) -> Path:
        return self._directory / f"bucket-{bucket}"

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._directory.iterdir()}

    def cut_back(self, sizes: dict[str, int]) -> None:
        """To an earlier state: what a killed run added is taken away."""
        for path in self._directory.iterdir():
            with path.open("r+b") as file:
                file.truncate(sizes.get(path.name, 0))

    def packed(self, rows: ClickRows, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(records sorted by bucket, their buckets); may run in any thread."""
        buckets = positions // self._rows
        order = np.argsort(buckets, kind="stable")
        records = np.empty(len(rows), self._record)
        records["at"], records["label"] = (positions - buckets * self._rows)[order], rows.labels[order]
        records["dense"], records["ids"] = rows.dense[order], rows.ids[order]
        return records, buckets[order]

    def add(self, records: np.ndarray, buckets: np.ndarray) -> None:
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for start, stop in zip(starts, np.append(starts[1:], len(buckets)), strict=True):
            with self._file(int(buckets[start])).open("ab") as file:
                file.write(records[start:stop].data)

    def rows(self, start: int, stop: int) -> Iterator[ClickRows]:
        """The rows at positions start..stop, in order."""
        while start < stop:
            bucket = start // self._rows
            records = np.fromfile(self._file(bucket), self._record)
            in_order = np.empty_like(records)
            in_order[records["at"]] = records
            del records
            low, high = start - bucket * self._rows, min(stop - bucket * self._rows, len(in_order))
            for first in range(low, high, _BLOCK_ROWS):
                part = in_order[first : min(first + _BLOCK_ROWS, high)]
                yield ClickRows(part["dense"], part["ids"], part["label"])
            start = bucket * self._rows + high

    def forget_before(self, position: int) -> None:
        """Remove the buckets whose rows all stand before `position`."""
        for bucket in range(position // self._rows):
            self._file(bucket).unlink(missing_ok=True)
        if position >= self._total:
            self._file(position // self._rows).unlink(missing_ok=True)
