"""Retrieval: softmax over the items of a global batch, corrected for their frequency; HR, NDCG and MRR among all items.

R requests, C items, D dims.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from recmill.batch import ItemBatch, RetrievalBatch
from recmill.config.sections import EvalSection
from recmill.metrics.binary import Values
from recmill.metrics.ranking import RankingMetrics
from recmill.registry import own_metrics

PROTOCOL = "all"  # among all items of the dataset, also those that a user has had before
_ITEMS_AT_ONCE = 1 << 13


def loss_sum(network: Callable[..., Tensor], batch: RetrievalBatch) -> Tensor:
    """Return the sum of weights * cross-entropy, of scores - log(probability that the item is in a batch)."""
    scores_RC = network(*batch.inputs()) - batch.log_inclusion_C
    losses_R = F.cross_entropy(scores_RC, batch.answers_R, reduction="none")
    return (losses_R * batch.weights_R).sum()


class RetrievalMetrics(RankingMetrics):
    """Also holds the vectors of all items: first their blocks, then one tensor."""

    item_vectors: Sequence[Tensor] = ()

    def items_CD(self) -> Tensor:
        if len(self.item_vectors) > 1:
            self.item_vectors = [torch.cat([*self.item_vectors])]
        return self.item_vectors[0]


def new_metrics(section: EvalSection, resamples: int = 0) -> RetrievalMetrics:
    return RetrievalMetrics([PROTOCOL], list(section.ks), resamples, own=own_metrics(section.metrics))


def headline(values: Values) -> str:
    """Return the name of NDCG at the last cut-off."""
    return [name for name in values if name.startswith(f"{PROTOCOL}/ndcg@")][-1]


def update(metrics: RetrievalMetrics, vectors: Tensor, batch: RetrievalBatch) -> None:
    """Keep the vectors of items. Count for each request the other items that score at least as high as its own."""
    if isinstance(batch, ItemBatch):
        metrics.item_vectors = [*metrics.item_vectors, vectors]
        return
    ranks_R = _ranks(vectors, metrics.items_CD(), batch.answers_R)
    metrics.update(PROTOCOL, ranks_R.cpu().numpy()[(batch.weights_R > 0).cpu().numpy()])


def _ranks(requests_RD: Tensor, items_CD: Tensor, answers_R: Tensor) -> Tensor:
    """Return the rank (0: best) of each answer. Memory holds the scores of one block of items at a time.

    Scores are computed twice: a score from another product might differ in its last bit, and no longer be a tie.
    """
    own_R1 = torch.zeros(len(requests_RD), 1, dtype=requests_RD.dtype, device=requests_RD.device)
    for start, scores_RC in score_blocks(requests_RD, items_CD):
        places_R1 = answers_R[:, None] - start
        is_here_R1 = (places_R1 >= 0) & (places_R1 < scores_RC.shape[1])
        own_R1 = torch.where(is_here_R1, scores_RC.gather(1, places_R1.clamp(0, scores_RC.shape[1] - 1)), own_R1)
    ranks_R = torch.full_like(answers_R, -1)  # the answer itself is counted below
    for _, scores_RC in score_blocks(requests_RD, items_CD):
        ranks_R += (~(scores_RC < own_R1)).sum(1)  # so a NaN counts against the model
    return ranks_R


def score_blocks(requests_RD: Tensor, items_CD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the dot products of all requests with some items at a time, and the index of the first of these items."""
    for start in range(0, len(items_CD), _ITEMS_AT_ONCE):
        yield start, requests_RD @ items_CD[start : start + _ITEMS_AT_ONCE].t()


def best_items(requests_RD: Tensor, items_CD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the K largest dot products of each request, and the indices of their items; of equal ones, the lowest.

    `topk` returns equal values in any order, so it gets integers that are all different: the bits of a dot product,
    then the index.
    """
    best_RK = torch.empty((len(requests_RD), 0), dtype=torch.int64)
    for start, scores_RC in score_blocks(requests_RD, items_CD):
        indices_C = torch.arange(start, start + scores_RC.shape[1])
        keys_RC = (_reordered(scores_RC.view(torch.int32)).long() << 32) - indices_C
        keys_RC = torch.cat([best_RK, keys_RC], dim=1)
        best_RK = keys_RC.topk(min(k, keys_RC.shape[1]), dim=1).values
    indices_RK = -best_RK & 0xFFFFFFFF
    return _reordered(((best_RK + indices_RK) >> 32).int()).view(torch.float32), indices_RK


def _reordered(bits: Tensor) -> Tensor:
    """Return integers in the order of the floats that have these bits, or these bits for such integers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
