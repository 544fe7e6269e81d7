"""How layers get the library of kernels, and which tensors it can process."""

import torch
from torch import Tensor, nn

from recmill.kernels.library import KernelLibrary


class UsesKernels:
    """Mixin of layers that call kernels after `use_kernels` has given them the library."""

    kernel_library: KernelLibrary | None = None

    def library_for(self, x: Tensor) -> KernelLibrary | None:
        """Return the library if it is in use and can process `x`."""
        return self.kernel_library if can_process(x) else None


def use_kernels(network: nn.Module, library: KernelLibrary) -> None:
    """Let every layer of `network` that has kernels call those of `library`."""
    for layer in network.modules():
        if isinstance(layer, UsesKernels):
            layer.kernel_library = library


def can_process(x: Tensor) -> bool:
    """Return whether kernels can process `x`: float32, on CPU, outside of autocast."""
    is_tensor = isinstance(x, Tensor)  # and not a proxy with which TorchRec's pipeline traces a network
    return is_tensor and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
