"""Which rows of a global batch belong to this rank. It depends on sizes alone, so ranks agree without communication."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recmill import rng


@dataclass(frozen=True)
class Share:
    """This rank's positions in the global order. Those after the first `num_real` are fillers that must weigh nothing.

    Every rank gets the same number of positions, because row-wise sharded tables exchange blocks of equal size.
    """

    positions: np.ndarray
    num_real: int

    def weights(self) -> np.ndarray:
        """Return float32 weights: 1 for real rows, 0 for fillers."""
        return (np.arange(len(self.positions)) < self.num_real).astype(np.float32)


@dataclass(frozen=True)
class Limits:
    """How many global batches of each split are used (0: all), and whether an incomplete last training batch is."""

    train: int = 0
    val: int = 0
    test: int = 0
    drop_last: bool = False

    def samples(self, split: str, samples: int, global_batch_size: int) -> int:
        """Return how many of a split's samples are used: always the first ones in its order."""
        if split == "train" and self.drop_last:
            samples -= samples % global_batch_size
        limit = getattr(self, split)
        return min(samples, limit * global_batch_size) if limit else samples


EVERYTHING = Limits()


@dataclass(frozen=True)
class Batching:
    """How samples become the batches of one rank. Batch sizes are global: over all ranks."""

    order: str
    seed: int
    train_batch_size: int
    eval_batch_size: int
    rank: int
    size: int
    limits: Limits = EVERYTHING

    def samples(self, split: str, samples: int) -> int:
        """Return how many of a split's samples are used."""
        batch_size = self.train_batch_size if split == "train" else self.eval_batch_size
        return self.limits.samples(split, samples, batch_size)

    def train_shares(self, samples: int, first: int) -> Iterator[Share]:
        return shares(samples, self.train_batch_size, first, self.rank, self.size)

    def eval_shares(self, samples: int) -> Iterator[Share]:
        return shares(samples, self.eval_batch_size, 0, self.rank, self.size)


def mixed_within_batches(positions: np.ndarray, samples: int, global_batch_size: int, *key: int | str) -> np.ndarray:
    """Permute positions of one global batch within it; the permutation depends on the key and the batch alone."""
    batch = int(positions[0]) // global_batch_size
    start = batch * global_batch_size
    count = min(global_batch_size, samples - start)
    return rng.Permutation(count, rng.stream_key(*key, batch))(positions - start) + start


def num_batches(samples: int, global_batch_size: int) -> int:
    """Return the number of batches; the last one may be incomplete."""
    return -(-samples // global_batch_size)


def shares(samples: int, global_batch_size: int, first: int, rank: int, size: int) -> Iterator[Share]:
    """Yield this rank's share of batch `first`, `first + 1`, ...: the same number of batches on every rank."""
    for batch in range(first, num_batches(samples, global_batch_size)):
        start = batch * global_batch_size
        count = min(global_batch_size, samples - start)
        low = start + count * rank // size
        high = start + count * (rank + 1) // size
        fillers = -(-count // size) - (high - low)
        yield Share(np.concatenate([np.arange(low, high), np.full(fillers, start)]), num_real=high - low)
