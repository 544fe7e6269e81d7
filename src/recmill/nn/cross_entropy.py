"""Cross-entropy over a catalogue, without holding the logits of all queries at once.

M queries, V items, D dims, N tokens, T tokens of the longest row; C queries in a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recmill.kernels.layers import can_process
from recmill.kernels.library import KernelLibrary

# On CPU 4 MB, which stay in the cache. A GPU needs large chunks, because each costs it a dozen kernels: 256 MB are 67
# queries of a million items; softmax holds up to three times as much for a moment.
_LOGITS_PER_CHUNK_ON_CPU = 1 << 20
_LOGITS_PER_CHUNK_ON_GPU = 1 << 26


class Seen(NamedTuple):
    """The items that each query sees: tokens[begin:end], at most `longest`, counted from 1; others are no items."""

    tokens_N: Tensor
    begins_M: Tensor
    ends_M: Tensor
    longest: int

    def of_chunk(self, chunk: slice, num_items: int, answers_C1: Tensor) -> Tensor:
        """Return the indices [C, T] of the seen items; an answer fills the rest of its row."""
        begins_C1, ends_C1 = self.begins_M[chunk, None], self.ends_M[chunk, None]
        places_CT = begins_C1 + torch.arange(self.longest, device=begins_C1.device)
        items_CT = self.tokens_N[places_CT.clamp(max=len(self.tokens_N) - 1)] - 1
        is_seen_CT = (places_CT < ends_C1) & (items_CT >= 0) & (items_CT < num_items)
        return torch.where(is_seen_CT, items_CT, answers_C1)


def cross_entropy_sum(
    queries_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    answers_M: Tensor,
    weights_M: Tensor,
    smoothing: float = 0.0,
    library: KernelLibrary | None = None,
    seen: Seen | None = None,
) -> Tensor:
    """Return the sum of weights * cross_entropy(queries weight' + bias, answers), in float32.

    Without smoothing, items that a query has `seen` get no probability, except its answer.
    """
    assert not (seen and smoothing)
    inputs = queries_MD.float(), weight_VD.float(), bias_V.float(), answers_M, weights_M
    with torch.autocast(queries_MD.device.type, enabled=False):
        return _CrossEntropySum.apply(smoothing, library, seen, *inputs)


class _CrossEntropySum(torch.autograd.Function):
    """Computes the gradients in forward, up to one factor, so that each logit is computed once."""

    @staticmethod
    def forward(
        ctx: Any, smoothing: float, library: KernelLibrary | None, seen: Seen | None, *inputs: Tensor
    ) -> Tensor:
        queries_MD, weight_VD, bias_V, _, weights_M = inputs
        grads = torch.empty_like(queries_MD), torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
        ctx.save_for_backward(*grads)
        if library is None or queries_MD.shape[1] % 16 or not can_process(queries_MD):
            return _sum_in_chunks(inputs, smoothing, seen, grads)
        losses_M = torch.empty_like(weights_M)
        contiguous = (value.contiguous() for value in inputs)
        sizes = len(queries_MD), *weight_VD.shape
        seen_arrays = [value.contiguous() for value in seen[:3]] if seen else [None] * 3
        library.call("catalogue_loss", *contiguous, *sizes, smoothing, *seen_arrays, losses_M, *grads)
        return losses_M.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, *(saved * grad for saved in ctx.saved_tensors), None, None


def queries_per_chunk(num_items: int, device: torch.device) -> int:
    """Return how many queries share a chunk; at least one, however many items there are."""
    logits = _LOGITS_PER_CHUNK_ON_CPU if device.type == "cpu" else _LOGITS_PER_CHUNK_ON_GPU
    return max(1, logits // num_items)


def _sum_in_chunks(
    inputs: tuple[Tensor, ...], smoothing: float, seen: Seen | None, grads: tuple[Tensor, ...]
) -> Tensor:
    """Return the sum of the weighted losses, and fill `grads`: of the queries, the weight and the bias.

    With log p = logit - norm, a loss is -(1 - smoothing) log p[answer] - smoothing mean(log p).
    """
    queries_MD, weight_VD, bias_V, answers_M, weights_M = inputs
    grad_queries_MD, grad_weight_VD, grad_bias_V = grads
    num_items = len(weight_VD)
    total = queries_MD.new_zeros(())
    step = queries_per_chunk(num_items, queries_MD.device)
    for start in range(0, len(queries_MD), step):
        chunk = slice(start, start + step)
        answers_C1, weights_C1 = answers_M[chunk, None], weights_M[chunk, None]
        logits_CV = torch.addmm(bias_V, queries_MD[chunk], weight_VD.t())
        if seen:
            of_answers_C1 = logits_CV.gather(1, answers_C1)
            logits_CV.scatter_(1, seen.of_chunk(chunk, num_items, answers_C1), -torch.inf)
            logits_CV.scatter_(1, answers_C1, of_answers_C1)
        norm_C1 = logits_CV.logsumexp(1, keepdim=True)
        target_C1 = (1 - smoothing) * logits_CV.gather(1, answers_C1)
        if smoothing:
            target_C1 += smoothing * logits_CV.mean(1, keepdim=True)
        total += ((norm_C1 - target_C1) * weights_C1).sum()
        grad_CV = logits_CV.sub_(norm_C1).exp_()  # overwrites the logits
        if smoothing:
            grad_CV -= smoothing / num_items
        grad_CV.scatter_add_(1, answers_C1, grad_CV.new_full(answers_C1.shape, smoothing - 1)).mul_(weights_C1)
        torch.mm(grad_CV, weight_VD, out=grad_queries_MD[chunk])
        grad_weight_VD.addmm_(grad_CV.t(), queries_MD[chunk])
        grad_bias_V.add_(grad_CV.sum(0))
    return total
