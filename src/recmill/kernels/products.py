"""Float32 matrix products on CPU, by the faster of torch's two libraries.

torch calls MKL, which has no AVX-512 code for CPUs of AMD. oneDNN has: on a Zen 5 core it multiplies with a layer of
400 x 400 in 0.45 of the time.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recmill.hardware.cpu import is_amd_with_avx512
from recmill.kernels.layers import can_process

_WORTH_ONEDNN = 1 << 21  # multiplications; below, MKL is as fast, and oneDNN takes 10 us longer to start


@cache
def _prefers_onednn() -> bool:
    """Ask for the CPU's name, not for the time: a resumed run must choose as before to compute the same bits."""
    return is_amd_with_avx512() and torch.backends.mkldnn.is_available()


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right + bias. `can_process` holds for the matrices."""
    if _prefers_onednn() and left.numel() * right.shape[1] >= _WORTH_ONEDNN:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
        return out
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return grad' @ x, contiguous. For few inputs, the transposed product is up to 7 times faster."""
    if x.shape[1] > 128:
        return product(grad.t(), x)
    shape, transposed = (grad.shape[1], x.shape[1]), product(x.t(), grad)
    # A single row or column is contiguous with any strides, but DDP warns if they are not those of a new matrix.
    return transposed.view(shape) if 1 in shape else transposed.t().contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight' + bias, for tensors of any kind, as torch's function does."""
    is_compiled = torch.compiler.is_compiling()  # by torch.compile, which has products of its own
    if can_process(x) and x.dim() == 2 and not is_compiled and _prefers_onednn():
        out: Tensor = _Linear.apply(x, weight, bias)
        return out
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(x, grad), grad.sum(0) if ctx.needs_input_grad[2] else None
