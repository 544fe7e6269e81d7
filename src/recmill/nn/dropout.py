"""Dropout whose mask depends on row, layer and element, but not on how rows are batched.

torch's own dropout draws from one stream per process, so results would change with the world size.
"""

import torch
from torch import Tensor, nn

from recmill.kernels.encoder import DropoutFunction
from recmill.kernels.layers import UsesKernels
from recmill.nn.rows import Rows, Tokens

# 32-bit constants as signed numbers: the factors of Wellons' "lowbias32" hash, and the golden ratio.
_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_TWICE_GOLDEN = 0x3C6EF372


class RowDropout(UsesKernels, nn.Module):
    """Dropout number `site` of a network. Elements are counted from the end of a row."""

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability = probability
        self.site = site

    def forward(self, x_ND: Tensor, rows: Rows, tokens: Tokens = "all") -> Tensor:
        """Drop elements of x_ND, which holds all tokens of the rows or only their queries."""
        if not self.training or self.probability == 0.0:
            return x_ND
        dim = x_ND.shape[1]
        if (library := self.library_for(x_ND)) and tokens == "all" and dim % 16 == 0:
            return DropoutFunction.apply(library, x_ND, rows.for_kernels(), self.site, self.probability)
        row_N, from_end_N = rows.row_N, rows.from_end_N.to(torch.int32)
        if tokens == "queries":
            row_N, from_end_N = row_N[rows.queries_M], from_end_N[rows.queries_M]
        element_D = torch.arange(dim - 1, -1, -1, dtype=torch.int32, device=x_ND.device)
        keys_B = _hash((rows.keys_B ^ (rows.keys_B >> 32)).to(torch.int32) + self.site * _TWICE_GOLDEN)
        bits_ND = _hash(keys_B[row_N, None] + (from_end_N[:, None] * dim + element_D) * _GOLDEN)
        threshold = int((1.0 - self.probability) * 2.0**32) - (1 << 31)
        return x_ND * ((bits_ND < threshold) * (1.0 / (1.0 - self.probability)))


def _hash(x: Tensor) -> Tensor:
    """Return 32 random-looking bits per int32. The masks make torch's arithmetic shifts logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)
