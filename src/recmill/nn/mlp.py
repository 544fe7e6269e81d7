"""MLPs of linear layers, each followed by ReLU, how their weights are initialized, batch norm and dropout."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from recmill.kernels import products
from recmill.kernels.layers import UsesKernels
from recmill.kernels.steps import MlpFunction
from recmill.nn.batch_norm import BatchNorm
from recmill.nn.dropout import RowDropout

Init = Literal["torch", "dlrm"]


@dataclass(frozen=True)
class Regularization:
    """What an MLP has besides its linear layers and ReLUs. `first_site`: the number of its first dropout."""

    batch_norm: bool = False
    dropout: float = 0.0
    first_site: int = 0


NONE = Regularization()


class Linear(nn.Linear):
    """As torch's, with products that are faster on some CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        return products.linear(x, self.weight, self.bias)


class Mlp(UsesKernels, nn.Sequential):
    """Linear, [batch norm,] ReLU, [dropout,] Linear, ..."""

    is_plain = True  # only linear layers and ReLUs

    def forward(self, x: Tensor, row_keys_B: Tensor | None = None) -> Tensor:
        """Compute the outputs of rows with these keys, which training needs: see `CtrBatch`."""
        if (library := self.library_for(x)) and self.is_plain:
            return MlpFunction.apply(library, x.contiguous(), *self.parameters())
        for layer in self:
            if isinstance(layer, BatchNorm):
                x = layer(x, row_keys_B)
            elif isinstance(layer, RowDropout):
                x = layer.of_vectors(x, row_keys_B)
            else:
                x = layer(x)
        return x


def mlp(
    in_features: int, sizes: Sequence[int], init: Init = "torch", padding: int = 0, others: Regularization = NONE
) -> Mlp:
    """Return an MLP with layers of these sizes. The first has `padding` more inputs: see `linear`."""
    layers: list[nn.Module] = []
    for number, out_features in enumerate(sizes):
        # Batch norm subtracts a bias again: its gradient would be nothing but rounding.
        layers.append(linear(in_features, out_features, init, padding, bias=not others.batch_norm))
        layers += [BatchNorm(out_features)] if others.batch_norm else []
        layers.append(nn.ReLU())
        layers += [RowDropout(others.dropout, others.first_site + number)] if others.dropout else []
        in_features, padding = out_features, 0
    made = Mlp(*layers)
    made.is_plain = not (others.batch_norm or others.dropout)
    return made


def linear(in_features: int, out_features: int, init: Init = "torch", padding: int = 0, bias: bool = True) -> Linear:
    """Return a linear layer with `padding` more inputs, which are always 0, as are their weights.

    `dlrm` initializes as the original DLRM and OneFlow's, `torch` as nn.Linear and TorchRec's DLRM.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a dataset without dense features
        layer = Linear(in_features, out_features, bias)
    if init == "dlrm":
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (in_features + out_features)))
        if bias:
            nn.init.normal_(layer.bias, std=math.sqrt(1 / out_features))
    if padding:
        layer.weight = nn.Parameter(F.pad(layer.weight.detach(), (0, padding)))
        layer.in_features += padding
    return layer
