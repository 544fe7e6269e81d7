"""Layer normalization of packed rows: of each position ("place"), or of a complete window."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recmill.nn.rows import Rows

Norm = Literal["place", "window"]


class WindowNorm(nn.Module):
    """LayerNorm([max_length, dim]) of rows padded with zeros on the left (TorchRec's BERT4Rec)."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(max_length, dim))
        self.bias = nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x_ND: Tensor, rows: Rows) -> Tensor:
        length, dim = self.weight.shape
        index_N = rows.padded_to(length)
        padded = x_ND.new_zeros(len(rows.lengths_B) * length, dim).index_copy(0, index_N, x_ND)
        normalized = F.layer_norm(padded.view(-1, length, dim), (length, dim), self.weight, self.bias)
        return normalized.view(-1, dim)[index_N]


def make_norm(kind: Norm, max_length: int, dim: int) -> nn.Module:
    return nn.LayerNorm(dim) if kind == "place" else WindowNorm(max_length, dim)


def apply_norm(norm: nn.Module, x_ND: Tensor, rows: Rows) -> Tensor:
    return norm(x_ND, rows) if isinstance(norm, WindowNorm) else norm(x_ND)
