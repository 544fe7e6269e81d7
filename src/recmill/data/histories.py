"""Make this rank's batches of prepared histories: windows for training, the ends of histories for ranking.

Order and masks are computed from (seed, epoch, window): new in each epoch, and the same for any world size.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from recmill import rng
from recmill.batch import HistoryInputs, RankingBatch, SequenceBatch
from recmill.data.checks import checked_items
from recmill.data.parquet_files import reading
from recmill.data.share import Batching, Share
from recmill.data.windows import WindowRules, ending_windows, packed, train_windows
from recmill.errors import DataError
from recmill.metrics.ranking import Negatives, sampled
from recmill.schema import Dataset

# Counters of a window's random numbers; smaller ones are the positions of its items, counted from its end.
_LAST_ONLY_COUNTER = 1 << 20
_LENGTH_COUNTER = (1 << 20) + 1
_REPLACEMENT_COUNTER = 1 << 21
_SORTED_BATCHES = 32  # windows of this many batches are sorted by length together: little padding, still random
_COUNT_BLOCK_ITEMS = 1 << 24


class _Examples(NamedTuple):
    tokens: np.ndarray
    lengths: np.ndarray
    queries: np.ndarray
    query_rows: np.ndarray  # the row of each query
    answers: np.ndarray


class HistorySource:
    def __init__(
        self,
        dataset: Dataset,
        batching: Batching,
        window_rules: WindowRules,
        protocols: list[str],
        *,
        train_on_validation: bool = False,
    ) -> None:
        self._batching = batching
        self._rules = window_rules
        self.path = dataset.path
        self._num_items = dataset.histories.num_items
        self._items = checked_items(dataset)
        self._offsets = np.asarray(dataset.array("offsets.npy"))
        self._held_out = 1 if train_on_validation else 2
        starts, lengths = train_windows(self._offsets, window_rules, self._held_out)
        if window_rules.predicts_next:  # a single item has no next one
            has_next = lengths > 1
            starts, lengths = starts[has_next], lengths[has_next]
            if not len(starts):
                raise DataError(f"{dataset.path}: no history has two items for training. Prepare longer ones.")
        self._starts = np.tile(starts, window_rules.copies)
        self._lengths = np.tile(lengths, window_rules.copies)
        self.samples_per_epoch = batching.num_used("train", len(self._starts))
        self.batches_per_epoch = batching.num_batches("train", self.samples_per_epoch)
        self._negatives = [self._checked_negatives(dataset, protocol) for protocol in sampled(protocols)]
        self._drawn: dict[tuple[str, int], np.ndarray] = {}  # by split and user
        self._orders: dict[int, np.ndarray] = {}  # by epoch

    def window_facts(self) -> str:
        """Describe the training windows, and how much padding rectangular batches would need."""
        lengths = self._lengths[self._epoch_order(0)[: self.samples_per_epoch]]
        firsts = np.arange(0, len(lengths), self._batching.train_batch_size)
        padded = int((np.maximum.reduceat(lengths, firsts) * np.diff([*firsts, len(lengths)])).sum())
        return (
            f"windows: {len(self._lengths):,} of {len(self._offsets) - 1:,} histories, {self._lengths.mean():.1f} "
            f"items on average; batches padded to their longest would be {1 - lengths.sum() / padded:.1%} padding"
        )

    def global_ids(self, epoch: int, batch: int) -> dict[str, np.ndarray]:
        """Return the tokens of all ranks in a training batch."""
        whole = replace(self._batching, rank=0, size=1)
        share = next(whole.shares("train", self.samples_per_epoch, batch))
        return {"item": self._examples(epoch, self._order_of(epoch)[share.positions])[1].tokens}

    def train_batches(self, epoch: int, first: int) -> Iterator[SequenceBatch]:
        """Yield batch `first` of the epoch and all later ones; order and masks depend on seed and epoch alone."""
        order = self._order_of(epoch)
        for number, share in enumerate(self._batching.shares("train", self.samples_per_epoch, first), start=first):
            yield self._training_batch(epoch, number, order[share.positions], share)

    def num_eval_batches(self, split: str) -> int:
        return self._batching.num_batches(split, self._num_users(split))

    def eval_batches(self, split: str) -> Iterator[RankingBatch]:
        """Yield every user once. In the test split, histories include the validation item."""
        for share in self._batching.shares(split, self._num_users(split)):
            yield self._ranking_batch(split, share)

    def targets(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's users of `eval_batches`, in order, and the item of each that is to be ranked."""
        shares = self._batching.shares(split, self._num_users(split))
        users = np.concatenate([np.empty(0, np.int64), *(share.positions[: share.num_real] for share in shares)])
        return users, np.asarray(self._items[self._offsets[users + 1] - (1 if split == "test" else 2)])

    def train_counts(self) -> np.ndarray:
        """Return how often items 1, 2, ... occur in histories, without the held-out items at their ends."""
        held_out = np.concatenate([self._offsets[1:] - from_end for from_end in range(1, self._held_out + 1)])
        return self._item_counts(self._items) - self._item_counts(self._items[held_out])

    def _num_users(self, split: str) -> int:
        return self._batching.num_used(split, len(self._offsets) - 1)

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return `_epoch_order`. The last two are kept: the thread that looks ahead may be in the next epoch."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._epoch_order(epoch)
            self._orders = dict([*self._orders.items()][-1:]) | {epoch: order}
        return order

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the windows of an epoch: those of batch 0, of batch 1, ... Only the last batch may be incomplete."""
        count = len(self._starts)
        size = self._batching.train_batch_size
        seed = self._batching.seed
        if self._batching.order == "file":
            return np.arange(count)
        if self._batching.order == "batch":
            used = self.samples_per_epoch
            batches = np.split(np.arange(used), range(size, used, size))
            return np.concatenate([self._batching.permuted_within_batch(batch, used, epoch) for batch in batches])
        order = rng.Permutation(count, rng.stream_key(seed, "order", epoch))(np.arange(count))
        for start in range(0, count, size * _SORTED_BATCHES):
            block = order[start : start + size * _SORTED_BATCHES]  # a view: it is sorted in place
            block[:] = block[np.argsort(self._lengths[block], kind="stable")]
        num_full = count // size
        shuffled = rng.Permutation(num_full, rng.stream_key(seed, "batches", epoch))(np.arange(num_full))
        full = order[: num_full * size].reshape(num_full, size)[shuffled]
        return np.concatenate([full.reshape(-1), order[num_full * size :]])

    def _examples(self, epoch: int, windows: np.ndarray) -> tuple[np.ndarray, _Examples]:
        """Return the key of each window and what is learned from them."""
        keys = rng.bits(rng.stream_key(self._batching.seed, "window", epoch), windows)
        starts, lengths = self._starts[windows], self._lengths[windows]
        if self._rules.predicts_next:
            return keys, self._next_item_examples(starts, lengths)
        return keys, self._masked_examples(starts, lengths, keys)

    def _training_batch(self, epoch: int, number: int, windows: np.ndarray, share: Share) -> SequenceBatch:
        keys, made = self._examples(epoch, windows)
        chances = rng.uniform(
            rng.stream_key(self._batching.seed, "negatives", epoch, number), np.arange(self._rules.negatives)
        )
        return SequenceBatch(
            tokens_N=torch.from_numpy(made.tokens),
            lengths_B=torch.from_numpy(made.lengths),
            longest=int(made.lengths.max()),
            queries_M=torch.from_numpy(made.queries),
            row_keys_B=torch.from_numpy(keys.view(np.int64)),
            answers_M=torch.from_numpy(made.answers),
            weights_M=torch.from_numpy(share.weights()[made.query_rows]),
            negatives_K=torch.from_numpy(1 + (chances * self._num_items).astype(np.int64)),
        )

    def _next_item_examples(self, starts: np.ndarray, lengths: np.ndarray) -> _Examples:
        """Query every item of a window but the last; the answers are all but the first."""
        tokens, rows, from_end = packed(self._items, starts, lengths)
        is_query = from_end > 0
        is_answer = from_end < (lengths - 1)[rows]
        return _Examples(
            tokens=tokens[is_query],
            lengths=lengths - 1,
            queries=np.arange(is_query.sum()),
            query_rows=rows[is_query],
            answers=tokens[is_answer],
        )

    def _masked_examples(self, starts: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> _Examples:
        """Mask at least one item of each window, and query the masked ones."""
        rules = self._rules
        last_only = rng.uniform(keys, np.full(len(keys), _LAST_ONLY_COUNTER)) < rules.last_only
        if rules.last_anywhere:
            shortened = (1 + rng.uniform(keys, np.full(len(keys), _LENGTH_COUNTER)) * lengths).astype(np.int64)
            lengths = np.where(last_only, np.maximum(shortened, np.minimum(2, lengths)), lengths)
        tokens, rows, from_end = packed(self._items, starts, lengths)
        masked = rng.uniform(keys[rows], from_end) < rules.probability
        masked &= ~last_only[rows]
        masks_last = np.bincount(rows, weights=masked, minlength=len(keys)) == 0
        if rules.last_too:
            stops = starts + lengths
            training_ends = self._offsets[np.searchsorted(self._offsets, stops)] - self._held_out
            masks_last |= stops == training_ends
        masked[np.cumsum(lengths) - 1] |= masks_last
        queries = np.flatnonzero(masked)
        answers = tokens[queries]
        tokens[queries] = self._replacements(answers, keys[rows[queries]], from_end[queries])
        return _Examples(tokens, lengths, queries, rows[queries], answers)

    def _replacements(self, masked_items: np.ndarray, keys: np.ndarray, from_end: np.ndarray) -> np.ndarray:
        """Return what the network sees instead of masked items: the mask, a random item, or the item itself."""
        random, kept = self._rules.random, self._rules.kept
        seen = np.full(len(masked_items), self._num_items + 1)
        if random + kept:
            chance = rng.uniform(keys, from_end + _REPLACEMENT_COUNTER)
            is_random = chance < random
            is_kept = (chance >= random) & (chance < random + kept)
            seen[is_kept] = masked_items[is_kept]
            seen[is_random] = 1 + chance[is_random] / random * self._num_items  # uniform over all items
        return seen

    def _ranking_batch(self, split: str, share: Share) -> RankingBatch:
        users = share.positions
        begins = self._offsets[users]
        targets = self._offsets[users + 1] - (1 if split == "test" else 2)
        seen_items, seen_rows, _ = packed(self._items, begins, targets - begins)
        inputs = ranking_inputs(self._items, begins, targets, self._rules, self._num_items)
        return RankingBatch(
            **inputs._asdict(),
            answers_M=torch.from_numpy(self._items[targets].astype(np.int64)),
            weights_M=torch.from_numpy(share.weights()),
            negatives_K=torch.empty(0, dtype=torch.int64),
            seen_rows=torch.from_numpy(seen_rows),
            seen_items=torch.from_numpy(seen_items),
            negatives_BC=torch.from_numpy(self._negatives_of(split, users)),
        )

    def _negatives_of(self, split: str, users: np.ndarray) -> np.ndarray:
        if not self._negatives:
            return np.empty((len(users), 0), dtype=np.int64)
        for user in users.tolist():
            if (split, user) not in self._drawn:
                seen = self._items[self._offsets[user] : self._offsets[user + 1]]
                drawn = [negatives.draw(split, user, seen) for negatives in self._negatives]
                self._drawn[split, user] = np.concatenate(drawn)
        return np.stack([self._drawn[split, user] for user in users.tolist()])

    def _item_counts(self, items: np.ndarray) -> np.ndarray:
        """Return how often items 1, 2, ... occur. They are counted in blocks, because np.bincount copies them."""
        counts = np.zeros(self._num_items + 1, np.int64)
        for start in range(0, len(items), _COUNT_BLOCK_ITEMS):
            counts += np.bincount(items[start : start + _COUNT_BLOCK_ITEMS], minlength=len(counts))
        return counts[1:]

    def _checked_negatives(self, dataset: Dataset, protocol: str) -> Negatives:
        """Return a sampler of negatives; raise a DataError if a user has seen too many items for it."""
        negatives = Negatives(protocol, self._item_counts(self._items))
        lengths = np.diff(self._offsets)  # at least as many as different items
        for user in np.flatnonzero(lengths > negatives.available - negatives.count).tolist():
            num_seen = len(np.unique(self._items[self._offsets[user] : self._offsets[user + 1]]))
            if negatives.available - num_seen < negatives.count:
                file = dataset.path / "users.parquet"
                import polars as pl  # takes 0.1 s, and most runs do not need it

                with reading(file):
                    names = pl.scan_parquet(file, glob=False).filter(pl.col("id") == user).collect()
                raise DataError(
                    f"{dataset.path}: protocol '{protocol}' needs {negatives.count} items a user has never seen; user "
                    f"{names['original_id'][0]} has seen {num_seen} of {negatives.available}. "
                    "Use --set 'eval.protocols=[\"full\"]' (train) or --protocol full (evaluate)."
                )
        return negatives


def ranking_inputs(
    items: np.ndarray, begins: np.ndarray, stops: np.ndarray, rules: WindowRules, num_items: int
) -> HistoryInputs:
    """Return the network's arguments to score every item as the one that follows each history items[begin:stop]."""
    tokens_N, lengths_B = ending_windows(items, begins, stops, rules, mask_token=num_items + 1)
    return HistoryInputs(
        tokens_N=torch.from_numpy(tokens_N),
        lengths_B=torch.from_numpy(lengths_B),
        longest=int(lengths_B.max()),
        queries_M=torch.from_numpy(np.cumsum(lengths_B) - 1),
        row_keys_B=torch.zeros(len(begins), dtype=torch.int64),  # only dropout needs keys
    )
