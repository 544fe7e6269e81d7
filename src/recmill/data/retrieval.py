"""Make this rank's batches for retrieval: requests of a click log, and the items that they are scored with."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from recmill.batch import RetrievalBatch
from recmill.data.click_rows import BLOCK_ROWS, ClickRows, concatenate
from recmill.data.clicks import ClickSource, SplitRows
from recmill.data.share import Batching, Share
from recmill.errors import DataError
from recmill.schema import SPLITS, Dataset


class _PositiveRows:
    """The rows of a split with label 1, numbered from 0."""

    def __init__(self, rows: SplitRows, numbers: np.ndarray) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, rows: np.ndarray) -> ClickRows:
        return self._rows.take(self._numbers[rows])


class RetrievalSource(ClickSource):
    """Requests are the rows with label 1.

    In training, the items of a global batch are its own different ones, on every rank: no result depends on the number
    of ranks. In evaluation they are all items of the dataset, with the features of the first row that has them.
    """

    def __init__(
        self, dataset: Dataset, batching: Batching, item_id: str, item_features: Collection[str], *rules: Any
    ) -> None:
        super().__init__(dataset, batching, *rules)
        description = dataset.clicks
        before = [feature.name for feature in description.sparse].index(item_id)
        self._item_column = sum(description.ids_per_row[:before])
        self._is_of_items = np.array([feature.name in item_features for feature in description.sparse])
        self._positives: dict[str, _PositiveRows] = {}
        counts = np.zeros(description.sparse[before].rows, np.int64)
        firsts: dict[int, ClickRows] = {}
        for split in SPLITS:
            self._positives[split] = self._read(split, counts, firsts)
        self._train = self._positives["train"]  # type: ignore[assignment]
        self._inclusion = counts / counts.sum()
        self.item_ids = np.array(sorted(firsts))
        self.item_rows = concatenate([firsts[item] for item in self.item_ids.tolist()])
        self.samples_per_epoch = batching.num_used("train", len(self._train))
        self.batches_per_epoch = batching.num_batches("train", self.samples_per_epoch)

    def _read(self, split: str, counts: np.ndarray, firsts: dict[int, ClickRows]) -> _PositiveRows:
        """Return the positive rows of a split; count their items if it is for training, and keep each item's first row.

        All rows are read once: items that were never clicked are candidates as well.
        """
        rows = SplitRows(self._dataset, split, self._decode)
        found = []
        for start in range(0, len(rows), BLOCK_ROWS):
            block = rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            items, first = np.unique(block.ids[:, self._item_column], return_index=True)
            for item, row in zip(items.tolist(), first.tolist(), strict=True):
                if item not in firsts:
                    firsts[item] = block[row : row + 1]
            positive = np.flatnonzero(block.labels == 1)
            found.append(positive + start)
            if split == "train":
                counts += np.bincount(block.ids[positive, self._item_column], minlength=len(counts))
        numbers = np.concatenate([np.empty(0, np.int64), *found])
        if not len(numbers):
            raise DataError(f"{self._dataset.path}: no row of split '{split}' has label 1, and only these are learned.")
        return _PositiveRows(rows, numbers)

    def train_batches(self, epoch: int, first: int) -> Iterator[RetrievalBatch]:
        """Yield batch `first` of the epoch and all later ones; their order depends on seed and epoch alone."""
        alone = replace(self._batching, rank=0, size=1)
        shares = zip(
            self._train_shares(self._batching, epoch, first), self._train_shares(alone, epoch, first), strict=True
        )
        for (share, rows), (whole, all_rows) in shares:
            everything = self._train.take(all_rows[: whole.num_real])
            items, places = np.unique(everything.ids[:, self._item_column], return_index=True)
            # The probability that at least one of the rows of a batch has the item.
            log_inclusion = np.log(-np.expm1(len(everything) * np.log1p(-self._inclusion[items].clip(max=1 - 1e-12))))
            yield self._made(self._train.take(rows), share, items, everything[places], log_inclusion)

    def eval_batches(self, split: str) -> Iterator[RetrievalBatch]:
        """Yield every positive row once, with all items."""
        rows = self._positives[split]
        for share in self._batching.shares(split, self._batching.num_used(split, len(rows))):
            none = np.zeros(len(self.item_ids))
            yield self._made(rows.take(share.positions), share, self.item_ids, self.item_rows, none)

    def item_inputs(self, which: slice) -> tuple[Any, ...]:
        """Return the network's dense and sparse inputs of these items, without requests."""
        rows = self.item_rows[which]
        is_used = np.repeat(self._is_of_items[:, None], len(rows), axis=1)
        return self._maker.batch(rows, len(rows), np.ones(len(rows), np.float32), is_used).inputs()

    def num_eval_batches(self, split: str) -> int:
        return self._batching.num_batches(split, self._batching.num_used(split, len(self._positives[split])))

    def _made(
        self, requests: ClickRows, share: Share, items: np.ndarray, item_rows: ClickRows, log_inclusion: np.ndarray
    ) -> RetrievalBatch:
        rows = concatenate([requests, item_rows])
        is_item = np.arange(len(rows)) >= len(requests)
        is_used = self._is_of_items[:, None] == is_item
        is_used[:, share.num_real : len(requests)] = False  # fillers look up nothing
        made = self._maker.batch(rows, len(rows), np.ones(len(rows), np.float32), is_used)
        answers = np.searchsorted(items, requests.ids[:, self._item_column]).clip(max=len(items) - 1)  # of fillers: any
        return RetrievalBatch(
            dense_SF=made.dense_BF,
            sparse=made.sparse,
            num_requests=len(requests),
            answers_R=torch.from_numpy(answers),
            weights_R=torch.from_numpy(share.weights()),
            log_inclusion_C=torch.from_numpy(log_inclusion.astype(np.float32)),
        )
