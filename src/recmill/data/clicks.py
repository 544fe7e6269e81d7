"""Prepared click logs -> this rank's CtrBatches, straight from the files."""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill import rng
from recmill.batch import CtrBatch
from recmill.data.click_rows import (
    BLOCK_ROWS,
    ClickRows,
    StoredDay,
    bad_id_text,
    feature_of_column,
    first_bad_id,
    id_limits,
)
from recmill.data.multi_hot import MultiHot
from recmill.data.share import EVERYTHING, Limits, Share, mixed_within_batches, num_batches, shares
from recmill.errors import DataError
from recmill.schema import MAX_TABLE_ROWS, ClicksDescription, Dataset, RowRange

_WINDOW_BLOCKS = 16  # of Parquet that are shuffled together


class SplitRows:
    """The rows of a split, numbered through over its ranges of days."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        description = dataset.description
        assert isinstance(description, ClicksDescription)
        self._path, self._about, self._limits = dataset.path, description, id_limits(description)
        self._ranges: list[RowRange] = description.splits[split]
        self._starts = np.cumsum([0, *(r.stop - r.start for r in self._ranges)])
        days = {r.day: StoredDay(dataset, r.day) for r in self._ranges}
        self._days = [days[r.day] for r in self._ranges]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: np.ndarray) -> ClickRows:
        """Every value is checked. Rows that follow each other may come as the stored arrays themselves, read-only."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            parts = self._between(int(rows[0]), int(rows[-1]) + 1)
            return parts[0] if len(parts) == 1 else _joined(parts)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        if len(self._ranges) == 1 or (which == which[0]).all():
            return self._checked(int(which[0]), rows - self._starts[which[0]])
        order = np.argsort(which.astype(np.uint16), kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(self._ranges)))[:-1]
        parts = [
            self._checked(index, rows[chosen] - self._starts[index])
            for index, chosen in enumerate(np.split(order, ends))
            if len(chosen)
        ]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return _joined(parts)[back]

    def _between(self, start: int, stop: int) -> list[ClickRows]:
        parts = []
        for index, (first, end) in enumerate(pairwise(self._starts.tolist())):
            if start < end and stop > first:
                parts.append(self._checked(index, slice(max(start, first) - first, min(stop, end) - first)))
        return parts

    def _checked(self, index: int, rows: np.ndarray | slice) -> ClickRows:
        """`rows` of one range, counted from its start."""
        range_ = self._ranges[index]
        if isinstance(rows, slice):
            rows = slice(rows.start + range_.start, rows.stop + range_.start)
        else:
            rows = rows + range_.start
        found = self._days[index].take(rows)
        self._check(range_.day, rows, found)
        return found

    def _check(self, day: str, chosen: np.ndarray | slice, rows: ClickRows) -> None:
        """For a bad id FBGEMM would train a wrong row without a word, and which one depends on the world size."""
        description = self._about
        local: Any = range(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
        dense_file, label_file = description.day_files(day)[0], description.day_files(day)[-1]
        if bad := first_bad_id(rows.ids, self._limits):
            row, column = bad
            file, feature = str(self._path / description.sparse_file(day)), feature_of_column(description, column)
            text = bad_id_text(file, int(local[row]), feature, int(rows.ids[row, column]))
            raise DataError(f"{text}. Prepare the dataset again with the right table sizes.")
        if not np.isfinite(rows.dense).all():
            row, column = np.argwhere(~np.isfinite(rows.dense))[0]
            place = f"{self._path / dense_file}: row {local[row]:,}, column {description.dense[column]}"
            raise DataError(f"{place}: {rows.dense[row, column]} is not a number. Prepare the dataset again.")
        is_bad = (rows.labels != 0) & (rows.labels != 1)
        if is_bad.any():
            row = int(np.argmax(is_bad))
            place = f"{self._path / label_file}: row {local[row]:,}"
            raise DataError(f"{place}: label {rows.labels[row]} is neither 0 nor 1. Prepare the dataset again.")


def _joined(parts: list[ClickRows]) -> ClickRows:
    columns = ([p.dense for p in parts], [p.ids for p in parts], [p.labels for p in parts])
    return ClickRows(*(np.concatenate(column) for column in columns))


class WindowedOrder:
    """A permutation of range(size) for files that are decoded in blocks: few blocks are needed at a time.

    Blocks are permuted, then rows within windows of 16 blocks (a million rows). Depends on the key alone.
    """

    def __init__(self, size: int, key: np.uint64) -> None:
        blocks = rng.Permutation(-(-size // BLOCK_ROWS), key)(np.arange(-(-size // BLOCK_ROWS)))
        lengths = np.minimum(BLOCK_ROWS, size - blocks * BLOCK_ROWS)
        self._rows_of_block, self._block_starts = blocks * BLOCK_ROWS, np.cumsum([0, *lengths])
        self._window_starts = np.append(self._block_starts[:-1:_WINDOW_BLOCKS], size)
        self._key = int(key)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        mixed = np.empty_like(positions)
        windows = np.searchsorted(self._window_starts, positions, side="right") - 1
        for window in np.unique(windows):
            chosen, start = windows == window, self._window_starts[window]
            inside = rng.Permutation(
                int(self._window_starts[window + 1] - start), rng.stream_key(self._key, int(window))
            )
            mixed[chosen] = inside(positions[chosen] - start) + start
        block = np.searchsorted(self._block_starts, mixed, side="right") - 1
        return self._rows_of_block[block] + mixed - self._block_starts[block]


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
        limits: Limits = EVERYTHING,
        multi_hot: MultiHot | None = None,
    ) -> None:
        self._dataset, self._order, self._seed, self._limits = dataset, order, seed, limits
        self._train_batch_size, self._eval_batch_size = train_batch_size, eval_batch_size
        self._rank, self._size = rank, size
        assert isinstance(dataset.description, ClicksDescription)
        if huge := [feature.name for feature in dataset.description.sparse if feature.rows > MAX_TABLE_ROWS]:
            raise DataError(
                f"{dataset.path}: the ids of {', '.join(huge)} are 64-bit hashes, too many for a table. "
                "Prepare the dataset with --table-size as well."
            )
        self._features = [feature.name for feature in dataset.description.sparse]
        self._made = multi_hot
        self._multi_hot = multi_hot.sizes if multi_hot else dataset.description.multi_hot or [1] * len(self._features)
        self._permutation = WindowedOrder if dataset.description.layout == "parquet" else rng.Permutation
        self._layouts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._train = SplitRows(dataset, "train")
        self.samples_per_epoch = limits.samples("train", len(self._train), train_batch_size)

    @property
    def batches_per_epoch(self) -> int:
        return num_batches(self.samples_per_epoch, self._train_batch_size)

    def train_batches(self, epoch: int, first: int) -> Iterator[CtrBatch]:
        """Batch `first` and all after it; the order depends on the seed and the epoch alone."""
        for share, chosen in self._train_shares(epoch, first):
            yield self._batch(self._train, share, chosen)

    def _train_shares(self, epoch: int, first: int) -> Iterator[tuple[Share, np.ndarray]]:
        """And the rows at its positions."""
        rows, batch_size = self._train, self._train_batch_size
        permutation = self._permutation(len(rows), rng.stream_key(self._seed, "order", epoch))
        for share in shares(self.samples_per_epoch, batch_size, first, self._rank, self._size):
            chosen = share.positions
            if self._order == "shuffled":
                chosen = permutation(chosen)
            elif self._order == "batch":
                chosen = mixed_within_batches(
                    chosen, self.samples_per_epoch, batch_size, self._seed, "within batch", epoch
                )
            yield share, chosen

    def id_counts(self, epoch: int, batch: int) -> list[np.ndarray]:
        """By feature, int64 [table rows]: how often each stored id is in this rank's batches before that one.

        They are read again for it: so neither batches prepared ahead nor an interrupted run can spoil the numbers.
        """
        assert isinstance(self._dataset.description, ClicksDescription)
        counts = [np.zeros(feature.rows, dtype=np.int64) for feature in self._dataset.description.sparse]
        for passed in range(epoch + 1):
            for share, chosen in islice(self._train_shares(passed, 0), batch if passed == epoch else None):
                if share.num_real:
                    for count, ids in zip(counts, self._train.take(chosen[: share.num_real]).ids.T, strict=True):
                        np.add.at(count, ids, 1)
        return counts

    def frequencies(self, counts: list[np.ndarray]) -> dict[str, np.ndarray]:
        """`id_counts` of all ranks, and what they become by multi-hot."""
        assert self._made
        named: dict[str, np.ndarray] = {}
        for index, (name, count) in enumerate(zip(self._features, counts, strict=True)):
            named |= {f"{name}.before": count, f"{name}.after": self._made.counts_after(index, count)}
        return named

    def eval_batches(self, split: str) -> Iterator[CtrBatch]:
        rows, samples = self._eval_rows(split)
        for share in shares(samples, self._eval_batch_size, 0, self._rank, self._size):
            yield self._batch(rows, share, share.positions)

    def num_eval_batches(self, split: str) -> int:
        return num_batches(self._eval_rows(split)[1], self._eval_batch_size)

    def _eval_rows(self, split: str) -> tuple[SplitRows, int]:
        """And how many of them are used."""
        rows = SplitRows(self._dataset, split)
        return rows, self._limits.samples(split, len(rows), self._eval_batch_size)

    def _batch(self, rows: SplitRows, share: Share, chosen: np.ndarray) -> CtrBatch:
        found = rows.take(chosen)
        count = len(found)
        values = np.empty(sum(self._multi_hot) * count, dtype=np.int64)  # feature after feature
        if max(self._multi_hot) == 1:
            values.reshape(-1, count)[:] = found.ids.T
        else:
            ends = np.cumsum(self._multi_hot)
            for feature, (end, hot) in enumerate(zip(ends, self._multi_hot, strict=True)):
                ids = self._made.of(feature, found.ids[:, feature]) if self._made else found.ids[:, end - hot : end]
                values[(end - hot) * count : end * count].reshape(count, hot)[:] = ids
        lengths, offsets = self._layout(count)
        sparse = KeyedJaggedTensor(
            keys=self._features,
            values=torch.from_numpy(values),
            lengths=lengths,
            offsets=offsets,
            stride=count,
            length_per_key=[count * hot for hot in self._multi_hot],  # else summed up at every step
        )
        dense = found.dense if found.dense.flags.writeable else found.dense.copy()
        labels, weights = found.labels.astype(np.float32), share.weights()
        return CtrBatch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), torch.from_numpy(weights))

    def _layout(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(lengths, offsets) of a batch of so many rows. They cost more than the ids, and few sizes occur."""
        if count not in self._layouts:
            lengths = np.repeat(np.array(self._multi_hot, dtype=np.int32), count)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            self._layouts[count] = torch.from_numpy(lengths), torch.from_numpy(offsets)
        return self._layouts[count]
