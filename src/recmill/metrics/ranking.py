"""HR@K and NDCG@K of one relevant item per user, and the negatives of the `pop100` protocol.

A rank is the number of other candidates that score at least as high as the target: ties count against the model.
"""

from typing import TYPE_CHECKING

import numpy as np

from recmill import rng
from recmill.metrics.binary import UNDEFINED, Values

if TYPE_CHECKING:
    from recmill.world import World

POP100_NEGATIVES = 100
# Part of the protocol, not of a run: every model meets the same negatives.
_NEGATIVES_SEED = 20190814


class RankingMetrics:
    """Sums over users; `ranks` start at 0 for the best place."""

    def __init__(self, protocols: list[str], ks: list[int]) -> None:
        self.protocols, self._ks = protocols, ks
        self._sums = {protocol: np.zeros(2 * len(ks) + 1) for protocol in protocols}

    def update(self, protocol: str, ranks: np.ndarray) -> None:
        hits = [float(np.sum(ranks < k)) for k in self._ks]
        gains = [float(np.sum(1.0 / np.log2(ranks[ranks < k] + 2.0))) for k in self._ks]
        self._sums[protocol] += np.array([*hits, *gains, len(ranks)])

    def compute(self, world: "World | None") -> Values:
        """All ranks take part and all get the same values. Without a world: this process alone."""
        values: Values = {}
        users = 0
        for protocol, sums in self._sums.items():
            *parts, count = world.sum(sums.tolist()) if world else sums.tolist()
            users = int(count)
            names = [f"{protocol}/hr@{k}" for k in self._ks] + [f"{protocol}/ndcg@{k}" for k in self._ks]
            for name, part in zip(names, parts, strict=True):
                values[name] = part / count if count else UNDEFINED
        return values | {"users": users}


class PopularNegatives:
    """`pop100`: 100 different items by popularity among those the user has never met, fixed per user and split.

    Drawing with replacement and dropping repeats and seen items is drawing without replacement among the rest.
    """

    def __init__(self, item_counts: np.ndarray) -> None:
        """`item_counts[i]`: interactions of item i+1, over everything."""
        self._cumulative = np.cumsum(item_counts, dtype=np.float64)
        self._available = int(np.count_nonzero(item_counts))

    def draw(self, split: str, user: int, seen: np.ndarray) -> np.ndarray:
        """Item ids, int64 [100]; `seen` holds every item of the user, targets included."""
        assert self._available - len(np.unique(seen)) >= POP100_NEGATIVES
        key = rng.stream_key(_NEGATIVES_SEED, split, user)
        chosen: np.ndarray = np.empty(0, np.int64)
        counter, block = 0, 2 * POP100_NEGATIVES
        while len(chosen) < POP100_NEGATIVES:
            points = rng.uniform(key, np.arange(counter, counter + block)) * self._cumulative[-1]
            items = np.searchsorted(self._cumulative, points, side="right") + 1
            items = np.concatenate([chosen, items[~np.isin(items, seen)]])
            _, first = np.unique(items, return_index=True)
            chosen = items[np.sort(first)]
            counter, block = counter + block, block * 2
        return chosen[:POP100_NEGATIVES]
