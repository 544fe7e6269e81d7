"""Layer normalization of packed rows, by place or by window."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recmill.nn.rows import Rows

Norm = Literal["place", "window"]


class WindowNorm(nn.Module):
    """Over all places of a row and all dims together, as TorchRec's BERT4Rec example does it: LayerNorm([length, dim]).

    Rows are padded on the left with zeros for it, so what a place becomes depends on how long its row is.
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(max_length, dim)), nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        length, dim = self.weight.shape
        places_N = rows.padded_to(length)
        padded = x_ND.new_zeros(len(rows.lengths_B) * length, dim).index_copy(0, places_N, x_ND)
        normed = F.layer_norm(padded.view(-1, length, dim), (length, dim), self.weight, self.bias)
        return normed.view(-1, dim)[places_N]


def norm_of(kind: Norm, max_length: int, dim: int) -> nn.Module:
    return nn.LayerNorm(dim) if kind == "place" else WindowNorm(max_length, dim)


def normed(norm: nn.Module, x_ND: Tensor, rows: Rows) -> Tensor:
    out: Tensor = norm(x_ND, rows) if isinstance(norm, WindowNorm) else norm(x_ND)
    return out
