"""Batch normalization over the global batch: all ranks normalize with the mean and variance of all their rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Add = Callable[[Tensor], Tensor]  # returns the sum of a tensor over all ranks; all ranks take part

_EPS, _MOMENTUM = 1e-5, 0.1  # of torch.nn.BatchNorm1d


class BatchNorm(nn.Module):
    """As torch.nn.BatchNorm1d does in one process, for any number of processes. Fillers do not count."""

    running_mean: Tensor
    running_var: Tensor
    add: Add | None = None  # None: one process has all rows

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x_BD: Tensor, row_keys_B: Tensor | None = None) -> Tensor:
        """Normalize x_BD: in training by this batch, where rows with a negative key are fillers."""
        if not isinstance(x_BD, Tensor):  # TorchRec's pipeline traces the network up to its tables
            return x_BD
        x_BD = x_BD.float()
        if not self.training or (self.add is None and len(x_BD) > 1):
            running = self.running_mean, self.running_var
            return F.batch_norm(x_BD, *running, self.weight, self.bias, self.training, _MOMENTUM, _EPS)
        is_real_B1 = x_BD.new_ones(len(x_BD), 1) if row_keys_B is None else (row_keys_B >= 0).float()[:, None]
        add = self.add or _of_one_process
        normalized, mean, variance, count = _Normalize.apply(x_BD, self.weight, self.bias, is_real_B1, add)
        self.running_mean.lerp_(mean, _MOMENTUM)
        self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), _MOMENTUM)
        return normalized


def share_statistics(network: nn.Module, add: Add) -> None:
    """Let every batch normalization of `network` add up its statistics over all ranks."""
    for layer in network.modules():
        if isinstance(layer, BatchNorm):
            layer.add = add


def _of_one_process(values: Tensor) -> Tensor:
    return values


class _Normalize(torch.autograd.Function):
    """Return the normalized rows; and mean, variance and number of the real rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x_BD: Tensor, weight: Tensor, bias: Tensor, is_real_B1: Tensor, add: Add
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums = add(torch.cat([is_real_B1.sum(0), (x_BD * is_real_B1).sum(0)]))
        count, mean = sums[:1], sums[1:] / sums[:1]
        centred = (x_BD - mean) * is_real_B1
        variance = add(centred.square().sum(0)) / count
        scale = (variance + _EPS).rsqrt()
        unit = centred.mul_(scale)
        ctx.add = add
        ctx.save_for_backward(unit, scale * weight, is_real_B1, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return unit * weight + bias, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        unit, scale, is_real_B1, count = ctx.saved_tensors
        own = torch.stack([grad.sum(0), (grad * unit).sum(0)])  # fillers have no gradient
        of_all = ctx.add(own.clone()) / count
        grad_x = (grad - of_all[0] - unit * of_all[1]) * scale * is_real_B1
        return grad_x, own[1], own[0], None, None
