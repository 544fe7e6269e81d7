from typing import Any

import pytest
import torch
from torch import Tensor

from recmill.nn.interactions import CrossInteraction, CrossLayer, DotInteraction, Interaction, ProjectionInteraction

A, B, C, D = [1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]


@pytest.mark.parametrize(
    ("itself", "expected"),
    [
        (False, [1.0, 8.5, 0.0, -2.5, -7.0, 3.0]),  # a.b a.c a.d b.c b.d c.d
        (True, [5.0, 1.0, 8.5, 0.0, 10.0, -2.5, -7.0, 16.25, 3.0, 5.0]),  # a.a a.b a.c a.d b.b b.c b.d c.c c.d d.d
    ],
)
def test_dot_products_follow_the_dense_vector_row_by_row(itself: bool, expected: list[float]) -> None:
    layer = DotInteraction(4, 2, itself)
    assert layer(torch.tensor([A]), torch.tensor([B + C + D])).tolist() == [A + expected]
    assert layer.out_features == 2 + len(expected)


def test_one_cross_layer_by_hand() -> None:
    """V = [1 2], W = [3 -1]', b = [0.5 0.25]: V x = 6, W V x + b = [18.5 -5.75], times x0, plus x."""
    layer = CrossLayer(2, 1)
    assert isinstance(layer.down, torch.nn.Linear)
    with torch.no_grad():
        layer.down.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.up.weight.copy_(torch.tensor([[3.0], [-1.0]]))
        layer.up.bias.copy_(torch.tensor([0.5, 0.25]))
    first, x = torch.tensor([[2.0, -4.0]]), torch.tensor([[4.0, 1.0]])
    assert layer(first, x).tolist() == [[2.0 * 18.5 + 4.0, -4.0 * -5.75 + 1.0]]


INTERACTIONS: dict[str, Any] = {
    "dot": lambda: DotInteraction(4, 8),
    "dot with itself, padded": lambda: DotInteraction(4, 8, itself=True, pad_to_multiple_of=16),
    "cross": lambda: CrossInteraction(32, num_layers=2, rank=3),
    "projection": lambda: ProjectionInteraction(32, 8, [16], [24]),
}


@pytest.fixture(params=INTERACTIONS)
def interaction(request: pytest.FixtureRequest) -> Interaction:
    torch.manual_seed(3)
    return INTERACTIONS[request.param]()


def vectors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(5, 8, dtype=dtype, requires_grad=True), torch.randn(5, 24, dtype=dtype, requires_grad=True)


def test_gradients_equal_finite_differences(interaction: Interaction) -> None:
    assert torch.autograd.gradcheck(interaction.double(), vectors(torch.float64))


def test_compiled_as_one_graph_it_gives_the_same(interaction: Interaction) -> None:
    compiled = torch.compile(interaction, fullgraph=True, dynamic=False, backend="aot_eager")
    dense, others = vectors()
    out, again = interaction(dense, others), compiled(dense, others)
    assert torch.equal(out, again)
    assert out.shape == (5, interaction.out_features + interaction.padding)
    expected = torch.autograd.grad(out.square().sum(), [dense, others], allow_unused=True)
    found = torch.autograd.grad(again.square().sum(), [dense, others], allow_unused=True)
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])
