"""The kernels of encoder.cpp as differentiable functions. Float32 on CPU; the callers see to that.

N tokens, M queries, D dims, F hidden, H heads.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from recmill.kernels.native import run

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("count", "longest")),
        *((name, _POINTER) for name in ("offsets", "query_offsets", "places", "keys")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (*((name, _NUMBER) for name in ("D", "F", "H", "is_causal", "site")), ("dropout", ctypes.c_float))


class NativeRows:
    """Which tokens make a row, and which of them (None: all) are asked for."""

    def __init__(
        self, kernels: ctypes.CDLL, lengths_B: Tensor, keys_B: Tensor, longest: int, queries_M: Tensor | None = None
    ) -> None:
        self.kernels, self.queries_M = kernels, queries_M
        offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        asked = offsets if queries_M is None else torch.searchsorted(queries_M, offsets)
        self.num_queries = int(asked[-1])
        self._tensors = [offsets, asked, queries_M, keys_B]  # live as long
        assert all(tensor is None or tensor.is_contiguous() for tensor in self._tensors)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._struct = _Rows(len(lengths_B), longest, *addresses)

    @property
    def pointer(self) -> Any:
        return ctypes.byref(self._struct)


class NativeBlock(torch.autograd.Function):
    """A pre-norm transformer block: x [N, D] -> [M, D], those of the queries.

    `shape`: (heads, is causal, site of the first of its two dropouts, probability). `weights`: of the first
    norm (scale, shift), of queries, keys and values (weight, bias), of the way out, of the second norm, of two layers.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, rows: NativeRows, shape: tuple[int, bool, int, float], *weights: Tensor
    ) -> Tensor:
        heads, is_causal, site, probability = shape
        tokens, dim = x_ND.shape
        hidden, asked = len(weights[8]), rows.num_queries
        ctx.shape = _Shape(dim, hidden, heads, is_causal, site, probability)
        widths = [(asked, dim), (tokens, 2 * dim), (asked, heads), (asked, dim), (asked, dim), (asked, hidden)]
        is_kept = any(ctx.needs_input_grad)
        kept = [x_ND.new_empty(size if is_kept else 0) for size in widths]  # an empty one is at address 0
        out = x_ND.new_empty(asked, dim)
        x_ND = x_ND.contiguous()
        run(rows.kernels.encoder_block, *_pointers(ctx.shape, rows, weights), x_ND, _array(kept), out)
        ctx.rows = rows
        ctx.save_for_backward(x_ND, *kept, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x_ND, *rest = ctx.saved_tensors
        kept, weights = rest[:6], rest[6:]
        grad_x = torch.empty_like(x_ND)
        grads = x_ND.new_empty(sum(weight.numel() for weight in weights))
        first = _pointers(ctx.shape, ctx.rows, weights)
        run(ctx.rows.kernels.encoder_block_backward, *first, x_ND, _array(kept), grad.contiguous(), grad_x, grads)
        parts = grads.split([weight.numel() for weight in weights])
        shaped = (part.view_as(weight) for part, weight in zip(parts, weights, strict=True))
        return grad_x, None, None, *shaped


def _pointers(shape: _Shape, rows: NativeRows, weights: Any) -> tuple[Any, ...]:
    return ctypes.byref(shape), rows.pointer, _array(weights)


def _array(tensors: Any) -> Any:
    """Their addresses; who calls keeps the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class DropElements(torch.autograd.Function):
    """Dropout of x [N, D] at a site, as nn/dropout.py describes it."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: NativeRows, site: int, probability: float) -> Tensor:
        ctx.rows, ctx.where = rows, (x_ND.shape[1], site, probability)
        return _dropped(x_ND, rows, ctx.where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _dropped(grad, ctx.rows, ctx.where), None, None, None


def _dropped(x_ND: Tensor, rows: NativeRows, where: tuple[int, int, float]) -> Tensor:
    out = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    run(rows.kernels.drop_elements, rows.pointer, *where, x_ND.contiguous(), out)
    return out
