"""Multi-layer perceptron."""

from collections.abc import Sequence

from torch import nn


def mlp(in_features: int, sizes: Sequence[int]) -> nn.Sequential:
    """Linear + ReLU for each size."""
    layers: list[nn.Module] = []
    for out_features in sizes:
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        in_features = out_features
    return nn.Sequential(*layers)
