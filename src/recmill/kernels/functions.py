"""The kernels as differentiable functions. Float32 on CPU; the callers see to that."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from recmill.kernels.native import run


def fits(kernels: ctypes.CDLL | None, inputs: Tensor) -> bool:
    """Whether the kernels may be used on it. (TorchRec's pipeline looks through the network with no tensors in it.)"""
    if kernels is None or not isinstance(inputs, Tensor):
        return False
    is_float32 = inputs.device.type == "cpu" and inputs.dtype == torch.float32
    return is_float32 and not torch.is_autocast_enabled("cpu")


class Tower(torch.autograd.Function):
    """relu(x W1' + b1), and so on: tower(kernels, x, W1, b1, W2, b2, ...).

    What torch does in a pass over memory each (bias, ReLU; its gradient, the bias's) is one here, in place.
    """

    @staticmethod
    def forward(ctx: Any, kernels: ctypes.CDLL, x: Tensor, *parameters: Tensor) -> Tensor:
        values = [x]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = torch.mm(x, weight.t())
            run(kernels.add_bias_relu, x, bias, *x.shape)
            values.append(x)
        ctx.kernels = kernels
        ctx.save_for_backward(*values, *parameters[::2])
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        count = len(ctx.saved_tensors) // 2
        values, weights = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        grads: list[Tensor | None] = []
        grad = grad.contiguous()
        masked = torch.empty_like(grad)  # the incoming one belongs to autograd, all others to us
        for at in reversed(range(count)):
            x, out, weight = values[at], values[at + 1], weights[at]
            grad_bias = torch.empty_like(out[0])
            run(ctx.kernels.relu_backward, grad, out, masked, grad_bias, *out.shape)
            grads += [grad_bias, _weight_gradient(masked, x)]
            if at or ctx.needs_input_grad[1]:
                grad = masked = torch.mm(masked, weight)
        return None, grad if ctx.needs_input_grad[1] else None, *reversed(grads)


def _weight_gradient(grad_BO: Tensor, x_BI: Tensor) -> Tensor:
    """The other way round is 7 times faster for few inputs."""
    if x_BI.shape[1] < 64:
        return torch.mm(x_BI.t(), grad_BO).t().contiguous()
    return torch.mm(grad_BO.t(), x_BI)


class PairProducts(torch.autograd.Function):
    """(dense [B, D], bags [B, (N - 1) * D]) -> [B, width]: dense, the products of all pairs of N vectors, zeros."""

    @staticmethod
    def forward(ctx: Any, kernels: ctypes.CDLL, dense_BD: Tensor, bags: Tensor, itself: bool, width: int) -> Tensor:
        batch, dim = dense_BD.shape
        sizes = (batch, 1 + bags.shape[1] // dim, dim, int(itself), width)
        out = dense_BD.new_empty(batch, width)
        run(kernels.pair_products, dense_BD, bags, *sizes, out)
        ctx.kernels, ctx.sizes = kernels, sizes
        ctx.save_for_backward(dense_BD, bags)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dense_BD, bags = ctx.saved_tensors
        grad_dense, grad_bags = torch.empty_like(dense_BD), torch.empty_like(bags)
        inputs = dense_BD, bags, grad.contiguous()
        run(ctx.kernels.pair_products_backward, *inputs, *ctx.sizes, grad_dense, grad_bags)
        return None, grad_dense, grad_bags, None, None
