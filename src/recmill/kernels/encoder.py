"""Differentiable functions over the kernels of encoder.cpp: a transformer block, and dropout.

Inputs are float32 tensors on CPU; the callers ensure that. N tokens, M queries, D dims, B rows.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recmill.kernels.library import KernelLibrary

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("count", "longest")),
        *((name, _POINTER) for name in ("offsets", "query_offsets", "queries", "keys")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (*((name, _INT) for name in ("D", "F", "H", "is_causal", "site")), ("dropout", ctypes.c_float))


class KernelRows:
    """The rows of a batch as encoder.cpp reads them. `queries_M` None: every token is a query."""

    def __init__(self, lengths_B: Tensor, keys_B: Tensor, longest: int, queries_M: Tensor | None = None) -> None:
        offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        query_offsets = offsets if queries_M is None else torch.searchsorted(queries_M, offsets)
        self.num_queries = int(query_offsets[-1])
        self._tensors = [offsets, query_offsets, queries_M, keys_B]  # the struct holds their addresses
        assert all(tensor is None or tensor.is_contiguous() for tensor in self._tensors)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._struct = _Rows(len(lengths_B), longest, *addresses)

    @property
    def pointer(self) -> Any:
        return ctypes.byref(self._struct)


@dataclass(frozen=True)
class BlockShape:
    """`site`: that of the first of the block's two dropouts; the second has the next."""

    num_heads: int
    is_causal: bool
    site: int
    dropout: float


class EncoderBlockFunction(torch.autograd.Function):
    """A pre-norm transformer block: x [N, D] -> the outputs of the queries, [M, D].

    `weights`: weight and bias of the attention norm, of queries, keys and values, of the output
    projection, of the feed-forward norm, and of both feed-forward layers.
    """

    @staticmethod
    def forward(
        ctx: Any, library: KernelLibrary, x_ND: Tensor, rows: KernelRows, shape: BlockShape, *weights: Tensor
    ) -> Tensor:
        num_tokens, dim = x_ND.shape
        num_queries, hidden_dim = rows.num_queries, len(weights[8])
        ctx.library = library
        ctx.rows = rows
        ctx.shape = _Shape(dim, hidden_dim, shape.num_heads, shape.is_causal, shape.site, shape.dropout)
        query_widths = [shape.num_heads, dim, dim, hidden_dim]
        sizes = [(num_queries, dim), (num_tokens, 2 * dim), *((num_queries, width) for width in query_widths)]
        has_backward = any(ctx.needs_input_grad)
        saved = [x_ND.new_empty(size if has_backward else 0) for size in sizes]  # address 0 if empty
        out = x_ND.new_empty(num_queries, dim)
        x_ND = x_ND.contiguous()
        block = ctypes.byref(ctx.shape), rows.pointer, _addresses(weights)
        library.call("encoder_block", *block, x_ND, _addresses(saved), out)
        ctx.save_for_backward(x_ND, *saved, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x_ND, *others = ctx.saved_tensors
        saved, weights = others[:6], others[6:]
        sizes = [weight.numel() for weight in weights]
        grad_x = torch.empty_like(x_ND)
        grads = x_ND.new_empty(sum(sizes))
        block = ctypes.byref(ctx.shape), ctx.rows.pointer, _addresses(weights)
        inputs = x_ND, _addresses(saved), grad.contiguous()
        ctx.library.call("encoder_block_backward", *block, *inputs, grad_x, grads)
        by_weight = (part.view_as(weight) for part, weight in zip(grads.split(sizes), weights, strict=True))
        return None, grad_x, None, None, *by_weight


def _addresses(tensors: Sequence[Tensor]) -> Any:
    """Return an array of the tensors' addresses; the caller keeps the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class DropoutFunction(torch.autograd.Function):
    """Dropout of x [N, D], with the masks of nn/dropout.py."""

    @staticmethod
    def forward(
        ctx: Any, library: KernelLibrary, x_ND: Tensor, rows: KernelRows, site: int, probability: float
    ) -> Tensor:
        ctx.library = library
        ctx.rows = rows
        ctx.options = (x_ND.shape[1], site, probability)
        return _drop(ctx, x_ND)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _drop(ctx, grad), None, None, None


def _drop(ctx: Any, x_ND: Tensor) -> Tensor:
    out = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    ctx.library.call("drop_elements", ctx.rows.pointer, *ctx.options, x_ND.contiguous(), out)
    return out
