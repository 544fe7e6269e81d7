"""Differentiable functions over the kernels of steps.cpp: MLPs and pair products.

Inputs are contiguous float32 tensors on CPU; the callers ensure that.
"""

from typing import Any

import torch
from torch import Tensor

from recmill.kernels.library import KernelLibrary
from recmill.kernels.products import product, weight_gradient


class MlpFunction(torch.autograd.Function):
    """apply(library, x, W1, b1, W2, b2, ...) returns relu(... relu(x W1' + b1) W2' + b2 ...).

    Bias and ReLU take one pass over memory, in place, and so do their gradients; torch takes two.
    """

    @staticmethod
    def forward(ctx: Any, library: KernelLibrary, x: Tensor, *parameters: Tensor) -> Tensor:
        values = [x]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = product(x, weight.t())
            library.call("add_bias_relu", x, bias, *x.shape)
            values.append(x)
        ctx.library = library
        ctx.save_for_backward(*values, *parameters[::2])
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        num_layers = len(ctx.saved_tensors) // 2
        values, weights = ctx.saved_tensors[: num_layers + 1], ctx.saved_tensors[num_layers + 1 :]
        grads: list[Tensor | None] = []
        grad = grad.contiguous()
        masked = torch.empty_like(grad)  # autograd owns the incoming gradient; later ones are overwritten in place
        for layer in reversed(range(num_layers)):
            x, out, weight = values[layer], values[layer + 1], weights[layer]
            grad_bias = torch.empty_like(out[0])
            ctx.library.call("relu_backward", grad, out, masked, grad_bias, *out.shape)
            grads += [grad_bias, weight_gradient(x, masked)]
            if layer or ctx.needs_input_grad[1]:
                grad = masked = product(masked, weight)
        return None, grad if ctx.needs_input_grad[1] else None, *reversed(grads)


class PairProducts(torch.autograd.Function):
    """(dense [B, D], bags [B, (N - 1) * D]) -> [B, width]: dense, dot products of pairs, zeros."""

    @staticmethod
    def forward(ctx: Any, library: KernelLibrary, dense_BD: Tensor, bags: Tensor, itself: bool, width: int) -> Tensor:
        batch_size, dim = dense_BD.shape
        ctx.library = library
        ctx.sizes = (batch_size, 1 + bags.shape[1] // dim, dim, int(itself), width)
        ctx.save_for_backward(dense_BD, bags)
        out = dense_BD.new_empty(batch_size, width)
        library.call("pair_products", dense_BD, bags, *ctx.sizes, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dense_BD, bags = ctx.saved_tensors
        grad_dense, grad_bags = torch.empty_like(dense_BD), torch.empty_like(bags)
        ctx.library.call("pair_products_backward", dense_BD, bags, grad.contiguous(), *ctx.sizes, grad_dense, grad_bags)
        return None, grad_dense, grad_bags, None, None
