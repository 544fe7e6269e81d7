import numpy as np
import pytest
import torch

from recmill.nn.losses import Loss, gbce_sum


def test_gbce_by_hand() -> None:
    """Scores 2 and -1 of the answers 3 and 5; of the negatives 1 and 3 scores 0.5 and 2, 1 and 0: one is an answer."""
    loss = Loss("gbce", negatives=2, calibration=0.5)
    power = loss.power(num_items=5)  # rate 2 / 4, so 0.5 * (0.5 * (1 - 2) + 2)
    assert power == pytest.approx(0.75)
    queries = torch.eye(2)
    head = torch.tensor([[2.0, 9.0], [9.0, -1.0], [0.5, 1.0], [2.0, 0.0]])
    found = gbce_sum(queries, head, torch.zeros(4), torch.tensor([3, 5, 1, 3]), torch.tensor([1.0, 2.0]), power)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    first = -power * np.log(sigmoid(2)) - np.log(1 - sigmoid(0.5))
    second = -power * np.log(sigmoid(-1)) - np.log(1 - sigmoid(1)) - np.log(1 - sigmoid(0))
    assert found.item() == pytest.approx((first + 2 * second) / 3, rel=1e-6)


@pytest.mark.parametrize(("calibration", "power"), [(0.0, 1.0), (1.0, 0.25)])
def test_gbces_power_goes_from_one_to_the_sampling_rate(calibration: float, power: float) -> None:
    loss = Loss("gbce", negatives=5, calibration=calibration)
    assert loss.power(num_items=21) == pytest.approx(power)
    assert loss.power(num_items=3) == loss.power(num_items=1) == 1.0, (
        "with more negatives than items there is nothing to correct"
    )
