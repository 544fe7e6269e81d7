"""Next item: cross-entropy over the catalogue at each query; HR, NDCG and MRR by ranking protocol.

The capitals at the end of an array's name are its axes: B users, V items, C candidates.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from recmill.batch import RankingBatch, SequenceBatch
from recmill.config.sections import EvalSection
from recmill.metrics.binary import Values
from recmill.metrics.ranking import Popularity, RankingMetrics, num_negatives, sampled
from recmill.registry import own_metrics


def loss_sum(network: Callable[..., Tensor], batch: SequenceBatch) -> Tensor:
    """Return the loss that the network computes itself, because the logits of all queries would not fit."""
    return network(*batch.inputs())


def new_metrics(section: EvalSection, resamples: int = 0, train_counts: np.ndarray | None = None) -> RankingMetrics:
    """Create ranking metrics; `resamples` of the users give intervals, `train_counts` add the popularity baseline."""
    popularity = None if train_counts is None else Popularity(train_counts)
    own = own_metrics(section.metrics)
    return RankingMetrics(list(section.protocols), list(section.ks), resamples, popularity, own)


def headline(values: Values) -> str:
    """Return the name of NDCG, of the first protocol at the last cut-off."""
    first = next(iter(values)).split("/")[0]
    return [name for name in values if name.startswith(f"{first}/ndcg@")][-1]


def update(metrics: RankingMetrics, logits_BV: Tensor, batch: RankingBatch) -> None:
    """Rank the targets by the model and, if `metrics` has the baseline, the same targets by popularity."""
    is_real_B = (batch.weights_M > 0).cpu().numpy()
    answers_B = batch.answers_M.cpu().numpy()
    answers_B1 = batch.answers_M[:, None] - 1
    target_B1 = logits_BV.gather(1, answers_B1)
    popularity, of_popularity = metrics.popularity, metrics.of_popularity
    names = sampled(metrics.protocols)
    columns = batch.negatives_BC.split([num_negatives(protocol) for protocol in names], dim=1)
    for protocol, negatives_BC in zip(names, columns, strict=True):
        others_BC = logits_BV.gather(1, negatives_BC - 1)
        metrics.update(protocol, (~(others_BC < target_B1)).sum(1).cpu().numpy()[is_real_B])
        if popularity and of_popularity:
            of_popularity.update(protocol, popularity.ranks_among(answers_B, negatives_BC.cpu().numpy())[is_real_B])
    if "full" in metrics.protocols:
        metrics.update("full", full_ranks(logits_BV, target_B1, answers_B1, batch).cpu().numpy()[is_real_B])
        if popularity and of_popularity:
            seen = batch.seen_rows.cpu().numpy(), batch.seen_items.cpu().numpy()
            of_popularity.update("full", popularity.full_ranks(answers_B, *seen)[is_real_B])


def full_ranks(logits_BV: Tensor, target_B1: Tensor, answers_B1: Tensor, batch: RankingBatch) -> Tensor:
    """Count the items that the user has not seen and that score at least as high as the target."""
    beats_BV = ~(logits_BV < target_B1)  # so a NaN counts against the model
    beats_BV[batch.seen_rows, batch.seen_items - 1] = False
    beats_BV.scatter_(1, answers_B1, torch.zeros_like(answers_B1, dtype=torch.bool))
    return beats_BV.sum(1)
