"""One id per feature -> several, while loading: the ids that `prepare criteo --multi-hot` stores."""

import numpy as np

from recmill.data.companions import companions


class MultiHot:
    """The companions of every id, in memory: 4 bytes for each id of each row of a table."""

    def __init__(self, table_rows: list[int], sizes: list[int], distribution: str, seed: int) -> None:
        self.sizes = sizes
        self._tables: list[np.ndarray | None] = []
        for rows, size, blocks in zip(
            table_rows, sizes, companions(table_rows, sizes, distribution, seed), strict=True
        ):
            if size == 1:  # nothing is drawn for it
                self._tables.append(None)
                continue
            table, start = np.empty((rows, size), np.int32), 0
            for block in blocks:
                table[start : start + len(block)] = block
                start += len(block)
            self._tables.append(table)

    def of(self, feature: int, ids: np.ndarray) -> np.ndarray:
        """[n] -> [n, size]: an id itself, then its companions."""
        table = self._tables[feature]
        return ids[:, None] if table is None else table[ids]

    def counts_after(self, feature: int, counts: np.ndarray) -> np.ndarray:
        """int64 [rows] of the one-hot ids -> how often each id comes with companions. Nothing has to be read for it."""
        table = self._tables[feature]
        after = counts.copy()
        for companion in () if table is None else table.T[1:]:
            np.add.at(after, companion, counts)
        return after
