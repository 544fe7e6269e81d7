"""Cross-entropy over a catalogue without ever holding all logits: chunks that stay in the cache, forward and backward.

M queries, V items, D dims.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from recmill.kernels.functions import fits
from recmill.kernels.native import run

_LOGITS_AT_ONCE = 1 << 20  # 4 MB


def cross_entropy_sum(
    asked_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    answers_M: Tensor,
    weights_M: Tensor,
    smoothing: float = 0.0,
    kernels: ctypes.CDLL | None = None,
) -> Tensor:
    """sum of weights * cross_entropy(asked weight' + bias, answers, label_smoothing=smoothing), in float32."""
    with torch.autocast(asked_MD.device.type, enabled=False):
        total: Tensor = _CrossEntropySum.apply(
            asked_MD.float(), weight_VD.float(), bias_V.float(), answers_M, weights_M, smoothing, kernels
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
        kernels: ctypes.CDLL | None,
    ) -> Tensor:
        items = len(weight_VD)
        total = asked_MD.new_zeros(())
        grads = torch.empty_like(asked_MD), torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
        if asked_MD.shape[1] % 16 == 0 and fits(kernels, asked_MD):
            assert kernels is not None
            losses, sizes = torch.empty_like(weights_M), (*asked_MD.shape[:1], *weight_VD.shape)
            inputs = asked_MD.contiguous(), weight_VD.contiguous(), bias_V, answers_M, weights_M
            run(kernels.catalogue_loss, *inputs, *sizes, smooth, losses, *grads)
            ctx.save_for_backward(*grads)
            return losses.sum()
        step = max(1, _LOGITS_AT_ONCE // items)
        for start in range(0, len(asked_MD), step):
            rows = slice(start, start + step)
            logits = torch.addmm(bias_V, asked_MD[rows], weight_VD.t())
            losses, by_logits = _softmax_gradient(logits, answers_M[rows], weights_M[rows], smooth)
            total += losses.sum()
            torch.mm(by_logits, weight_VD, out=grads[0][rows])
            grads[1].addmm_(by_logits.t(), asked_MD[rows])
            grads[2].add_(by_logits.sum(0))
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *(saved * grad for saved in ctx.saved_tensors), None, None, None, None


def _softmax_gradient(logits_MV: Tensor, answers_M: Tensor, weights_M: Tensor, smooth: float) -> tuple[Tensor, Tensor]:
    """The weighted losses [M], and their gradient in place of the logits."""
    answers_M1, weights_M1, items = answers_M[:, None], weights_M[:, None], logits_MV.shape[1]
    # log p = logit - norm; the loss is -(1 - smooth) log p[answer] - smooth mean(log p)
    norm_M1 = logits_MV.logsumexp(1, keepdim=True)
    wanted_M1 = (1 - smooth) * logits_MV.gather(1, answers_M1)
    if smooth:
        wanted_M1 += smooth * logits_MV.mean(1, keepdim=True)
    losses = ((norm_M1 - wanted_M1) * weights_M1)[:, 0]
    gradient = logits_MV.sub_(norm_M1).exp_()
    if smooth:
        gradient -= smooth / items
    gradient.scatter_add_(1, answers_M1, gradient.new_full(answers_M1.shape, smooth - 1))
    return losses, gradient.mul_(weights_M1)
