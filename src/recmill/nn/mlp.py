"""Linear layers with ReLU between them, and how they start."""

import ctypes
import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from recmill.kernels.functions import Tower, fits

Init = Literal["torch", "dlrm"]


class Mlp(nn.Sequential):
    """Linear, ReLU, Linear, ReLU, ..."""

    native: ctypes.CDLL | None = None

    def forward(self, x: Tensor) -> Tensor:
        if fits(self.native, x):
            return Tower.apply(self.native, x.contiguous(), *self.parameters())
        return super().forward(x)


def mlp(in_features: int, sizes: Sequence[int], init: Init = "torch", padding: int = 0) -> Mlp:
    """Linear + ReLU for each size; `padding` as for `linear`, of the first layer."""
    layers: list[nn.Module] = []
    for out_features in sizes:
        layers += [linear(in_features, out_features, init, padding), nn.ReLU()]
        in_features, padding = out_features, 0
    return Mlp(*layers)


def linear(in_features: int, out_features: int, init: Init = "torch", padding: int = 0) -> nn.Linear:
    """`padding` more inputs are always 0: their weights are 0 and stay so, the others start as without padding.

    'dlrm' is the start of the original DLRM and of OneFlow's; 'torch' that of nn.Linear, and so of TorchRec's DLRM.
    """
    layer = nn.Linear(in_features, out_features)
    if init == "dlrm":
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (in_features + out_features)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / out_features))
    if padding:
        layer.weight = nn.Parameter(F.pad(layer.weight.detach(), (0, padding)))
        layer.in_features += padding
    return layer
