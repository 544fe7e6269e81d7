"""Which part of a global batch is this rank's. Depends on sizes alone, so all ranks agree without talking."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recmill import rng


@dataclass(frozen=True)
class Share:
    """Positions of the global order. Those after the first `num_real` are fillers that must weigh nothing.

    Every rank gets equally many, because row-wise sharded tables exchange blocks of equal size.
    """

    positions: np.ndarray
    num_real: int

    def weights(self) -> np.ndarray:
        """float32: 1 for what counts, 0 for fillers."""
        return (np.arange(len(self.positions)) < self.num_real).astype(np.float32)


@dataclass(frozen=True)
class Limits:
    """How many global batches of a split are used (0: all), and whether a short last one of training is."""

    train: int = 0
    val: int = 0
    test: int = 0
    drop_last: bool = False

    def samples(self, split: str, samples: int, global_batch_size: int) -> int:
        """Of so many, those that are used: the first of the split's order."""
        if split == "train" and self.drop_last:
            samples -= samples % global_batch_size
        limit = getattr(self, split)
        return min(samples, limit * global_batch_size) if limit else samples


EVERYTHING = Limits()


@dataclass(frozen=True)
class Batching:
    """How a source makes batches: order, sizes, and which rank of how many it serves."""

    order: str
    seed: int
    train_batch_size: int
    eval_batch_size: int
    rank: int
    size: int
    limits: Limits = EVERYTHING


def mixed_within_batches(positions: np.ndarray, samples: int, global_batch_size: int, *key: int | str) -> np.ndarray:
    """Of one global batch: each stays in it, at a place that depends on the key and the batch alone."""
    batch = int(positions[0]) // global_batch_size
    start = batch * global_batch_size
    count = min(global_batch_size, samples - start)
    return rng.Permutation(count, rng.stream_key(*key, batch))(positions - start) + start


def num_batches(samples: int, global_batch_size: int) -> int:
    """The last batch may be short; none is dropped."""
    return -(-samples // global_batch_size)


def shares(samples: int, global_batch_size: int, first: int, rank: int, size: int) -> Iterator[Share]:
    """This rank's slice of batch `first`, `first + 1`, ...: the same number of batches on all ranks."""
    for batch in range(first, num_batches(samples, global_batch_size)):
        start = batch * global_batch_size
        count = min(global_batch_size, samples - start)
        low, high = start + count * rank // size, start + count * (rank + 1) // size
        fillers = -(-count // size) - (high - low)
        yield Share(np.concatenate([np.arange(low, high), np.full(fillers, start)]), num_real=high - low)
