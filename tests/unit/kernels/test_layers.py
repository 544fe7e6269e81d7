import torch
from torch import nn

from recmill.kernels.layers import can_process, use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.nn.mlp import mlp


def test_kernels_process_float32_on_cpu_outside_of_autocast_only() -> None:
    assert can_process(torch.zeros(2))
    assert not can_process(torch.zeros(2, dtype=torch.float64))
    assert not can_process(torch.zeros(2, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_process(torch.zeros(2))


def test_layers_call_kernels_only_after_use_kernels(library: KernelLibrary) -> None:
    layers = mlp(4, [3])
    x = torch.zeros(2, 4)
    assert layers.library_for(x) is None
    use_kernels(nn.Sequential(nn.Linear(4, 4), layers), library)
    assert layers.library_for(x) is library
    assert layers.library_for(x.double()) is None
