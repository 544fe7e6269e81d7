"""The loss of next items, and the one that looks at a few items of a large catalogue only.

M queries, K negatives, I answers and negatives, D dims.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Loss:
    """`softmax`: cross-entropy over the catalogue, with `smoothing` of the target. `gbce`: see below."""

    name: Literal["softmax", "gbce"] = "softmax"
    smoothing: float = 0.0
    negatives: int = 0
    calibration: float = 0.0

    def power(self, num_items: int) -> float:
        """Of the answer's probability (Petrov & Macdonald, 2023): from 1 without calibration to the rate of sampling.

        It undoes the overconfidence that comes from seeing few negatives.
        """
        rate = min(1.0, self.negatives / max(1, num_items - 1))  # drawn with repeats, there may be more than items
        return rate * (self.calibration * (1 - 1 / rate) + 1 / rate)


SOFTMAX = Loss()


def gbce_sum(
    asked_MD: Tensor, head_ID: Tensor, bias_I: Tensor, items_I: Tensor, weights_M: Tensor, power: float
) -> Tensor:
    """Sum of weights * mean of -log p(answer)^power and each -log(1 - p(negative)).

    The first M of the items are the answers. All queries have the negatives in common; one that is the answer counts
    for nothing.
    """
    count = len(weights_M)
    answers_M, negatives_K = items_I[:count], items_I[count:]
    positive_M = (asked_MD * head_ID[:count]).sum(1) + bias_I[:count]
    negative_MK = torch.addmm(bias_I[count:], asked_MD, head_ID[count:].t()).float()
    is_other_MK = answers_M[:, None] != negatives_K
    losses_M = (F.softplus(negative_MK) * is_other_MK).sum(1) - power * F.logsigmoid(positive_M.float())
    return (losses_M * weights_M).sum() / (1 + len(negatives_K))
