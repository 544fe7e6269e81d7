"""Prepared histories -> this rank's batches of masked windows (training) or last places (ranking).

Windows, masks and order are made while loading, from (seed, epoch, window): new each epoch, the same for any
world size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import torch

from recmill import rng
from recmill.batch import RankingBatch, SequenceBatch
from recmill.data.checks import checked_items
from recmill.data.share import EVERYTHING, Limits, Share, mixed_within_batches, num_batches, shares
from recmill.errors import DataError
from recmill.metrics.ranking import NUM_NEGATIVES, Negatives, sampled
from recmill.schema import Dataset, HistoriesDescription

# Counters of a window's random numbers; those below are the places of its items.
_CHANCE_OF_WINDOW, _CHANCE_OF_CUT, _CHANCE_OF_ITEM = 1 << 20, (1 << 20) + 1, 1 << 21
_SORTED_BATCHES = 32  # so many batches' windows are sorted by length together: little padding, still random
_COUNTED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class WindowRules:
    """How training examples are made from a history.

    Windows of `max_length` items, cut backwards from the history's end every `step` items, each in `copies`. In a share
    `last_only` of them just the last item is hidden, as at evaluation, with `last_anywhere` after a cut at a random
    place; in the rest each with `probability`, and with `last_too` the history's last as well. For a share `random` of
    the hidden items another one is seen instead of the mask, for a share `kept` the item itself. `asks_next`: nothing
    is hidden; every place asks for the item after it.
    """

    max_length: int
    step: int
    probability: float
    last_only: float
    last_anywhere: bool = False
    last_too: bool = False
    random: float = 0.0
    kept: float = 0.0
    copies: int = 1
    asks_next: bool = False
    negatives: int = 0  # random items that all queries of a global batch have in common

    @property
    def window(self) -> int:
        """Items of a training example: what the model sees and, if that is not among it, the last answer."""
        return self.max_length + self.asks_next


class HistorySource:
    def __init__(
        self,
        dataset: Dataset,
        *,
        window_rules: WindowRules,
        protocols: list[str],
        order: str,
        seed: int,
        train_batch_size: int,
        eval_batch_size: int,
        rank: int,
        size: int,
        limits: Limits = EVERYTHING,
        train_on_validation: bool = False,
    ) -> None:
        assert isinstance(dataset.description, HistoriesDescription)
        self._dataset, self._window_rules, self._order, self._seed = dataset, window_rules, order, seed
        self._train_batch_size, self._eval_batch_size = train_batch_size, eval_batch_size
        self._rank, self._size, self._limits = rank, size, limits
        self._mask_token = dataset.description.num_items + 1
        self._items = checked_items(dataset)
        self._offsets = np.asarray(dataset.array("offsets.npy"))
        self._held_out = 1 if train_on_validation else 2
        windows = train_windows(self._offsets, window_rules, self._held_out)
        self._starts, self._lengths = (np.tile(part, window_rules.copies) for part in windows)
        if window_rules.asks_next:  # of a single item nothing can be asked
            long_enough = self._lengths > 1
            self._starts, self._lengths = self._starts[long_enough], self._lengths[long_enough]
            if not len(self._starts):
                raise DataError(f"{dataset.path}: no history has two items for training. Prepare longer ones.")
        self.samples_per_epoch = limits.samples("train", len(self._starts), train_batch_size)
        self._negatives = [_negatives(name, dataset, self._items, self._offsets) for name in sampled(protocols)]
        self._drawn: dict[tuple[str, int], np.ndarray] = {}

    @property
    def batches_per_epoch(self) -> int:
        return num_batches(self.samples_per_epoch, self._train_batch_size)

    def window_facts(self) -> str:
        """How much there is to learn from, and what padding each batch to its longest window would add to it."""
        lengths = self._lengths[self._epoch_order(0)[: self.samples_per_epoch]]
        firsts = np.arange(0, len(lengths), self._train_batch_size)
        places = int((np.maximum.reduceat(lengths, firsts) * np.diff([*firsts, len(lengths)])).sum())
        return (
            f"windows: {len(self._lengths):,} of {len(self._offsets) - 1:,} histories, {self._lengths.mean():.1f} "
            f"items on average; batches padded to their longest would be {1 - lengths.sum() / places:.1%} padding"
        )

    def train_batches(self, epoch: int, first: int) -> Iterator[SequenceBatch]:
        """Batch `first` and all after it; order and masks depend on the seed and the epoch alone."""
        order = self._epoch_order(epoch)
        mine = shares(self.samples_per_epoch, self._train_batch_size, first, self._rank, self._size)
        for number, share in enumerate(mine, start=first):
            batch = self._masked(epoch, order[share.positions], share)
            yield replace(batch, negatives_K=self._negatives_for_all(epoch, number))

    def _negatives_for_all(self, epoch: int, batch: int) -> torch.Tensor:
        chances = rng.uniform(
            rng.stream_key(self._seed, "negatives", epoch, batch), np.arange(self._window_rules.negatives)
        )
        return torch.from_numpy(1 + (chances * (self._mask_token - 1)).astype(np.int64))

    def num_eval_batches(self, split: str) -> int:
        return num_batches(self._num_users(split), self._eval_batch_size)

    def eval_batches(self, split: str) -> Iterator[RankingBatch]:
        """Every user once. Test histories hold the validation item."""
        for share in shares(self._num_users(split), self._eval_batch_size, 0, self._rank, self._size):
            yield self._ranking(split, share)

    def train_counts(self) -> np.ndarray:
        """Interactions of items 1, 2, ... that are trained on: all but those held out at the end of each history."""
        held_out = np.concatenate([self._offsets[1:] - place for place in range(1, self._held_out + 1)])
        return _item_counts(self._dataset, self._items) - _item_counts(self._dataset, self._items[held_out])

    def _num_users(self, split: str) -> int:
        return self._limits.samples(split, len(self._offsets) - 1, self._eval_batch_size)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order == "file":
            return np.arange(len(self._starts))
        if self._order == "batch":
            size, windows = self._train_batch_size, self.samples_per_epoch
            key = (self._seed, "within batch", epoch)
            parts = [np.arange(start, min(start + size, windows)) for start in range(0, windows, size)]
            return np.concatenate([mixed_within_batches(part, windows, size, *key) for part in parts])
        order = rng.Permutation(len(self._starts), rng.stream_key(self._seed, "order", epoch))(
            np.arange(len(self._starts))
        )
        block = self._train_batch_size * _SORTED_BATCHES
        batches: list[np.ndarray] = []
        for start in range(0, len(order), block):
            rows = order[start : start + block]
            rows = rows[np.argsort(self._lengths[rows], kind="stable")]
            batches += [rows[i : i + self._train_batch_size] for i in range(0, len(rows), self._train_batch_size)]
        # Only the last batch may be short, and it stays last: batch k is always rows k*size and on.
        full = [b for b in batches if len(b) == self._train_batch_size]
        rest = [b for b in batches if len(b) < self._train_batch_size]
        shuffled = rng.Permutation(len(full), rng.stream_key(self._seed, "batches", epoch))(np.arange(len(full)))
        return np.concatenate([full[i] for i in shuffled] + rest)

    def _masked(self, epoch: int, windows: np.ndarray, share: Share) -> SequenceBatch:
        keys = rng.bits(rng.stream_key(self._seed, "window", epoch), windows)
        lengths = self._lengths[windows]
        last_only = rng.uniform(keys, np.full(len(keys), _CHANCE_OF_WINDOW)) < self._window_rules.last_only
        if self._window_rules.last_anywhere:
            places = 1 + rng.uniform(keys, np.full(len(keys), _CHANCE_OF_CUT)) * lengths  # of a last item, from 1
            lengths = np.where(last_only, np.maximum(places.astype(np.int64), np.minimum(2, lengths)), lengths)
        tokens, rows, from_end = _packed(self._items, self._starts[windows], lengths)
        if self._window_rules.asks_next:  # the last item is only an answer, the first one none
            asks, is_answer = from_end > 0, from_end < (lengths - 1)[rows]
            return self._batch(
                tokens[asks], lengths - 1, np.arange(asks.sum()), rows[asks], tokens[is_answer], share, keys
            )
        hidden = rng.uniform(keys[rows], from_end) < self._window_rules.probability
        hidden &= ~last_only[rows]
        asks_last = np.bincount(rows, weights=hidden, minlength=len(keys)) == 0  # a window always asks for something
        if self._window_rules.last_too:
            stops = self._starts[windows] + lengths
            asks_last |= stops == self._offsets[np.searchsorted(self._offsets, stops)] - self._held_out
        hidden[np.cumsum(lengths) - 1] |= asks_last
        queries = np.flatnonzero(hidden)
        answers = tokens[queries]
        tokens[queries] = self._seen_instead(answers, keys[rows[queries]], from_end[queries])
        return self._batch(tokens, lengths, queries, rows[queries], answers, share, keys)

    def _seen_instead(self, hidden_items: np.ndarray, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Of items hidden at these places (from the end) of the windows of these keys."""
        random, kept = self._window_rules.random, self._window_rules.kept
        seen = np.full(len(hidden_items), self._mask_token)
        if random + kept:
            chance = rng.uniform(keys, places + _CHANCE_OF_ITEM)
            is_random, is_kept = chance < random, (chance >= random) & (chance < random + kept)
            seen[is_kept] = hidden_items[is_kept]
            seen[is_random] = 1 + chance[is_random] / random * (self._mask_token - 1)  # any item, each as likely
        return seen

    def _batch(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        queries: np.ndarray,
        query_rows: np.ndarray,
        answers: np.ndarray,
        share: Share,
        keys: np.ndarray,
    ) -> SequenceBatch:
        return SequenceBatch(
            tokens_N=torch.from_numpy(tokens),
            lengths_B=torch.from_numpy(lengths),
            queries_M=torch.from_numpy(queries),
            answers_M=torch.from_numpy(answers),
            weights_M=torch.from_numpy(share.weights()[query_rows]),
            row_keys_B=torch.from_numpy(keys.view(np.int64)),
            negatives_K=torch.empty(0, dtype=torch.int64),
        )

    def _ranking(self, split: str, share: Share) -> RankingBatch:
        users = share.positions
        places = self._offsets[users + 1] - (1 if split == "test" else 2)  # where the targets are
        room = 0 if self._window_rules.asks_next else 1  # for the mask, where the answer would be
        lengths = np.minimum(places - self._offsets[users], self._window_rules.max_length - room)
        tokens, _, from_end = _packed(self._items, places - lengths, lengths + room)
        if room:
            tokens[from_end == 0] = self._mask_token
        seen = [
            np.asarray(self._items[self._offsets[u] : p], dtype=np.int64) for u, p in zip(users, places, strict=True)
        ]
        return RankingBatch(
            tokens_N=torch.from_numpy(tokens),
            lengths_B=torch.from_numpy(lengths + room),
            queries_M=torch.from_numpy(np.cumsum(lengths + room) - 1),
            answers_M=torch.from_numpy(self._items[places].astype(np.int64)),
            weights_M=torch.from_numpy(share.weights()),
            row_keys_B=torch.zeros(len(users), dtype=torch.int64),
            negatives_K=torch.empty(0, dtype=torch.int64),
            seen_rows=torch.from_numpy(np.repeat(np.arange(len(users)), [len(s) for s in seen])),
            seen_items=torch.from_numpy(np.concatenate(seen)),
            negatives_BC=torch.from_numpy(self._negatives_of(split, users)),
        )

    def _negatives_of(self, split: str, users: np.ndarray) -> np.ndarray:
        if not self._negatives:
            return np.empty((len(users), 0), dtype=np.int64)
        for user in users.tolist():
            if (split, user) not in self._drawn:
                met = self._items[self._offsets[user] : self._offsets[user + 1]]
                drawn = [negatives.draw(split, user, met) for negatives in self._negatives]
                self._drawn[split, user] = np.concatenate(drawn)
        return np.stack([self._drawn[split, user] for user in users.tolist()])


def train_windows(offsets: np.ndarray, window_rules: WindowRules, held_out: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of every training window, in items.npy; never with the last `held_out` items of a history."""
    begins, ends = offsets[:-1], offsets[1:] - held_out
    counts = 1 + -(-np.maximum(ends - begins - window_rules.window, 0) // window_rules.step)
    owners = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)  # of its history, from the end
    stops = ends[owners] - nth * window_rules.step
    starts = np.maximum(begins[owners], stops - window_rules.window)
    return starts, stops - starts


def _packed(items: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """items[start : start+length] of each row one after the other; their rows, and their places from the row's end."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    from_end = np.cumsum(lengths)[rows] - 1 - np.arange(len(rows))
    places = (starts + lengths - 1)[rows] - from_end
    return items[places].astype(np.int64), rows, from_end


def _item_counts(dataset: Dataset, items: np.ndarray) -> np.ndarray:
    """How often items 1, 2, ... occur; in pieces, because counting makes a copy."""
    assert isinstance(dataset.description, HistoriesDescription)
    counts = np.zeros(dataset.description.num_items + 1, np.int64)
    for start in range(0, len(items), _COUNTED_AT_ONCE):
        counts += np.bincount(items[start : start + _COUNTED_AT_ONCE], minlength=len(counts))
    return counts[1:]


def _negatives(protocol: str, dataset: Dataset, items: np.ndarray, offsets: np.ndarray) -> Negatives:
    negatives = Negatives(protocol, _item_counts(dataset, items))
    for user in np.flatnonzero(np.diff(offsets) > negatives.available - NUM_NEGATIVES).tolist():
        met = len(np.unique(items[offsets[user] : offsets[user + 1]]))
        if negatives.available - met < NUM_NEGATIVES:
            names = pl.scan_parquet(dataset.path / "users.parquet").filter(pl.col("id") == user).collect()
            raise DataError(
                f"{dataset.path}: protocol '{protocol}' needs {NUM_NEGATIVES} items a user has never met; user "
                f"{names['original_id'][0]} has met {met} of {negatives.available}. "
                "Use --set 'eval.protocols=[\"full\"]' (train) or --protocol full (evaluate)."
            )
    return negatives
