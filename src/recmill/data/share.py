"""Divide global batches among ranks. The result depends on sizes alone, so ranks agree without communication."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from recmill import rng


@dataclass(frozen=True)
class Share:
    """This rank's positions of a global batch. Those after the first `num_real` are fillers of weight 0.

    Fillers give every rank equally many positions: row-wise sharded tables exchange blocks of equal size.
    """

    positions: np.ndarray
    num_real: int

    def weights(self) -> np.ndarray:
        return (np.arange(len(self.positions)) < self.num_real).astype(np.float32)


@dataclass(frozen=True)
class Batching:
    """How samples become the batches of rank `rank` of `size`. Batch sizes are those of global batches."""

    order: str
    seed: int
    train_batch_size: int
    eval_batch_size: int
    rank: int
    size: int
    max_batches: dict[str, int] = field(default_factory=dict)  # by split; 0 or no entry: all
    drop_last: bool = False  # leave out an incomplete last training batch
    remainder: str = "even"  # how the last training batch is divided; "torchrec": see `num_batches`

    def num_used(self, split: str, num_samples: int) -> int:
        """Return how many of a split's samples are used: always the first ones in its order."""
        batch_size = self._batch_size(split)
        if split == "train" and self.drop_last:
            num_samples -= num_samples % batch_size
        limit = self.max_batches.get(split)
        is_limited = limit is not None and 0 < limit < self.num_batches(split, num_samples)
        return limit * batch_size if limit and is_limited else num_samples

    def num_batches(self, split: str, num_used: int) -> int:
        """Return the number of global batches. As in TorchRec's reader of Criteo, `remainder = "torchrec"` adds fewer
        rows than ranks to the batch before, and gives what is left after dividing the last batch to the first ranks.
        """
        num_full, rest = divmod(num_used, self._batch_size(split))
        is_added = split == "train" and self.remainder == "torchrec" and num_full > 0 and rest < self.size
        return num_full + (rest > 0 and not is_added)

    def shares(self, split: str, num_used: int, first: int = 0) -> Iterator[Share]:
        """Yield this rank's share of batch `first` of a split and of all later ones."""
        for batch in range(first, self.num_batches(split, num_used)):
            start, count = self._bounds(split, batch, num_used)
            low, high = (start + self._num_before(split, rank, count) for rank in (self.rank, self.rank + 1))
            fillers = -(-count // self.size) - (high - low)
            yield Share(np.concatenate([np.arange(low, high), np.full(fillers, start)]), num_real=high - low)

    def permuted_within_batch(self, positions: np.ndarray, num_used: int, epoch: int) -> np.ndarray:
        """Permute positions of one global training batch within it."""
        last = self.num_batches("train", num_used) - 1
        batch = min(int(positions[0]) // self.train_batch_size, last)
        start, count = self._bounds("train", batch, num_used)
        key = rng.stream_key(self.seed, "within batch", epoch, batch)
        return rng.Permutation(count, key)(positions - start) + start

    def _bounds(self, split: str, batch: int, num_used: int) -> tuple[int, int]:
        """Return the first position of a global batch, and its length."""
        start = batch * self._batch_size(split)
        is_last = batch == self.num_batches(split, num_used) - 1
        return start, num_used - start if is_last else self._batch_size(split)

    def _num_before(self, split: str, rank: int, count: int) -> int:
        """Return how many of a batch's `count` positions belong to the ranks before `rank`."""
        if split == "train" and self.remainder == "torchrec":
            return rank * (count // self.size) + min(rank, count % self.size)
        return count * rank // self.size

    def _batch_size(self, split: str) -> int:
        return self.train_batch_size if split == "train" else self.eval_batch_size
