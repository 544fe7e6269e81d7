import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recmill.nn.losses import Loss, sampled_sum


def test_gbce_by_hand() -> None:
    """Scores 2 and -1 of the answers 3 and 5; of the negatives 1 and 3 scores 0.5 and 2, 1 and 0: one is an answer."""
    loss = Loss("gbce", negatives=2, calibration=0.5)
    power = loss.power(num_items=5)  # rate 2 / 4, so 0.5 * (0.5 * (1 - 2) + 2)
    assert power == pytest.approx(0.75)
    queries = torch.eye(2)
    head = torch.tensor([[2.0, 9.0], [9.0, -1.0], [0.5, 1.0], [2.0, 0.0]])
    found = sampled_sum(loss, queries, head, torch.zeros(4), torch.tensor([3, 5, 1, 3]), torch.tensor([1.0, 2.0]), 5)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    first = -power * np.log(sigmoid(2)) - np.log(1 - sigmoid(0.5))
    second = -power * np.log(sigmoid(-1)) - np.log(1 - sigmoid(1)) - np.log(1 - sigmoid(0))
    assert found.item() == pytest.approx((first + 2 * second) / 3, rel=1e-6)


def test_sampled_softmax_by_hand() -> None:
    """The scores of `test_gbce_by_hand`: the first query does not compete with the negative that is its answer."""
    head = torch.tensor([[2.0, 9.0], [9.0, -1.0], [0.5, 1.0], [2.0, 0.0]])
    items, weights = torch.tensor([3, 5, 1, 3]), torch.tensor([1.0, 2.0])
    found = sampled_sum(Loss("sampled_softmax"), torch.eye(2), head, torch.zeros(4), items, weights, 5)
    first = -np.log(np.exp(2) / (np.exp(2) + np.exp(0.5)))
    second = -np.log(np.exp(-1) / (np.exp(-1) + np.exp(1) + np.exp(0)))
    assert found.item() == pytest.approx(first + 2 * second, rel=1e-6)


def test_sampled_softmax_over_all_items_is_cross_entropy() -> None:
    torch.manual_seed(0)
    queries, head, bias = torch.randn(7, 16), torch.randn(30, 16), torch.randn(30)
    answers, items = torch.randint(0, 30, (7,)), torch.arange(30)
    chosen = torch.cat([answers, items])
    found = sampled_sum(Loss("sampled_softmax"), queries, head[chosen], bias[chosen], chosen, torch.ones(7), 30)
    torch.testing.assert_close(found, F.cross_entropy(queries @ head.T + bias, answers, reduction="sum"))


def test_sampled_softmax_of_answers_that_are_their_only_negatives_is_zero() -> None:
    queries = torch.ones(1, 2, requires_grad=True)
    one = torch.tensor([4, 4])
    loss = sampled_sum(Loss("sampled_softmax"), queries, torch.ones(2, 2), torch.zeros(2), one, torch.ones(1), 9)
    loss.backward()
    assert queries.grad is not None
    assert loss.item() == queries.grad.abs().sum().item() == 0.0


@pytest.mark.parametrize(("calibration", "power"), [(0.0, 1.0), (1.0, 0.25)])
def test_gbces_power_goes_from_one_to_the_sampling_rate(calibration: float, power: float) -> None:
    loss = Loss("gbce", negatives=5, calibration=calibration)
    assert loss.power(num_items=21) == pytest.approx(power)
    assert loss.power(num_items=3) == loss.power(num_items=1) == 1.0, (
        "with more negatives than items there is nothing to correct"
    )
