import pytest
import torch
from torch import nn

from recmill.checkpoints.format import Position
from recmill.errors import UserError
from recmill.training import guards, loop
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def test_speed_counts_the_rows_of_a_short_batch_and_not_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows and then 20, in 2 seconds; the loss is a mean over what they weigh, 30 + 6 over 10 + 2."""
    now = iter([0.0, 2.0])
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(now))
    meter = loop._Meter(Position())
    meter.add(torch.tensor(30.0), 10.0, samples=100)
    meter.add(torch.tensor(6.0), 2.0, samples=20)
    assert meter.values(Position(step=2), nn.Linear(1, 1), ALONE) == {"loss": 3.0, "samples_per_s": 60.0}


@pytest.mark.parametrize(
    ("spoiled", "name"),
    [("1.weight", "parameter 1.weight"), ("0.bias", "the gradient of 0.bias"), (None, "the loss itself")],
)
def test_the_first_bad_step_and_tensor_are_named(spoiled: str | None, name: str) -> None:
    """Steps 11 to 14, bad from the third on."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if spoiled and "gradient" in name:
        network.get_parameter(spoiled).grad = torch.tensor([0.0, torch.nan])
    elif spoiled:
        with torch.no_grad():
            network.get_parameter(spoiled)[1, 1] = torch.inf
    meter = loop._Meter(Position(step=10))
    for loss in (1.0, 2.0, torch.inf, 3.0):
        meter.add(torch.tensor(loss), 1.0, 1)
    with pytest.raises(UserError, match=rf"from step 13 on, first on rank 0. .* not finite after step 14: {name}\."):
        meter.values(Position(step=14), network, ALONE)


def test_large_but_finite_values_are_not_mistaken_for_bad_ones() -> None:
    network = nn.Linear(4, 4)
    with torch.no_grad():
        network.weight.fill_(3e38)  # their sum overflows
    assert guards.first_bad_tensor(network) is None
