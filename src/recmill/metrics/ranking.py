"""HR@K, NDCG@K and MRR@K of one target per user, sampled negatives, the popularity baseline.

The rank of a target is the number of other candidates that score at least as high: ties count
against the model.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from recmill import rng
from recmill.metrics.own import UNDEFINED, OwnMetrics, Values
from recmill.observe.progress import Progress

if TYPE_CHECKING:
    from recmill.protocols import MetricModule
    from recmill.world import World

MAX_RESAMPLES = 100_000  # they take 2 s; the ends of an interval then vary by 0.2 % of its length
_RESAMPLES_PER_REPORT = 100
# Seeds of the protocol, not of a run: every model is compared with the same negatives.
_NEGATIVES_SEED = 20190814
_BOOTSTRAP_SEED = 20190815


def sampled(protocols: Collection[str]) -> list[str]:
    """Return those of `protocols` that draw negatives, in the order of a batch's columns."""
    return sorted({protocol for protocol in protocols if protocol != "full"})


def num_negatives(protocol: str) -> int:
    """Return how many negatives a protocol draws: 100 for "pop100"."""
    return int(protocol.removeprefix("pop").removeprefix("uni"))


class RankingMetrics:
    """Counts users by the rank of their target (0: best). Every metric is a sum over the counts.

    The bootstrap draws `resamples` times for confidence intervals; 0: there are none.
    """

    keeps_ranks = False  # for `all_ranks`

    def __init__(
        self,
        protocols: list[str],
        ks: list[int],
        resamples: int = 0,
        popularity: "Popularity | None" = None,
        own: "Mapping[str, MetricModule] | None" = None,
    ) -> None:
        self.protocols = protocols
        self._resamples = resamples
        self.popularity = popularity
        self.of_popularity = RankingMetrics(protocols, ks, own=own) if popularity else None
        self._own = {protocol: OwnMetrics(own or {}) for protocol in protocols}
        self._users_by_rank = {protocol: np.zeros(max(ks) + 1, np.int64) for protocol in protocols}
        ranks = np.arange(max(ks) + 1)  # the last one stands for all worse ranks
        gains = {"hr": np.ones(len(ranks)), "ndcg": 1.0 / np.log2(ranks + 2.0), "mrr": 1.0 / (ranks + 1.0)}
        self._gains = {f"{name}@{k}": gain * (ranks < k) for name, gain in gains.items() for k in ks}
        self._ranks: dict[str, list[np.ndarray]] = {protocol: [] for protocol in protocols}

    def update(self, protocol: str, ranks: np.ndarray) -> None:
        self._own[protocol].update(ranks)
        if self.keeps_ranks:
            self._ranks[protocol].append(ranks.astype(np.int32))
        users_by_rank = self._users_by_rank[protocol]
        last = len(users_by_rank) - 1
        users_by_rank += np.bincount(np.minimum(ranks, last), minlength=last + 1)

    def all_ranks(self) -> dict[str, np.ndarray]:
        """Return this process's ranks (0: best) by protocol, in the order of its users."""
        return {protocol: np.concatenate([np.empty(0, np.int32), *ranks]) for protocol, ranks in self._ranks.items()}

    def compute(self, world: "World | None") -> Values:
        """Return the metrics by name. All ranks of `world` take part and get the same values.

        "low/NAME" and "high/NAME" are the ends of a 95 % interval, "popularity/NAME" is the baseline's.
        """
        values: Values = {}
        intervals: Values = {}
        has_intervals = self._resamples and (world is None or world.is_main)  # the others would compute the same
        users = 0
        for protocol, own in self._users_by_rank.items():
            users_by_rank = world.sum_counts(own.copy()) if world else own
            users = int(users_by_rank.sum())
            found = users_by_rank.nonzero()[0]
            counts = users_by_rank[found]
            gains = np.stack([gain[found] for gain in self._gains.values()])
            names = [f"{protocol}/{name}" for name in self._gains]
            means = (gains @ counts / users).tolist() if users else [UNDEFINED] * len(names)
            values |= dict(zip(names, means, strict=True)) | self._own[protocol].compute(world, f"{protocol}/")
            if has_intervals and users:
                with Progress(f"resampling the users, {protocol}", self._resamples, "resamples") as progress:
                    resampled = _resampled_means(gains, counts, self._resamples, progress)
                low, high = np.quantile(resampled, (0.025, 0.975), axis=0)
                for name, low_end, high_end in zip(names, low.tolist(), high.tolist(), strict=True):
                    intervals |= {f"low/{name}": low_end, f"high/{name}": high_end}
        if self._resamples and world:
            intervals = world.broadcast(intervals)
        baseline = self.of_popularity.compute(world) if self.of_popularity else {}
        popularity = {f"popularity/{name}": value for name, value in baseline.items() if name != "users"}
        return {**values, "users": users, **intervals, **popularity}


def _resampled_means(gains: np.ndarray, counts: np.ndarray, resamples: int, progress: Progress) -> np.ndarray:
    """Return bootstrapped means [resamples, metrics] of `gains` [metrics, ranks].

    Users of equal rank gain the same, so drawing users with replacement is a multinomial draw of
    the users per rank, `counts`. Each resample has its own random stream and draws the best ranks
    first, so a result does not depend on other cut-offs.
    """
    users = int(counts.sum())
    shares = counts / users
    means = np.empty((resamples, len(gains)))
    for number in range(resamples):
        generator = np.random.default_rng([_BOOTSTRAP_SEED, number])
        means[number] = gains @ generator.multinomial(users, shares) / users
        if not (number + 1) % _RESAMPLES_PER_REPORT:
            progress.advance(_RESAMPLES_PER_REPORT)
    return means


class Popularity:
    """The baseline that ranks items by their training interactions: train_counts[i] of item i + 1."""

    def __init__(self, train_counts: np.ndarray) -> None:
        self._counts = train_counts
        self._sorted = np.sort(train_counts)

    def full_ranks(self, answers: np.ndarray, seen_rows: np.ndarray, seen_items: np.ndarray) -> np.ndarray:
        """Return the rank of each row's answer among all items that the row has not seen."""
        num_items = len(self._counts)
        answer_counts = self._counts[answers - 1]
        at_least = num_items - np.searchsorted(self._sorted, answer_counts)  # with the answer and seen items
        rows = np.concatenate([seen_rows, np.arange(len(answers))])
        items = np.concatenate([seen_items, answers]) - 1
        is_counted = self._counts[items] >= answer_counts[rows]
        pairs = np.sort(rows[is_counted] * num_items + items[is_counted])  # np.unique takes 70 times as long
        is_first = np.append(True, pairs[1:] != pairs[:-1])  # an item may be seen twice
        return at_least - np.bincount(pairs[is_first] // num_items, minlength=len(answers))

    def ranks_among(self, answers: np.ndarray, negatives: np.ndarray) -> np.ndarray:
        """Return the rank of each row's answer among the row's negatives."""
        return np.sum(self._counts[negatives - 1] >= self._counts[answers - 1][:, None], axis=1)


class Negatives:
    """Distinct items that the user has not interacted with, fixed per user and split; the first ones for any number.

    `pop100` draws 100 by popularity, item_counts[i] of item i + 1 in all splits; `uni100` uniformly.
    Drawing with replacement and dropping repeats and seen items equals drawing without replacement.
    """

    def __init__(self, protocol: str, item_counts: np.ndarray) -> None:
        is_by_popularity = protocol.startswith("pop")
        weights = item_counts if is_by_popularity else np.ones_like(item_counts)
        self.count = num_negatives(protocol)
        self._cumulative = np.cumsum(weights, dtype=np.float64)
        self._name = () if is_by_popularity else ("uni100",)  # as in results that are published
        self.available = int(np.count_nonzero(weights))

    def draw(self, split: str, user: int, seen: np.ndarray) -> np.ndarray:
        """Return item ids, int64 [count]. `seen` holds every item of the user, targets included."""
        assert self.available - len(np.unique(seen)) >= self.count
        key = rng.stream_key(_NEGATIVES_SEED, split, user, *self._name)
        chosen: np.ndarray = np.empty(0, np.int64)
        counter, block = 0, 2 * self.count
        while len(chosen) < self.count:
            points = rng.uniform(key, np.arange(counter, counter + block)) * self._cumulative[-1]
            items = np.searchsorted(self._cumulative, points, side="right") + 1
            items = np.concatenate([chosen, items[~np.isin(items, seen)]])
            _, first = np.unique(items, return_index=True)
            chosen = items[np.sort(first)]
            counter, block = counter + block, block * 2
        return chosen[: self.count]
