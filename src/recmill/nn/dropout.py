"""Dropout whose mask depends on (row, place in the layer stack, element) and not on how rows are batched.

torch's own draws from a stream per process, so it would make the same run differ between world sizes.
"""

import ctypes

import torch
from torch import Tensor, nn

from recmill.kernels.encoder import DropElements
from recmill.kernels.functions import fits
from recmill.nn.rows import Rows

# Odd 32-bit constants as signed numbers (Wellons' "lowbias32" finaliser and the golden ratio).
_M1, _M2, _STEP = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B9 - (1 << 32)


class RowDropout(nn.Module):
    """`site` tells a network's dropouts apart. Elements count from a row's end."""

    native: ctypes.CDLL | None = None

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, x_ND: Tensor, rows: Rows, *, of_queries: bool = False) -> Tensor:
        """`of_queries`: x has not all tokens, but those that are asked for."""
        if not self.training or self.probability == 0.0:
            return x_ND
        dim = x_ND.shape[1]
        if not of_queries and self.native is not None and fits(self.native, x_ND) and dim % 16 == 0:
            dropped: Tensor = DropElements.apply(x_ND, rows.native(self.native), self.site, self.probability)
            return dropped
        row_N, from_end_N = rows.row_N, rows.from_end_N.to(torch.int32)
        if of_queries:
            row_N, from_end_N = row_N[rows.queries_M], from_end_N[rows.queries_M]
        within = torch.arange(dim - 1, -1, -1, dtype=torch.int32, device=x_ND.device)
        keys_B = _mixed((rows.keys_B ^ (rows.keys_B >> 32)).to(torch.int32) + self.site * 0x3C6EF372)
        bits = _mixed(keys_B[row_N, None] + (from_end_N[:, None] * dim + within) * _STEP)
        threshold = int((1.0 - self.probability) * 2.0**32) - (1 << 31)
        return x_ND * ((bits < threshold) * (1.0 / (1.0 - self.probability)))


def _mixed(x: Tensor) -> Tensor:
    """32 random-looking bits from each int32 (multiplications wrap around)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)
