"""Cross-entropy over a catalogue without ever holding all logits: chunks that stay in the cache, forward and backward.

M queries, V items, D dims.
"""

from typing import Any

import torch
from torch import Tensor

_LOGITS_AT_ONCE = 1 << 20  # 4 MB


def cross_entropy_sum(
    asked_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, answers_M: Tensor, weights_M: Tensor, smoothing: float = 0.0
) -> Tensor:
    """sum of weights * cross_entropy(asked weight' + bias, answers, label_smoothing=smoothing), in float32."""
    with torch.autocast(asked_MD.device.type, enabled=False):
        total: Tensor = _CrossEntropySum.apply(
            asked_MD.float(), weight_VD.float(), bias_V.float(), answers_M, weights_M, smoothing
        )
    return total


class _CrossEntropySum(torch.autograd.Function):
    """Of a sum the gradients are known in forward but for one factor: each chunk's logits are made once."""

    @staticmethod
    def forward(
        ctx: Any,
        asked_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        answers_M: Tensor,
        weights_M: Tensor,
        smooth: float,
    ) -> Tensor:
        items = len(weight_VD)
        total = asked_MD.new_zeros(())
        grads = torch.empty_like(asked_MD), torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
        step = max(1, _LOGITS_AT_ONCE // items)
        for start in range(0, len(asked_MD), step):
            rows = slice(start, start + step)
            asked, answers, weights = asked_MD[rows], answers_M[rows, None], weights_M[rows, None]
            logits = torch.addmm(bias_V, asked, weight_VD.t())
            # log p = logit - norm; the loss is -(1 - smooth) log p[answer] - smooth mean(log p)
            norm = logits.logsumexp(1, keepdim=True)
            wanted = (1 - smooth) * logits.gather(1, answers)
            if smooth:
                wanted += smooth * logits.mean(1, keepdim=True)
            total += ((norm - wanted) * weights).sum()
            by_logits = logits.sub_(norm).exp_()
            if smooth:
                by_logits -= smooth / items
            by_logits.scatter_add_(1, answers, by_logits.new_full(answers.shape, smooth - 1))
            by_logits *= weights
            torch.mm(by_logits, weight_VD, out=grads[0][rows])
            grads[1].addmm_(by_logits.t(), asked)
            grads[2].add_(by_logits.sum(0))
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *(saved * grad for saved in ctx.saved_tensors), None, None, None
