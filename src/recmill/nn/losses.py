"""The losses of sequence models. M queries, K negatives, I = M + K items, D dims."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Loss:
    """`softmax`: cross-entropy over the catalogue. The others: `sampled_sum` over few sampled items.

    `excludes_seen`, for `softmax`: an answer is not compared with the items that its query attends to.
    """

    name: Literal["softmax", "sampled_softmax", "gbce"] = "softmax"
    smoothing: float = 0.0
    excludes_seen: bool = False
    negatives: int = 0
    calibration: float = 0.0

    def power(self, num_items: int) -> float:
        """Return gBCE's exponent of the answer's probability (Petrov & Macdonald, 2023).

        It lowers overconfidence: 1 without calibration, the sampling rate with a calibration of 1.
        """
        rate = min(1.0, self.negatives / max(1, num_items - 1))  # negatives may repeat and outnumber the items
        return rate * (self.calibration * (1 - 1 / rate) + 1 / rate)


def sampled_sum(
    loss: Loss, queries_MD: Tensor, head_ID: Tensor, bias_I: Tensor, items_I: Tensor, weights_M: Tensor, num_items: int
) -> Tensor:
    """Return the sum of weights * losses of the queries, scored for few items.

    The first M items are the answers, the others negatives that all queries share. A query skips a
    negative that is its own answer. gBCE is the mean of -log p(answer)^power and each -log(1 - p(negative)); sampled
    softmax is the cross-entropy over the answer and the negatives, which need no correction because they are uniform.
    """
    num_queries = len(weights_M)
    answers_M, negatives_K = items_I[:num_queries], items_I[num_queries:]
    positive_M = ((queries_MD * head_ID[:num_queries]).sum(1) + bias_I[:num_queries]).float()
    negative_MK = torch.addmm(bias_I[num_queries:], queries_MD, head_ID[num_queries:].t()).float()
    is_own_MK = answers_M[:, None] == negatives_K
    if loss.name == "sampled_softmax":
        others_M = negative_MK.masked_fill(is_own_MK, torch.finfo(torch.float32).min).logsumexp(1)
        losses_M = F.softplus(others_M - positive_M)
        return (losses_M * weights_M).sum()
    negative_M = F.softplus(negative_MK).masked_fill(is_own_MK, 0.0).sum(1)
    losses_M = negative_M - loss.power(num_items) * F.logsigmoid(positive_M)
    return (losses_M * weights_M).sum() / (1 + len(negatives_K))
