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


class MultiHot:
    """Adds companions to ids while loading. Holds all tables in memory: 4 bytes for each id of each row."""

    def __init__(self, table_rows: list[int], sizes: list[int], distribution: str, seed: int) -> None:
        self.sizes = sizes
        self._tables: list[np.ndarray | None] = []
        drawn = companions(table_rows, sizes, distribution, seed)
        for rows, size, blocks in zip(table_rows, sizes, drawn, strict=True):
            if size == 1:  # nothing is drawn for it
                self._tables.append(None)
                continue
            table = np.empty((rows, size), np.int32)
            start = 0
            for block in blocks:
                table[start : start + len(block)] = block
                start += len(block)
            self._tables.append(table)

    def of(self, feature: int, ids: np.ndarray) -> np.ndarray:
        """Return [n, size] for ids [n]: each id itself, then its companions."""
        table = self._tables[feature]
        return ids[:, None] if table is None else table[ids]

    def counts_after(self, feature: int, counts: np.ndarray) -> np.ndarray:
        """Turn counts of the stored ids, int64 [rows], into counts with their companions."""
        table = self._tables[feature]
        after = counts.copy()
        for companion in () if table is None else table.T[1:]:
            np.add.at(after, companion, counts)
        return after
