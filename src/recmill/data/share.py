"""Which part of a global batch is this rank's. Depends on sizes alone, so all ranks agree without talking."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """Positions of the global order; an empty share gets one position that must weigh nothing."""

    positions: np.ndarray
    is_filler: bool


def num_batches(samples: int, global_batch_size: int) -> int:
    """The last batch may be short; none is dropped."""
    return -(-samples // global_batch_size)


def shares(samples: int, global_batch_size: int, first: int, rank: int, size: int) -> Iterator[Share]:
    """This rank's slice of batch `first`, `first + 1`, ...: equal counts on all ranks, sizes equal but for one."""
    for batch in range(first, num_batches(samples, global_batch_size)):
        start = batch * global_batch_size
        count = min(global_batch_size, samples - start)
        low, high = start + count * rank // size, start + count * (rank + 1) // size
        if low == high:
            yield Share(np.array([start]), is_filler=True)
        else:
            yield Share(np.arange(low, high), is_filler=False)
