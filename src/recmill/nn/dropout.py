"""Dropout whose mask depends on row, layer and element, but not on how rows are batched.

torch's own dropout draws from one stream per process, so results would change with the world size.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from recmill.kernels.encoder import DropoutFunction
from recmill.kernels.layers import UsesKernels
from recmill.nn.rows import Rows, Tokens

log = logging.getLogger(__name__)

# 32-bit constants as signed numbers: the factors of Wellons' "lowbias32" hash, and the golden ratio.
_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_TWICE_GOLDEN = 0x3C6EF372


class RowDropout(UsesKernels, nn.Module):
    """Dropout number `site` of a network. Elements are counted from the end of a row."""

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability = probability if 1.0 - probability < 1.0 else 0.0  # so that thresholds fit into 32 bits
        self.site = site

    def forward(self, x_ND: Tensor, rows: Rows, tokens: Tokens = "all") -> Tensor:
        """Drop elements of x_ND, which holds all tokens of the rows or only their queries."""
        if not self.training or self.probability == 0.0:
            return x_ND
        dim = x_ND.shape[1]
        if (library := self.library_for(x_ND)) and tokens == "all" and dim % 16 == 0:
            return DropoutFunction.apply(library, x_ND, rows.for_kernels(), self.site, self.probability)
        row_N, from_end_N = rows.row_N, rows.from_end_N
        if tokens == "queries":
            row_N, from_end_N = row_N[rows.queries_M], from_end_N[rows.queries_M]
        keys_B = rows.folded_keys_B + _as_int32(self.site * _TWICE_GOLDEN)
        token_N = from_end_N.to(torch.int32) * _as_int32(dim * _GOLDEN)
        element_D = torch.arange(dim - 1, -1, -1, dtype=torch.int32, device=x_ND.device) * _GOLDEN
        counters = keys_B, row_N, token_N, element_D
        if _is_on_gpu(x_ND):
            return _RecomputedDropout.apply(_fused(self.probability, x_ND.device), x_ND, *counters)
        return _drop(x_ND, *counters, **_numbers(self.probability, x_ND.device))

    def of_vectors(self, x_BD: Tensor, row_keys_B: Tensor | None) -> Tensor:
        """Drop elements of rows that are one vector each."""
        if not isinstance(x_BD, Tensor) or not self.training:  # TorchRec's pipeline traces networks up to their tables
            return x_BD
        assert row_keys_B is not None, "dropout without keys of rows"
        return self(x_BD, Rows(torch.ones_like(row_keys_B), 1, row_keys_B[:0], row_keys_B, len(x_BD)))


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _as_int32(number: int) -> int:
    """Wrap a number as int32 tensors do."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@cache
def _numbers(probability: float, device: torch.device) -> dict[str, Tensor]:
    """Return the last arguments of `_drop`. Python numbers would be compiled in 64 bits, which gives other masks."""
    threshold = int((1.0 - probability) * 2.0**32) - (1 << 31)
    return {
        "threshold": torch.tensor(threshold, dtype=torch.int32, device=device),
        "scale": torch.tensor(1.0 / (1.0 - probability), device=device),
    }


class _RecomputedDropout(torch.autograd.Function):
    """Compute `drop(x_ND, *counters)`; backward computes the mask again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, drop: Callable[..., Tensor], x_ND: Tensor, *counters: Tensor) -> Tensor:
        ctx.drop = drop
        ctx.save_for_backward(*counters)
        return drop(x_ND.detach(), *counters)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Any, ...]:
        return None, ctx.drop(grad_ND, *ctx.saved_tensors), None, None, None, None


def _drop(
    x_ND: Tensor, keys_B: Tensor, row_N: Tensor, token_N: Tensor, element_D: Tensor, threshold: Tensor, scale: Tensor
) -> Tensor:
    """Drop elements of x_ND whose hash of key and position is not below `threshold`. Keys and positions are int32."""
    bits_ND = _hash((_hash(keys_B)[row_N] + token_N)[:, None] + element_D)
    return x_ND * ((bits_ND < threshold) * scale)


@cache
def _fused(probability: float, device: torch.device) -> Callable[..., Tensor]:
    """Return `_drop` as one compiled kernel; if this machine cannot compile it, log why and return it as it is."""
    options = _numbers(probability, device)
    compiled = torch.compile(_drop, dynamic=True)
    x_ND, zeros = torch.ones(5, 16, device=device), partial(torch.zeros, dtype=torch.int32, device=device)
    trial = x_ND, zeros(3), zeros(5).long(), zeros(5), zeros(16)  # equal sizes would be compiled as one
    try:
        compiled(*trial, **options)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        log.warning("dropout takes 30 GPU kernels instead of one, because torch.compile failed: %s", reason)
        return partial(_drop, **options)
    return partial(compiled, **options)


def _hash(x: Tensor) -> Tensor:
    """Return 32 random-looking bits per int32. The masks make torch's arithmetic shifts logical."""
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x *= _M1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _M2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
