"""Exact area under the ROC curve."""

import numpy as np


def auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Share of (positive, negative) pairs in the right order; a tie counts half. None if a class is missing."""
    labels = labels.astype(bool)
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    order = np.argsort(scores, kind="stable")
    ranked, hits = scores[order], labels[order]
    group_ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    positives_up_to = np.cumsum(hits, dtype=np.int64)[group_ends]
    in_group = np.diff(positives_up_to, prepend=0)
    negatives_up_to = (group_ends + 1) - positives_up_to
    negatives_in_group = np.diff(negatives_up_to, prepend=0)
    # Twice the number of pairs, so that ties stay whole numbers: exact up to 2**62 pairs (4e9 rows).
    doubled_pairs = np.sum(in_group * (2 * negatives_up_to - negatives_in_group), dtype=np.int64)
    return int(doubled_pairs) / (2 * positives * negatives)
