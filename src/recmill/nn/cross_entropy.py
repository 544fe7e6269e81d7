"""Cross-entropy over a catalogue, without holding the logits of all queries at once.

Chunks of logits stay in the cache. M queries, V items, D dims.
"""

from typing import Any

import torch
from torch import Tensor

from recmill.kernels.layers import can_process
from recmill.kernels.library import KernelLibrary

_LOGITS_PER_CHUNK = 1 << 20  # 4 MB


def cross_entropy_sum(
    queries_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    answers_M: Tensor,
    weights_M: Tensor,
    smoothing: float = 0.0,
    library: KernelLibrary | None = None,
) -> Tensor:
    """Return the sum of weights * cross_entropy(queries weight' + bias, answers), in float32."""
    with torch.autocast(queries_MD.device.type, enabled=False):
        total: Tensor = _CrossEntropySum.apply(
            smoothing, library, queries_MD.float(), weight_VD.float(), bias_V.float(), answers_M, weights_M
        )
    return total


class _CrossEntropySum(torch.autograd.Function):
    """Computes the gradients in forward, up to one factor, so that each logit is computed once."""

    @staticmethod
    def forward(ctx: Any, smoothing: float, library: KernelLibrary | None, *inputs: Tensor) -> Tensor:
        queries_MD, weight_VD, bias_V, *_, weights_M = inputs
        grads = torch.empty_like(queries_MD), torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
        ctx.save_for_backward(*grads)
        if library is not None and queries_MD.shape[1] % 16 == 0 and can_process(queries_MD):
            losses_M = torch.empty_like(weights_M)
            contiguous = queries_MD.contiguous(), weight_VD.contiguous(), *inputs[2:]
            sizes = len(queries_MD), *weight_VD.shape
            library.call("catalogue_loss", *contiguous, *sizes, smoothing, losses_M, *grads)
            return losses_M.sum()
        return _sum_in_chunks(inputs, smoothing, grads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *(saved * grad for saved in ctx.saved_tensors), None, None


def _sum_in_chunks(inputs: tuple[Tensor, ...], smoothing: float, grads: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of the weighted losses, and fill `grads` by queries, weight and bias."""
    queries_MD, weight_VD, bias_V, answers_M, weights_M = inputs
    by_queries_MD, by_weight_VD, by_bias_V = grads
    total = queries_MD.new_zeros(())
    step = max(1, _LOGITS_PER_CHUNK // len(weight_VD))
    for start in range(0, len(queries_MD), step):
        chunk = slice(start, start + step)
        logits = torch.addmm(bias_V, queries_MD[chunk], weight_VD.t())
        losses, by_logits = _softmax_gradient(logits, answers_M[chunk], weights_M[chunk], smoothing)
        total += losses.sum()
        torch.mm(by_logits, weight_VD, out=by_queries_MD[chunk])
        by_weight_VD.addmm_(by_logits.t(), queries_MD[chunk])
        by_bias_V.add_(by_logits.sum(0))
    return total


def _softmax_gradient(
    logits_MV: Tensor, answers_M: Tensor, weights_M: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted losses [M] and their gradient, which overwrites the logits."""
    answers_M1, weights_M1 = answers_M[:, None], weights_M[:, None]
    # log p = logit - norm; the loss is -(1 - smoothing) log p[answer] - smoothing mean(log p)
    norm_M1 = logits_MV.logsumexp(1, keepdim=True)
    target_M1 = (1 - smoothing) * logits_MV.gather(1, answers_M1)
    if smoothing:
        target_M1 += smoothing * logits_MV.mean(1, keepdim=True)
    losses_M = ((norm_M1 - target_M1) * weights_M1)[:, 0]
    gradient = logits_MV.sub_(norm_M1).exp_()
    if smoothing:
        gradient -= smoothing / logits_MV.shape[1]
    gradient.scatter_add_(1, answers_M1, gradient.new_full(answers_M1.shape, smoothing - 1))
    return losses_M, gradient.mul_(weights_M1)
