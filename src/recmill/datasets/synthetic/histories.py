"""Histories with a known truth: a planted Markov chain over items.

After an item comes one of its few successors, or, with probability `noise`, any item by popularity; never one the
user has met. Ranking by that very distribution is the best any model can do, so its HR@K is the best reachable.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import Field

from recmill.config.sections import Section
from recmill.datasets.histories.writing import seal_histories
from recmill.datasets.writing import Progress
from recmill.errors import ConfigError
from recmill.metrics.ranking import NUM_NEGATIVES, Negatives, RankingMetrics
from recmill.schema import Description

SUCCESSOR_PROBABILITIES = np.array([0.4, 0.3, 0.2, 0.1])
MIN_LENGTH = 5
KS = (1, 5, 10)
SEEN_CELLS = 1 << 26  # users are made in blocks of users x items <= this many bytes


class Options(Section):
    users: int = Field(4_000, ge=1, lt=2**31, description="Number of users.")
    items: int = Field(500, ge=20, lt=2**26, description="Number of items.")
    interactions: int = Field(120_000, ge=MIN_LENGTH, lt=2**40, description="Interactions in all; at least 5 per user.")
    seed: int = Field(1, ge=0, lt=2**63, description="Same seed, same bytes.")
    noise: float = Field(0.2, ge=0.0, le=1.0, description="Share of steps that follow popularity, not the chain.")


@dataclass(frozen=True)
class Chain:
    """Items are 0..items-1 in here. successors [items, 4]; popularity [items], sums to 1."""

    successors: np.ndarray
    popularity: np.ndarray
    noise: float

    @classmethod
    def planted(cls, options: Options) -> "Chain":
        generator = np.random.default_rng([options.seed, 0])
        successors = np.stack(
            [
                generator.choice(options.items - 1, len(SUCCESSOR_PROBABILITIES), replace=False)
                for _ in range(options.items)
            ]
        )
        successors += successors >= np.arange(options.items)[:, None]  # never itself
        popularity = 1.0 / np.arange(5, options.items + 5)
        return cls(successors, generator.permutation(popularity / popularity.sum()), options.noise)

    def next_probability(self, current: int) -> np.ndarray:
        probability = self.noise * self.popularity
        probability[self.successors[current]] += (1.0 - self.noise) * SUCCESSOR_PROBABILITIES
        return probability

    def draw(self, current: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        choice = generator.choice(len(SUCCESSOR_PROBABILITIES), size=len(current), p=SUCCESSOR_PROBABILITIES)
        followed = self.successors[current, choice]
        jumped = self.draw_popular(len(current), generator)
        return np.where(generator.random(len(current)) < self.noise, jumped, followed)

    def draw_popular(self, count: int, generator: np.random.Generator) -> np.ndarray:
        points = np.searchsorted(np.cumsum(self.popularity), generator.random(count), side="right")
        return np.minimum(points, len(self.popularity) - 1)


def history_lengths(options: Options) -> np.ndarray:
    """Skewed, at least 5, at most half of the items, in all exactly `interactions`."""
    longest = options.items // 2
    if not options.users * MIN_LENGTH <= options.interactions <= options.users * longest:
        raise ConfigError(
            f"--interactions {options.interactions}: {options.users} users of {options.items} items need "
            f"{options.users * MIN_LENGTH} to {options.users * longest} ({MIN_LENGTH} to items/2 each)."
        )
    weights = np.exp(0.6 * np.random.default_rng([options.seed, 1]).standard_normal(options.users))
    lengths = np.full(options.users, MIN_LENGTH)
    while missing := options.interactions - int(lengths.sum()):
        share = np.where(lengths < longest, weights, 0.0)
        extra = np.floor(missing * share / share.sum()).astype(np.int64)
        if not extra.any():
            extra[np.flatnonzero(lengths < longest)[:missing]] = 1
        lengths = np.minimum(lengths + extra, longest)
    return lengths


def walk(chain: Chain, lengths: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Histories of these lengths end to end. A draw the user has met is drawn again (50 times, then by popularity)."""
    users = np.arange(len(lengths))
    seen = np.zeros((len(lengths), len(chain.popularity)), dtype=bool)
    steps = np.full((len(lengths), int(lengths.max())), -1, dtype=np.int32)
    current = chain.draw_popular(len(lengths), generator)
    seen[users, current] = True
    steps[:, 0] = current
    for step in range(1, steps.shape[1]):
        waiting = np.flatnonzero(lengths > step)
        tries = 0
        while len(waiting):
            drawn = chain.draw(current[waiting], generator)
            if tries > 50:  # with little noise and all successors met, only popularity can go on
                drawn = chain.draw_popular(len(waiting), generator)
            fresh = ~seen[waiting, drawn]
            steps[waiting[fresh], step] = drawn[fresh]
            seen[waiting[fresh], drawn[fresh]] = True
            waiting, tries = waiting[~fresh], tries + 1
        current = np.where(lengths > step, steps[:, step], current)
    return steps[steps >= 0]


def write(directory: Path, options: Options, progress: Progress) -> Description:
    chain, lengths = Chain.planted(options), history_lengths(options)
    parts, done = [], 0
    for block, chosen in enumerate(_blocks(lengths, options.items)):
        parts.append(walk(chain, chosen, np.random.default_rng([options.seed, 2, block])))
        done += len(parts[-1])
        progress(done, options.interactions)
    items = np.concatenate(parts) + 1
    counts = np.bincount(items, minlength=options.items + 1)[1:]
    names = [str(i) for i in range(1, options.items + 1)]
    return seal_histories(
        directory,
        "synthetic-histories",
        options.model_dump(),
        items,
        lengths,
        users=pl.DataFrame(
            {"id": range(options.users), "original_id": [str(u) for u in range(options.users)], "count": lengths}
        ),
        item_names=pl.DataFrame(
            {
                "id": range(1, options.items + 1),
                "original_id": names,
                "title": [f"Item {name}" for name in names],
                "count": counts,
            }
        ),
        truth={split: best_reachable(chain, items, lengths, counts, split) for split in ("val", "test")},
    )


def _blocks(lengths: np.ndarray, num_items: int) -> Iterator[np.ndarray]:
    size = max(1, SEEN_CELLS // num_items)
    for start in range(0, len(lengths), size):
        yield lengths[start : start + size]


def best_reachable(
    chain: Chain, items: np.ndarray, lengths: np.ndarray, counts: np.ndarray, split: str
) -> dict[str, float]:
    """HR@K, NDCG@K and MRR@K of the best possible scores on this split, by protocol.

    Among the whole catalogue, or items drawn from it alike, that is the planted probability; among negatives drawn by
    popularity, the probability over the popularity (a popular item is there anyway). Where the chain says nothing,
    popularity decides.
    """
    ends = np.cumsum(lengths)
    negatives = {protocol: Negatives(protocol, counts) for protocol in ("pop100", "uni100")}
    negatives = {name: drawn for name, drawn in negatives.items() if drawn.available - lengths.max() >= NUM_NEGATIVES}
    ranks: dict[str, list[int]] = {name: [] for name in ("full", *negatives)}
    for user, end in enumerate(ends):
        history = items[end - lengths[user] : end]
        place = len(history) - (1 if split == "test" else 2)
        scores = chain.next_probability(history[place - 1] - 1) + 1e-12 * chain.popularity
        target = history[place] - 1
        unseen = np.ones(len(scores), dtype=bool)
        unseen[history[:place] - 1] = False
        ranks["full"].append(int(np.sum(scores[unseen] >= scores[target])) - 1)
        for name, drawn in negatives.items():
            others = drawn.draw(split, user, history) - 1
            best = scores / np.maximum(counts, 1) if name == "pop100" else scores
            ranks[name].append(int(np.sum(best[others] >= best[target])))
    metrics = RankingMetrics(list(ranks), list(KS))
    for protocol, found in ranks.items():
        metrics.update(protocol, np.array(found))
    return {name: value for name, value in metrics.compute(None).items() if isinstance(value, float)}
