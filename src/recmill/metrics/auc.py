"""Exact area under the ROC curve. No process holds more than its share of the scores."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recmill.world import World

_SAMPLES_PER_RANK = 256


def auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the share of (positive, negative) pairs in the right order; a tie counts half.

    None if a class is missing.
    """
    labels = labels.astype(bool)
    positives, negatives = np.sort(scores[labels]), np.sort(scores[~labels])  # 10 times faster than argsort
    if not len(positives) or not len(negatives):
        return None
    below = np.searchsorted(negatives, positives, "left")
    not_above = np.searchsorted(negatives, positives, "right")
    # Pairs count twice, so that ties are integers: exact up to 2**62 pairs (4e9 rows).
    return int(below.sum() + not_above.sum()) / (2 * len(positives) * len(negatives))


def auroc_over_ranks(scores: np.ndarray, labels: np.ndarray, world: "World") -> float | None:
    """Return the AUROC of all ranks' float32 scores. All ranks take part and get the same value.

    Each rank receives one range of scores from all ranks, as counts of positives and negatives per
    distinct score. Equal scores are never in two ranges.
    """
    if world.size == 1:
        return auroc(scores, labels)
    columns = _count_by_score(scores, labels.astype(bool))
    ends = np.searchsorted(columns[0], _range_bounds(columns[0], world), "left")
    received = [np.concatenate(world.exchange(np.split(column, ends))) for column in columns]
    order = np.argsort(received[0], kind="stable")
    values, positives, negatives = (column[order] for column in received)
    doubled_pairs = _doubled_pairs(values, positives, negatives)
    ranges = world.gather((doubled_pairs, int(positives.sum()), int(negatives.sum())))
    return world.broadcast(_combine(ranges) if ranges else None)


def _count_by_score(scores: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the distinct scores, ascending, and how many positives and negatives have each."""
    ranked, positives = np.sort(scores), np.sort(scores[labels])
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)])
    values = ranked[ends]
    rows = np.diff(ends, prepend=-1)
    hits = np.diff(np.searchsorted(positives, values, "right"), prepend=0)
    return [values, hits, rows - hits]


def _range_bounds(values: np.ndarray, world: "World") -> np.ndarray:
    """Return size - 1 scores that split all entries about equally, from a sample of each rank's."""
    (num_entries,) = world.sum([float(len(values))])
    step = max(1, int(num_entries) // (_SAMPLES_PER_RANK * world.size))
    samples = world.gather(values[::step])
    bounds: np.ndarray = np.empty(0)
    if samples is not None:  # rank 0 decides
        ranked = np.sort(np.concatenate(samples))
        indices = [len(ranked) * part // world.size for part in range(1, world.size)]
        bounds = ranked[indices] if len(ranked) else np.zeros(world.size - 1, values.dtype)
    return world.broadcast(bounds)


def _doubled_pairs(values: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> int:
    """Return twice the pairs in the right order, from counts by ascending score, with repeats."""
    if not len(values):
        return 0
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    positives_of_score = np.add.reduceat(positives, starts)
    negatives_up_to = np.cumsum(np.add.reduceat(negatives, starts))
    return int(np.sum(positives_of_score * (negatives_up_to + np.append(0, negatives_up_to[:-1]))))


def _combine(ranges: list[tuple[int, int, int]]) -> float | None:
    """Return the AUROC from exact (doubled pairs, positives, negatives) of ascending ranges."""
    doubled_pairs = negatives_below = num_positives = 0
    for pairs, positives, negatives in ranges:
        doubled_pairs += pairs + 2 * positives * negatives_below
        negatives_below += negatives
        num_positives += positives
    return doubled_pairs / (2 * num_positives * negatives_below) if num_positives and negatives_below else None
