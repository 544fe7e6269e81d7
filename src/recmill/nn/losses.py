"""The losses of sequence models. M queries, K negatives, I = M + K items, D dims."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Loss:
    """`softmax`: cross-entropy over the catalogue. `gbce`: `gbce_sum` over few sampled items."""

    name: Literal["softmax", "gbce"] = "softmax"
    smoothing: float = 0.0
    negatives: int = 0
    calibration: float = 0.0

    def power(self, num_items: int) -> float:
        """Return gBCE's exponent of the answer's probability (Petrov & Macdonald, 2023).

        It lowers overconfidence: 1 without calibration, the sampling rate with a calibration of 1.
        """
        rate = min(1.0, self.negatives / max(1, num_items - 1))  # negatives may repeat and outnumber the items
        return rate * (self.calibration * (1 - 1 / rate) + 1 / rate)


def gbce_sum(
    queries_MD: Tensor, head_ID: Tensor, bias_I: Tensor, items_I: Tensor, weights_M: Tensor, power: float
) -> Tensor:
    """Return the sum of weights * mean of -log p(answer)^power and each -log(1 - p(negative)).

    The first M items are the answers, the others negatives that all queries share. A query skips a
    negative that is its own answer.
    """
    num_queries = len(weights_M)
    answers_M, negatives_K = items_I[:num_queries], items_I[num_queries:]
    positive_M = (queries_MD * head_ID[:num_queries]).sum(1) + bias_I[:num_queries]
    negative_MK = torch.addmm(bias_I[num_queries:], queries_MD, head_ID[num_queries:].t()).float()
    is_other_MK = answers_M[:, None] != negatives_K
    losses_M = (F.softplus(negative_MK) * is_other_MK).sum(1) - power * F.logsigmoid(positive_M.float())
    return (losses_M * weights_M).sum() / (1 + len(negatives_K))
