"""Exact area under the ROC curve. No process holds more than its share of the scores."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recmill.world import World


def auroc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Return the share of (positive, negative) pairs in the right order; a tie counts half.

    A pair counts as the product of its weights. None if a class is missing.
    """
    if weights is not None:
        return combined([_weighted_pairs(scores, labels.astype(np.float64), weights.astype(np.float64))])
    labels = labels.astype(bool)
    positives, negatives = np.sort(scores[labels]), np.sort(scores[~labels])  # 10 times faster than argsort
    below = np.searchsorted(negatives, positives, "left")
    not_above = np.searchsorted(negatives, positives, "right")
    return combined([(int(below.sum() + not_above.sum()), len(positives), len(negatives))])


def auroc_alone(values: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the AUROC of one feature alone, at least 0.5; None if a class is missing.

    `values`: numbers, float [n], which are scores as they are, or ids, int [n, ids per row]: the share of clicks of an
    id is learned from the even rows. The odd rows are measured.
    """
    scores = values[1::2]
    if values.ndim == 2:
        unique, positions = np.unique(values, return_inverse=True)
        positions = positions.reshape(values.shape)
        known = positions[::2].ravel()
        weights = np.repeat(labels[::2].astype(np.float64), values.shape[1])
        rows = np.bincount(known, minlength=len(unique))
        clicks = np.bincount(known, weights, minlength=len(unique))
        rates = np.where(rows > 0, clicks / np.maximum(rows, 1), labels.mean())
        scores = rates[positions[1::2]].mean(axis=1)
    area = auroc(scores.astype(np.float32), labels[1::2])
    return None if area is None else max(area, 1 - area)


def auroc_over_ranks(scores: np.ndarray, labels: np.ndarray, world: "World") -> float | None:
    """Return the AUROC of all ranks' float32 scores. All ranks take part and get the same value."""
    if world.size == 1:
        return auroc(scores, labels)
    _, positives, negatives = score_range(scores, labels, world)
    ranges = world.gather((doubled_pairs(positives, negatives), int(positives.sum()), int(negatives.sum())))
    return world.broadcast(combined(ranges) if ranges else None)


def weighted_auroc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, world: "World") -> float | None:
    """Return the AUROC of all ranks' scores where a pair counts as the product of its weights. All ranks take part."""
    columns = [labels.astype(np.float64), weights.astype(np.float64)]
    ranges = world.gather(_weighted_pairs(*by_score_range(scores, columns, world)))
    return world.broadcast(combined(ranges) if ranges else None)


def _weighted_pairs(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Return twice the weight of the pairs in the right order, and the weights of the positives and the negatives."""
    _, cells = np.unique(scores, return_inverse=True)
    positives, negatives = (np.bincount(cells, weights * share) for share in (labels, 1 - labels))
    pairs = float(np.sum(positives * (2 * np.cumsum(negatives) - negatives)))
    return pairs, float(positives.sum()), float(negatives.sum())


def grouped_auroc(
    groups: np.ndarray, scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, world: "World"
) -> float | None:
    """Return the mean AUROC of the groups that have both classes, by the weight of their rows. All ranks take part.

    All rows of a group go to one rank. Group 0 is left out; None: no group has both classes.
    """
    columns = [groups, scores, labels.astype(np.float64), weights.astype(np.float64)]
    columns = [_sent(column[groups > 0], groups[groups > 0] % world.size, world) for column in columns]
    groups, scores, labels, weights = (column[np.lexsort((columns[1], columns[0]))] for column in columns)
    is_new_group = np.diff(groups, prepend=0) != 0
    is_new_cell = is_new_group | (np.diff(scores, prepend=np.float32(0)) != 0)
    cells = np.cumsum(is_new_cell) - 1  # of rows with the same group and score
    positives, negatives = (np.bincount(cells, weights * share) for share in (labels, 1 - labels))
    group_of_cell = (np.cumsum(is_new_group) - 1)[is_new_cell]
    of_group = [np.bincount(group_of_cell, values) for values in (positives, negatives)]
    first_cells = np.flatnonzero(np.diff(group_of_cell, prepend=-1))
    before = np.cumsum(negatives) - negatives  # of all groups
    below = before - before[first_cells][group_of_cell]
    pairs = np.bincount(group_of_cell, positives * (below + negatives / 2))
    both = of_group[0] * of_group[1]
    areas = np.divide(pairs, both, out=np.zeros(len(both)), where=both > 0)
    rows = np.where(both > 0, of_group[0] + of_group[1], 0)
    total, weight = world.sum([float(areas @ rows), float(rows.sum())])
    return total / weight if weight else None


def by_score_range(scores: np.ndarray, columns: list[np.ndarray], world: "World") -> list[np.ndarray]:
    """Return the scores of this rank's range and the other columns of their rows, from all ranks."""
    if world.size == 1:
        return [scores, *columns]
    owners = np.searchsorted(_range_bounds(np.unique(scores), world), scores, "right")
    return [_sent(column, owners, world) for column in (scores, *columns)]


def _sent(column: np.ndarray, owners: np.ndarray, world: "World") -> np.ndarray:
    """Send each value to the rank that owns it; return what this rank owns."""
    return np.concatenate(world.exchange([column[owners == rank] for rank in range(world.size)]))


def score_range(scores: np.ndarray, labels: np.ndarray, world: "World") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct scores of this rank's range, ascending, and their positives and negatives on all ranks.

    Each rank receives one range from all ranks: equal scores are never in two ranges, and higher
    ranks have higher scores.
    """
    values, rows = np.unique(scores, return_counts=True)
    positives = np.diff(np.searchsorted(np.sort(scores[labels.astype(bool)]), values, "right"), prepend=0)
    if world.size == 1:
        return values, positives, rows - positives
    ends = np.searchsorted(values, _range_bounds(values, world), "left")
    columns = values, positives, rows - positives
    values, *counts = (np.concatenate(world.exchange(np.split(column, ends))) for column in columns)
    values, index = np.unique(values, return_inverse=True)  # several ranks may have sent the same score
    positives, negatives = (np.bincount(index, count).astype(np.int64) for count in counts)
    return values, positives, negatives


def doubled_pairs(positives: np.ndarray, negatives: np.ndarray) -> int:
    """Return twice the pairs in the right order, given the counts of ascending scores."""
    return int(np.sum(positives * (2 * np.cumsum(negatives) - negatives)))  # negatives below, and not above


def _range_bounds(values: np.ndarray, world: "World") -> np.ndarray:
    """Return size - 1 scores that split all ranks' entries about equally, from 256 samples per rank."""
    (num_entries,) = world.sum([float(len(values))])
    step = max(1, int(num_entries) // (256 * world.size))
    samples = world.gather(values[::step])
    bounds = np.zeros(world.size - 1, values.dtype)
    if samples and num_entries:  # rank 0 decides
        ranked = np.sort(np.concatenate(samples))
        bounds = ranked[len(ranked) * np.arange(1, world.size) // world.size]
    return world.broadcast(bounds)


def combined(ranges: Iterable[tuple[float, float, float]]) -> float | None:
    """Return the AUROC from (doubled pairs, positives, negatives) of ascending ranges of scores.

    Pairs count twice, so that ties are integers: exact up to 2**62 pairs (4e9 rows).
    """
    in_order: float = 0
    negatives_below: float = 0
    num_positives: float = 0
    for pairs, positives, negatives in ranges:
        in_order += pairs + 2 * positives * negatives_below
        negatives_below += negatives
        num_positives += positives
    return in_order / (2 * num_positives * negatives_below) if num_positives and negatives_below else None
