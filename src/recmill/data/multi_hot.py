"""Turn one id per feature into several while loading: the same ids that `prepare criteo --multi-hot` stores."""

import numpy as np

from recmill.data.companions import companions


class MultiHot:
    """The companions of every id, in memory: 4 bytes for each id of each row of a table."""

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
