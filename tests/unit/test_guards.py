import torch
from torch import nn

from recmill.training.guards import first_bad_tensor


def test_large_but_finite_values_are_not_mistaken_for_bad_ones() -> None:
    network = nn.Linear(4, 4)
    with torch.no_grad():
        network.weight.fill_(3e38)  # their sum overflows
    assert first_bad_tensor(network) is None
    with torch.no_grad():
        network.weight[3, 3] = torch.inf
    assert first_bad_tensor(network) == "parameter weight"
