"""Prepared click logs -> this rank's CtrBatches, straight from memory-mapped files."""

from collections.abc import Iterator

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill import rng
from recmill.batch import CtrBatch
from recmill.data.share import Share, num_batches, shares
from recmill.errors import DataError
from recmill.schema import ClicksDescription, Dataset, RowRange, bad_id_text, first_bad_id


class SplitRows:
    """The rows of a split, numbered through over its ranges of files."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        assert isinstance(dataset.about, ClicksDescription)
        self._dataset = dataset
        self._dense, self._sparse = dataset.about.dense, dataset.about.sparse
        self._ranges: list[RowRange] = dataset.about.splits[split]
        lengths = [r.stop - r.start for r in self._ranges]
        self._starts = np.cumsum([0, *lengths])
        self._files = [
            tuple(dataset.array(f"{r.day}_{part}.npy") for part in ("dense", "sparse", "labels")) for r in self._ranges
        ]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dense float32 [n, F], ids int64 [n, tables], labels float32 [n]; every id is checked."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        parts = []
        order = []
        for index in np.unique(which):
            chosen = np.flatnonzero(which == index)
            local = rows[chosen] - self._starts[index] + self._ranges[index].start
            dense, ids, labels = (file[local] for file in self._files[index])
            self._check(index, local, dense, ids, labels)
            parts.append((dense, ids, labels[:, 0]))
            order.append(chosen)
        if len(parts) == 1:
            dense, ids, labels = parts[0]
        else:
            back = np.argsort(np.concatenate(order), kind="stable")
            dense, ids, labels = (np.concatenate(column)[back] for column in zip(*parts, strict=True))
        return dense, ids.astype(np.int64), labels.astype(np.float32)

    def _check(self, index: int, local: np.ndarray, dense: np.ndarray, ids: np.ndarray, labels: np.ndarray) -> None:
        """For a bad id FBGEMM would train a wrong row without a word, and which one depends on the world size."""
        day = f"{self._dataset.path / self._ranges[index].day}"
        if bad := first_bad_id(ids, self._sparse):
            row, column = bad
            text = bad_id_text(f"{day}_sparse.npy", int(local[row]), self._sparse[column], int(ids[row, column]))
            raise DataError(f"{text}. Prepare the dataset again with the right table sizes.")
        if not np.isfinite(dense).all():
            row, column = np.argwhere(~np.isfinite(dense))[0]
            place = f"{day}_dense.npy: row {local[row]:,}, column {self._dense[column]}"
            raise DataError(f"{place}: {dense[row, column]} is not a number. Prepare the dataset again.")
        if ((labels != 0) & (labels != 1)).any():
            row = int(np.argmax((labels[:, 0] != 0) & (labels[:, 0] != 1)))
            place = f"{day}_labels.npy: row {local[row]:,}"
            raise DataError(f"{place}: label {labels[row, 0]} is neither 0 nor 1. Prepare the dataset again.")


class ClickSource:
    """Batches of every split for one rank."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        order: str,
        seed: int,
        train_batch_size: int,
        eval_batch_size: int,
        rank: int,
        size: int,
    ) -> None:
        self._dataset, self._order, self._seed = dataset, order, seed
        self._train_batch_size, self._eval_batch_size = train_batch_size, eval_batch_size
        self._rank, self._size = rank, size
        assert isinstance(dataset.about, ClicksDescription)
        self._features = [feature.name for feature in dataset.about.sparse]
        self._train = SplitRows(dataset, "train")

    @property
    def batches_per_epoch(self) -> int:
        return num_batches(len(self._train), self._train_batch_size)

    def train_batches(self, epoch: int, first: int) -> Iterator[CtrBatch]:
        """Batch `first` and all after it; the order depends on the seed and the epoch alone."""
        rows = self._train
        permutation = rng.Permutation(len(rows), rng.stream_key(self._seed, "order", epoch))
        for share in shares(len(rows), self._train_batch_size, first, self._rank, self._size):
            yield self._batch(
                rows, share, permutation(share.positions) if self._order == "shuffled" else share.positions
            )

    def eval_batches(self, split: str) -> Iterator[CtrBatch]:
        rows = SplitRows(self._dataset, split)
        for share in shares(len(rows), self._eval_batch_size, 0, self._rank, self._size):
            yield self._batch(rows, share, share.positions)

    def num_eval_batches(self, split: str) -> int:
        return num_batches(len(SplitRows(self._dataset, split)), self._eval_batch_size)

    def _batch(self, rows: SplitRows, share: Share, chosen: np.ndarray) -> CtrBatch:
        dense, ids, labels = rows.take(chosen)
        count, tables = ids.shape
        sparse = KeyedJaggedTensor(
            keys=self._features,
            values=torch.from_numpy(np.ascontiguousarray(ids.T)).view(-1),
            lengths=torch.ones(count * tables, dtype=torch.int32),
            offsets=torch.arange(count * tables + 1, dtype=torch.int32),
            stride=count,
        )
        return CtrBatch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), torch.from_numpy(share.weights()))
