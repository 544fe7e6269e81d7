"""Dropout whose mask depends on (row, place in the layer stack, element) and not on how rows are batched.

torch's own draws from a stream per process, so it would make the same run differ between world sizes.
"""

import torch
from torch import Tensor, nn

# Odd 32-bit constants as signed numbers (Wellons' "lowbias32" finaliser and the golden ratio).
_M1, _M2, _STEP = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B9 - (1 << 32)


class RowDropout(nn.Module):
    """`site` tells a network's dropouts apart. Elements count from a row's end, so left padding changes nothing."""

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, x_BTD: Tensor, row_keys_B: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x_BTD
        _, length, dim = x_BTD.shape
        elements = torch.arange(length * dim - 1, -1, -1, dtype=torch.int32, device=x_BTD.device)
        keys_B = _mixed((row_keys_B ^ (row_keys_B >> 32)).to(torch.int32) + self.site * 0x3C6EF372)
        bits = _mixed(keys_B[:, None] + elements * _STEP)
        threshold = int((1.0 - self.probability) * 2.0**32) - (1 << 31)
        keep = (bits < threshold).view(x_BTD.shape)
        return x_BTD * (keep * (1.0 / (1.0 - self.probability)))


def _mixed(x: Tensor) -> Tensor:
    """32 random-looking bits from each int32 (multiplications wrap around)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)
