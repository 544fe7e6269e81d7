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

    def num_used(self, split: str, num_samples: int) -> int:
        """Return how many of a split's samples are used: always the first ones in its order."""
        batch_size = self._batch_size(split)
        if split == "train" and self.drop_last:
            num_samples -= num_samples % batch_size
        limit = self.max_batches.get(split)
        return min(num_samples, limit * batch_size) if limit else num_samples

    def num_batches(self, split: str, num_used: int) -> int:
        return -(-num_used // self._batch_size(split))

    def shares(self, split: str, num_used: int, first: int = 0) -> Iterator[Share]:
        """Yield this rank's share of batch `first` of a split and of all later ones."""
        batch_size = self._batch_size(split)
        for start in range(first * batch_size, num_used, batch_size):
            count = min(batch_size, num_used - start)
            low = start + count * self.rank // self.size
            high = start + count * (self.rank + 1) // self.size
            fillers = -(-count // self.size) - (high - low)
            yield Share(np.concatenate([np.arange(low, high), np.full(fillers, start)]), num_real=high - low)

    def permuted_within_batch(self, positions: np.ndarray, num_used: int, epoch: int) -> np.ndarray:
        """Permute positions of one global training batch within it."""
        batch = int(positions[0]) // self.train_batch_size
        start = batch * self.train_batch_size
        count = min(self.train_batch_size, num_used - start)
        key = rng.stream_key(self.seed, "within batch", epoch, batch)
        return rng.Permutation(count, key)(positions - start) + start

    def _batch_size(self, split: str) -> int:
        return self.train_batch_size if split == "train" else self.eval_batch_size
