"""The kernels of steps.cpp against torch. tests/unit/test_native_lookup.py has those of tables."""

import pytest
import torch
from torch import Tensor, nn

from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp


def gradients(module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The upstream gradient is not contiguous."""
    torch.manual_seed(5)
    out = module(*inputs)
    weights = [weight for weight in [*inputs, *module.parameters()] if weight.requires_grad]
    return out, list(torch.autograd.grad(out, weights, torch.randn(*out.shape[::-1]).t()))


def assert_same(module: nn.Module, inputs: list[Tensor], library: KernelLibrary) -> None:
    expected = gradients(module, inputs)
    use_kernels(module, library)
    torch.testing.assert_close(gradients(module, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("sizes", [[8], [70, 33, 4]])
def test_an_mlp_equals_torchs(library: KernelLibrary, sizes: list[int], rows: int, needs_input_gradient: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, 13, requires_grad=needs_input_gradient)
    assert_same(mlp(13, sizes), [x], library)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("padding", [1, 16])
@pytest.mark.parametrize(("vectors", "dim"), [(2, 16), (4, 32), (16, 16), (17, 48), (27, 128), (40, 16), (70, 16)])
def test_pair_products_equal_torchs(library: KernelLibrary, vectors: int, dim: int, padding: int, itself: bool) -> None:
    torch.manual_seed(2)
    inputs = [torch.randn(9, dim, requires_grad=True), torch.randn(9, (vectors - 1) * dim, requires_grad=True)]
    assert_same(DotInteraction(vectors, dim, itself, padding), inputs, library)


def test_nan_stays_visible(library: KernelLibrary) -> None:
    layers = mlp(4, [3, 2])
    use_kernels(layers, library)
    next(layers.parameters()).data[1] = torch.nan
    out = layers(torch.randn(2, 4))
    assert out.isnan().any()
    pairs = DotInteraction(3, 16)
    use_kernels(pairs, library)
    dense = torch.randn(2, 16)
    dense[1, 0] = torch.inf
    found = pairs(dense, torch.zeros(2, 32))
    assert found[1].isnan().any()
    assert not found[0].isnan().any()
