"""Retrieval: softmax over the items of a global batch, corrected for their frequency; HR, NDCG and MRR among all items.

R requests, C items.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from recmill.batch import RetrievalBatch
from recmill.config.sections import EvalSection
from recmill.metrics.binary import Values
from recmill.metrics.ranking import RankingMetrics
from recmill.registry import own_metrics

PROTOCOL = "all"  # among all items of the dataset, also those that a user has had before


def loss_sum(network: Callable[..., Tensor], batch: RetrievalBatch) -> Tensor:
    """Return the sum of weights * cross-entropy, of scores - log(probability that the item is in a batch)."""
    scores_RC = network(*batch.inputs()) - batch.log_inclusion_C
    losses_R = F.cross_entropy(scores_RC, batch.answers_R, reduction="none")
    return (losses_R * batch.weights_R).sum()


def new_metrics(section: EvalSection, resamples: int = 0) -> RankingMetrics:
    return RankingMetrics([PROTOCOL], list(section.ks), resamples, own=own_metrics(section.metrics))


def headline(values: Values) -> str:
    """Return the name of NDCG at the last cut-off."""
    return [name for name in values if name.startswith(f"{PROTOCOL}/ndcg@")][-1]


def update(metrics: RankingMetrics, scores_RC: Tensor, batch: RetrievalBatch) -> None:
    """Count for each request the other items that score at least as high as its own."""
    own_R1 = batch.answers_R[:, None]
    is_ahead_RC = ~(scores_RC < scores_RC.gather(1, own_R1))  # so a NaN counts against the model
    ranks_R = is_ahead_RC.scatter(1, own_R1, False).sum(1)
    metrics.update(PROTOCOL, ranks_R.cpu().numpy()[(batch.weights_R > 0).cpu().numpy()])
