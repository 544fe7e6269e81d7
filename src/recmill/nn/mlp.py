"""MLPs of linear layers, each followed by ReLU, and how their weights are initialized."""

import math
import warnings
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from recmill.kernels.layers import UsesKernels
from recmill.kernels.steps import MlpFunction

Init = Literal["torch", "dlrm"]


class Mlp(UsesKernels, nn.Sequential):
    """Linear, ReLU, Linear, ReLU, ..."""

    def forward(self, x: Tensor) -> Tensor:
        if library := self.library_for(x):
            return MlpFunction.apply(library, x.contiguous(), *self.parameters())
        return super().forward(x)


def mlp(in_features: int, sizes: Sequence[int], init: Init = "torch", padding: int = 0) -> Mlp:
    """Return an MLP with layers of these sizes. The first has `padding` more inputs: see `linear`."""
    layers: list[nn.Module] = []
    for out_features in sizes:
        layers += [linear(in_features, out_features, init, padding), nn.ReLU()]
        in_features, padding = out_features, 0
    return Mlp(*layers)


def linear(in_features: int, out_features: int, init: Init = "torch", padding: int = 0) -> nn.Linear:
    """Return a linear layer with `padding` more inputs, which are always 0, as are their weights.

    `dlrm` initializes as the original DLRM and OneFlow's, `torch` as nn.Linear and TorchRec's DLRM.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a dataset without dense features
        layer = nn.Linear(in_features, out_features)
    if init == "dlrm":
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (in_features + out_features)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / out_features))
    if padding:
        layer.weight = nn.Parameter(F.pad(layer.weight.detach(), (0, padding)))
        layer.in_features += padding
    return layer
