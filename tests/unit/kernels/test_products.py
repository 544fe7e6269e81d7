"""Products by oneDNN against torch's own, on any CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recmill.kernels import products


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def with_gradients(function: Any, inputs: list[Tensor | None]) -> list[Tensor]:
    """The upstream gradient is not contiguous."""
    torch.manual_seed(2)
    out = function(*inputs)
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return [out, *torch.autograd.grad(out, needed, torch.randn(*out.shape[::-1]).t())]


@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(300, 77, 130), (300, 130, 77), (5, 3, 4), (5, 0, 4)])
def test_a_layer_by_onednn_equals_torchs(
    rows: int, inputs: int, outputs: int, has_bias: bool, needs_input_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_prefers_onednn", lambda: True)
    torch.manual_seed(1)
    x = torch.randn(rows, inputs, requires_grad=needs_input_gradient)
    weight = torch.randn(outputs, inputs, requires_grad=True)
    given = [x, weight, torch.randn(outputs, requires_grad=True) if has_bias else None]
    with Operators() as operators:
        found = with_gradients(products.linear, given)
    torch.testing.assert_close(found, with_gradients(F.linear, given), rtol=1e-4, atol=1e-4)
    assert ("mkldnn._linear_pointwise.default" in operators.called) == (rows == 300)
    assert found[-1 - has_bias].is_contiguous()


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (1, 16), (16, 3), (200, 1)])
def test_gradients_of_weights_have_the_strides_of_weights(inputs: int, outputs: int) -> None:
    x, grad = torch.randn(5, inputs), torch.randn(5, outputs)
    found = products.weight_gradient(x, grad)
    torch.testing.assert_close(found, grad.t() @ x)
    assert found.stride() == torch.empty(outputs, inputs).stride()


def test_tensors_that_kernels_cannot_process_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_prefers_onednn", lambda: True)
    double, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3)
    torch.testing.assert_close(products.linear(double, weight.double(), None), torch.full((2, 4), 3.0).double())
    torch.testing.assert_close(products.linear(torch.ones(2, 5, 3), weight, None), torch.full((2, 5, 4), 3.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(torch.ones(2, 3), weight, None).dtype == torch.bfloat16
