"""Several ids per row and feature, made from one: a fixed table per feature lists the companions of each id.

For the same seed the tables equal those of the DLRM reference: the same random stream, drawn feature after feature.
"""

from collections.abc import Iterator

import numpy as np

_DRAWN_AT_ONCE = 1 << 22


def companions(rows: list[int], sizes: list[int], distribution: str, seed: int) -> Iterator[Iterator[np.ndarray]]:
    """Yield for each feature the blocks of its table, int32 [rows, size]: an id itself, then its companions."""
    stream = np.random.RandomState(seed)  # the legacy stream is part of the published recipe

    def blocks(count: int, size: int) -> Iterator[np.ndarray]:
        drawn: np.ndarray
        step = max(_DRAWN_AT_ONCE // size, 1)
        for start in range(0, count, step):
            shape = (min(step, count - start), size - 1)
            if distribution == "uniform":
                drawn = stream.randint(0, count, size=shape)
            else:
                with np.errstate(invalid="ignore"):  # large values overflow int32, as they do in the reference
                    drawn = stream.pareto(a=0.25, size=shape).astype(np.int32) % count
            own = np.arange(start, start + shape[0])[:, None]
            yield np.concatenate([own, drawn], axis=1).astype(np.int32)

    for count, size in zip(rows, sizes, strict=True):
        yield blocks(count, size)
