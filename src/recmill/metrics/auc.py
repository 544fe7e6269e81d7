"""Exact area under the ROC curve, of one process or of many; no process holds more than its share of the scores."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recmill.world import World

_SAMPLES_PER_RANK = 256


def auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Share of (positive, negative) pairs in the right order; a tie counts half. None if a class is missing."""
    labels = labels.astype(bool)
    positives, negatives = np.sort(scores[labels]), np.sort(scores[~labels])  # without indices: 10 times faster
    if not len(positives) or not len(negatives):
        return None
    below = np.searchsorted(negatives, positives, "left")
    not_above = np.searchsorted(negatives, positives, "right")
    # Twice the number of pairs, so that ties stay whole numbers: exact up to 2**62 pairs (4e9 rows).
    return int(below.sum() + not_above.sum()) / (2 * len(positives) * len(negatives))


def auroc_over_ranks(scores: np.ndarray, labels: np.ndarray, world: "World") -> float | None:
    """The same of all ranks' float32 scores together. All ranks take part and all get the value.

    Each rank gets one range of scores from all others, as (score, positives, negatives): equal scores are one entry
    a rank, and never in two ranges.
    """
    if world.size == 1:
        return auroc(scores, labels)
    columns = _tally(scores, labels.astype(bool))
    ends = np.searchsorted(columns[0], _cuts(columns[0], world), "left")
    received = [np.concatenate(world.exchange(np.split(column, ends))) for column in columns]
    order = np.argsort(received[0], kind="stable")
    values, positives, negatives = (column[order] for column in received)
    negatives_up_to = np.cumsum(negatives)
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    pairs = 0
    if len(values):
        in_group = np.add.reduceat(positives, starts)
        up_to = np.append(negatives_up_to[starts[1:] - 1], negatives_up_to[-1])
        pairs = int(np.sum(in_group * (up_to + np.append(0, up_to[:-1]))))  # doubled
    parts = world.gather((pairs, int(positives.sum()), int(negatives.sum())))
    return world.broadcast(_joined(parts) if parts else None)


def _joined(parts: list[tuple[int, int, int]]) -> float | None:
    """(doubled pairs, positives, negatives) of ranges of rising scores; whole numbers of any size."""
    doubled = negatives_below = all_positives = 0
    for pairs, positives, negatives in parts:
        doubled += pairs + 2 * positives * negatives_below
        negatives_below, all_positives = negatives_below + negatives, all_positives + positives
    return doubled / (2 * all_positives * negatives_below) if all_positives and negatives_below else None


def _tally(scores: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Different scores, rising, and the number of positives and of negatives that have each."""
    ranked, positives = np.sort(scores), np.sort(scores[labels])
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)])
    values = ranked[ends]
    rows = np.diff(ends, prepend=-1)
    hits = np.diff(np.searchsorted(positives, values, "right"), prepend=0)
    return [values, hits, rows - hits]


def _cuts(values: np.ndarray, world: "World") -> np.ndarray:
    """size - 1 scores between which ranks get about equally many entries, by every so-manieth entry of each."""
    (entries,) = world.sum([float(len(values))])
    step = max(1, int(entries) // (_SAMPLES_PER_RANK * world.size))
    samples = world.gather(values[::step])
    cuts: np.ndarray = np.empty(0)
    if samples is not None:  # rank 0 chooses
        ranked = np.sort(np.concatenate(samples))
        places = [len(ranked) * part // world.size for part in range(1, world.size)]
        cuts = ranked[places] if len(ranked) else np.zeros(world.size - 1, values.dtype)
    return world.broadcast(cuts)
