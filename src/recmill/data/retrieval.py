"""Make this rank's batches for retrieval: requests of a click log, and the items that they are scored with."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recmill.batch import ItemBatch, RequestBatch, RetrievalBatch
from recmill.data.click_rows import BLOCK_ROWS, ClickRows, concatenate
from recmill.data.clicks import ChosenRows, ClickSource, SplitRows
from recmill.data.share import Batching, Share
from recmill.errors import DataError
from recmill.schema import SPLITS, Dataset

_ITEMS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class _Read:
    """What is known when a split and those before it are read."""

    positives: ChosenRows  # of the split: its rows with label 1, without those of weight 0
    clicks: np.ndarray  # of the split: positive rows by item
    item_ids: np.ndarray  # ascending, also of rows that were never clicked: they are candidates as well
    item_rows: ClickRows  # the first row of each item


class RetrievalSource(ClickSource):
    """Requests are the rows with label 1.

    In training, the items of a global batch are its own different ones, on every rank: no result depends on the number
    of ranks. In evaluation they are all items of the split and those before it, with the features of their first row;
    they come in batches of their own before the requests, so that their vectors are computed once.
    A split is not read before it is used.
    """

    def __init__(
        self, dataset: Dataset, batching: Batching, item_id: str, item_features: Collection[str], *rules: Any
    ) -> None:
        super().__init__(dataset, batching, *rules)
        description = dataset.clicks
        self._item_feature = [feature.name for feature in description.sparse].index(item_id)
        self._item_column = sum(description.ids_per_row[: self._item_feature])
        self._is_of_items = np.array([feature.name in item_features for feature in description.sparse])
        self._splits_read: dict[str, _Read] = {}
        of_train = self._read("train")
        self._train = of_train.positives
        self._inclusion = of_train.clicks / of_train.clicks.sum()
        self.samples_per_epoch = batching.num_used("train", len(self._train))
        self.batches_per_epoch = batching.num_batches("train", self.samples_per_epoch)

    @property
    def item_ids(self) -> np.ndarray:
        """The ids of all items of the dataset, ascending."""
        return self._read(SPLITS[-1]).item_ids

    def _read(self, split: str) -> _Read:
        if split not in self._splits_read:
            earlier = SPLITS.index(split) - 1
            self._splits_read[split] = self._read_after(self._read(SPLITS[earlier]) if earlier >= 0 else None, split)
        return self._splits_read[split]

    def _read_after(self, earlier: _Read | None, split: str) -> _Read:
        rows = SplitRows(self._dataset, split, self._decode)
        num_items = self._dataset.clicks.sparse[self._item_feature].rows
        is_known = np.zeros(num_items, bool)
        clicks = np.zeros(num_items, np.int64)
        ids = [earlier.item_ids if earlier else np.empty(0, np.int64)]
        first_rows = [earlier.item_rows] if earlier else []
        is_known[ids[0]] = True
        found = [np.empty(0, np.int64)]
        for start in range(0, len(rows), BLOCK_ROWS):
            numbers = np.arange(start, min(start + BLOCK_ROWS, len(rows)))
            block = rows.take(numbers)
            of_block, first = np.unique(block.ids[:, self._item_column], return_index=True)
            is_new = ~is_known[of_block]
            is_known[of_block] = True
            ids.append(of_block[is_new])
            first_rows.append(block[first[is_new]])
            is_positive = block.labels == 1
            if rows.weights is not None:
                is_positive &= rows.weights[numbers] > 0
            found.append(numbers[is_positive])
            clicks += np.bincount(block.ids[is_positive, self._item_column], minlength=num_items)
        if not clicks.any():
            raise DataError(f"{self._dataset.path}: no row of split '{split}' has label 1, and only these are learned.")
        item_ids = np.concatenate(ids)
        order = np.argsort(item_ids)
        return _Read(ChosenRows(rows, np.concatenate(found)), clicks, item_ids[order], concatenate(first_rows)[order])

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
            yield self._made(self._read("train").positives, rows, share, (items, everything[places]), log_inclusion)

    def eval_batches(self, split: str) -> Iterator[RetrievalBatch]:
        """Yield all items of the split and those before it, the same on every rank, then every positive row once."""
        known = self._read(split)
        nothing = torch.empty(0)
        for items in self._item_blocks(split):
            dense, sparse = self._item_inputs(known.item_rows[items])
            yield ItemBatch(dense, sparse, 0, nothing.long(), nothing, nothing)
        no_items = known.item_ids, known.item_rows[:0]
        for share in self._batching.shares(split, self._batching.num_used(split, len(known.positives))):
            made = self._made(known.positives, share.positions, share, no_items, np.empty(0))
            yield RequestBatch(**vars(made))

    def _item_blocks(self, split: str) -> list[slice]:
        return [slice(i, i + _ITEMS_AT_ONCE) for i in range(0, len(self._read(split).item_ids), _ITEMS_AT_ONCE)]

    def all_item_inputs(self) -> Iterator[tuple[Any, ...]]:
        """Yield the network's dense and sparse inputs of all `item_ids`, without requests, block by block."""
        for items in self._item_blocks(SPLITS[-1]):
            yield self._item_inputs(self._read(SPLITS[-1]).item_rows[items])

    def _item_inputs(self, rows: ClickRows) -> tuple[Any, ...]:
        is_used = np.repeat(self._is_of_items[:, None], len(rows), axis=1)
        return self._maker.batch(rows, len(rows), np.ones(len(rows), np.float32), is_used).inputs()

    def num_eval_batches(self, split: str) -> int:
        num_used = self._batching.num_used(split, len(self._read(split).positives))
        return len(self._item_blocks(split)) + self._batching.num_batches(split, num_used)

    def _made(
        self,
        positives: ChosenRows,
        numbers: np.ndarray,
        share: Share,
        candidates: tuple[np.ndarray, ClickRows],
        log_inclusion: np.ndarray,
    ) -> RetrievalBatch:
        """Return the batch of these positive rows, whose last ones may be fillers, and of all candidates."""
        requests, (items, item_rows) = positives.take(numbers), candidates
        rows = concatenate([requests, item_rows])
        is_item = np.arange(len(rows)) >= len(requests)
        is_used = self._is_of_items[:, None] == is_item
        is_used[:, share.num_real : len(requests)] = False  # fillers look up nothing
        made = self._maker.batch(rows, len(rows), np.ones(len(rows), np.float32), is_used)
        answers = np.searchsorted(items, requests.ids[:, self._item_column]).clip(max=len(items) - 1)  # of fillers: any
        weights = share.weights()
        if positives.weights is not None:
            weights *= positives.weights[numbers]
        return RetrievalBatch(
            dense_SF=made.dense_BF,
            sparse=made.sparse,
            num_requests=len(requests),
            answers_R=torch.from_numpy(answers),
            weights_R=torch.from_numpy(weights),
            log_inclusion_C=torch.from_numpy(log_inclusion.astype(np.float32)),
        )
