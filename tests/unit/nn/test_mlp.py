import math

import pytest
import torch
from torch import nn

from recmill.nn.mlp import Linear, linear, mlp


def test_dlrms_initial_weights_are_normal_with_a_variance_by_fan_in_and_fan_out() -> None:
    torch.manual_seed(0)
    layer = linear(300, 500, "dlrm")
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 800), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(math.sqrt(1 / 500), rel=0.15)
    assert layer.weight.abs().max() > 3.5 * layer.weight.std()  # torch's own is uniform: 1.7 at most


def test_an_mlp_has_a_relu_after_every_layer() -> None:
    layers = mlp(3, [5, 2])
    assert [type(layer) for layer in layers] == [Linear, nn.ReLU, Linear, nn.ReLU]
    assert [layer.weight.shape for layer in layers if isinstance(layer, nn.Linear)] == [(5, 3), (2, 5)]
