"""Histories with a known truth: a planted Markov chain over items.

An item is followed by one of its few successors or, with probability `noise`, by any item drawn by popularity; never
by an item that the user has had. No model can rank better than this distribution does, so its HR@K is the best
reachable.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from pydantic import model_validator

from recmill.config.sections import Section, key
from recmill.datasets.histories.writing import id_table, seal_histories
from recmill.datasets.synthetic.plan import GeneratedPlan, plan
from recmill.datasets.writing import Work, write_npy
from recmill.metrics.ranking import Negatives, RankingMetrics
from recmill.observe.progress import Progress
from recmill.schema import Description

__all__ = ["Options", "plan", "write"]

SUCCESSOR_PROBABILITIES = np.array([0.4, 0.3, 0.2, 0.1])
MIN_LENGTH = 5
SEEN_CELLS = 1 << 26  # users are generated in blocks of at most this many users x items, a byte each


class Options(Section):
    users: int = key(4_000, "Number of users.", ge=1, lt=2**31)
    items: int = key(500, "Number of items.", ge=20, lt=2**26)
    interactions: int = key(120_000, "Total number of interactions, at least 5 per user.", ge=MIN_LENGTH, lt=2**40)
    seed: int = key(1, "The same seed gives the same bytes.", ge=0, lt=2**63)
    noise: float = key(0.2, "Share of steps drawn by popularity instead of the chain.", ge=0.0, le=1.0)

    @model_validator(mode="after")
    def check_interactions(self) -> "Options":
        least = self.users * MIN_LENGTH
        most = self.users * (self.items // 2)
        if not least <= self.interactions <= most:
            need = f"{self.users} users and {self.items} items need {least} to {most} ({MIN_LENGTH} to items/2 each)"
            raise ValueError(f"--interactions {self.interactions}: {need}.")
        return self


@dataclass(frozen=True)
class Chain:
    """A Markov chain over items, numbered from 0: successors [items, 4], popularity [items] that sums to 1."""

    successors: np.ndarray
    popularity: np.ndarray
    noise: float

    @classmethod
    def planted(cls, options: Options) -> "Chain":
        generator = np.random.default_rng([options.seed, 0])
        count = len(SUCCESSOR_PROBABILITIES)
        successors = np.stack([generator.choice(options.items - 1, count, replace=False) for _ in range(options.items)])
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
    """Draw skewed lengths between 5 and half of the items, with a sum of exactly `interactions`."""
    longest = options.items // 2
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
    """Return histories of these lengths, one after the other, in each of which an item occurs at most once."""
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
            if tries > 50:  # with little noise, the chain may offer no new item
                drawn = chain.draw_popular(len(waiting), generator)
            is_new = ~seen[waiting, drawn]
            steps[waiting[is_new], step] = drawn[is_new]
            seen[waiting[is_new], drawn[is_new]] = True
            waiting = waiting[~is_new]
            tries += 1
        current = np.where(lengths > step, steps[:, step], current)
    return steps[steps >= 0]


def write(plan: GeneratedPlan[Options], work: Work) -> Description:
    options = plan.options
    chain = Chain.planted(options)
    lengths = history_lengths(options)
    block_users = max(1, SEEN_CELLS // options.items)
    blocks = []
    with Progress("generating histories", options.interactions, "interactions") as progress:
        for number, start in enumerate(range(0, options.users, block_users)):
            generator = np.random.default_rng([options.seed, 2, number])
            blocks.append(walk(chain, lengths[start : start + block_users], generator))
            progress.advance(len(blocks[-1]))
    items = np.concatenate(blocks) + 1
    counts = np.bincount(items, minlength=options.items + 1)[1:]
    write_npy(work.data / "items.npy", items, np.int32)
    users = id_table(map(str, range(options.users)), lengths, first_id=0)
    names = id_table(map(str, range(1, options.items + 1)), counts, first_id=1)
    names = names.with_columns(title=pl.format("Item {}", "original_id"))
    truth = {split: best_reachable(chain, items, lengths, counts, split) for split in ("val", "test")}
    return seal_histories(work.data, "synthetic-histories", plan.recipe, users, names, truth)


def best_reachable(
    chain: Chain, items: np.ndarray, lengths: np.ndarray, counts: np.ndarray, split: str
) -> dict[str, float]:
    """Return HR@K, NDCG@K and MRR@K of the best possible scores on this split, for each protocol.

    The best score is the planted probability. Among negatives drawn by popularity (pop100) it is divided by the
    popularity, because popular items are candidates more often. Popularity decides between equal probabilities.
    """
    negatives = {protocol: Negatives(protocol, counts) for protocol in ("pop100", "uni100")}
    negatives = {name: drawn for name, drawn in negatives.items() if drawn.available - lengths.max() >= drawn.count}
    ranks: dict[str, list[int]] = {name: [] for name in ("full", *negatives)}
    for user, history in enumerate(np.split(items, np.cumsum(lengths)[:-1])):
        position = len(history) - (1 if split == "test" else 2)
        scores = chain.next_probability(history[position - 1] - 1) + 1e-12 * chain.popularity
        target = history[position] - 1
        unseen = np.ones(len(scores), dtype=bool)
        unseen[history[:position] - 1] = False
        ranks["full"].append(int(np.sum(scores[unseen] >= scores[target])) - 1)
        for name, drawn in negatives.items():
            others = drawn.draw(split, user, history) - 1
            best = scores / np.maximum(counts, 1) if name == "pop100" else scores
            ranks[name].append(int(np.sum(best[others] >= best[target])))
    metrics = RankingMetrics(list(ranks), [1, 5, 10])
    for protocol, ranks_of_users in ranks.items():
        metrics.update(protocol, np.array(ranks_of_users))
    return {name: value for name, value in metrics.compute(None).items() if isinstance(value, float)}
