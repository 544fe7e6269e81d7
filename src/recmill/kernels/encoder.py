"""Differentiable functions over the kernels of encoder.cpp: a transformer block, and dropout.

Inputs are float32 tensors on CPU; the callers ensure that. N tokens, M queries, D dims, B rows.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recmill.kernels.library import KernelLibrary


class BlockShape(ctypes.Structure):
    """`struct Shape` of encoder.cpp: D dims, F hidden units, H heads; see nn.dropout for `site`."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("D", "F", "H", "is_causal", "site")), ("dropout", ctypes.c_float))


class KernelRows(ctypes.Structure):
    """`struct Rows` of encoder.cpp. `queries_M` None: every token is a query."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "longest")),
        *((name, ctypes.c_void_p) for name in ("offsets", "query_offsets", "queries", "keys")),
    )

    def __init__(self, lengths_B: Tensor, keys_B: Tensor, longest: int, queries_M: Tensor | None = None) -> None:
        offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        query_offsets = offsets if queries_M is None else torch.searchsorted(queries_M, offsets)
        self.num_queries = int(query_offsets[-1])
        self._tensors = [offsets, query_offsets, queries_M, keys_B]  # the struct holds their addresses
        assert all(tensor is None or tensor.is_contiguous() for tensor in self._tensors)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        super().__init__(len(lengths_B), longest, *addresses)


class EncoderBlockFunction(torch.autograd.Function):
    """A pre-norm transformer block: x [N, D] -> the outputs of the queries, [M, D].

    `weights` are those of `struct Weights` of encoder.cpp, in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, library: KernelLibrary, x_ND: Tensor, rows: KernelRows, shape: BlockShape, *weights: Tensor
    ) -> Tensor:
        ctx.library = library
        ctx.rows = rows
        ctx.shape = shape
        x_ND = x_ND.contiguous()
        (N, D), M = x_ND.shape, rows.num_queries
        sizes = [(M, D), (N, 2 * D), (M, shape.H), (M, D), (M, D), (M, shape.F)]  # as in `struct Saved`
        has_backward = any(ctx.needs_input_grad)
        saved = [x_ND.new_empty(size if has_backward else 0) for size in sizes]  # address 0 if empty
        out = x_ND.new_empty(M, D)
        block = ctypes.byref(shape), ctypes.byref(rows), _addresses(weights)
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
        block = ctypes.byref(ctx.shape), ctypes.byref(ctx.rows), _addresses(weights)
        ctx.library.call("encoder_block_backward", *block, x_ND, _addresses(saved), grad.contiguous(), grad_x, grads)
        grad_weights = (part.view_as(weight) for part, weight in zip(grads.split(sizes), weights, strict=True))
        return None, grad_x, None, None, *grad_weights


def _addresses(tensors: Sequence[Tensor]) -> Any:
    """Return an array of the tensors' addresses; the caller keeps the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


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
    ctx.library.call("drop_elements", ctypes.byref(ctx.rows), *ctx.options, x_ND.contiguous(), out)
    return out
