"""Interactions of the dense vector with the bags, which are the pooled vectors of the tables.

B rows, N vectors (the dense one first), D dims, P pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recmill.kernels.layers import UsesKernels
from recmill.kernels.steps import PairProducts
from recmill.nn.mlp import Linear, mlp


class Interaction(nn.Module):
    """(dense [B, D], bags [B, width of all bags]) -> [B, out_features + padding]; the padding holds zeros."""

    out_features: int
    padding: int = 0


class DotInteraction(UsesKernels, Interaction):
    """The dense vector, then the dot products of all pairs (Naumov et al., 2019).

    Pairs are the upper triangle of [N, N], row by row, with the diagonal if `itself`.
    """

    cell_of_pair: Tensor  # [P], indices in a flattened [N, N]
    pair_of_cell: Tensor  # [N * N], indices of pairs

    def __init__(self, num_vectors: int, dim: int, itself: bool = False, pad_to_multiple_of: int = 1) -> None:
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=0 if itself else 1)
        pair_of_cell = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of_cell[rows, columns] = pair_of_cell[columns, rows] = torch.arange(len(rows))
        self.register_buffer("cell_of_pair", rows * num_vectors + columns, persistent=False)
        self.register_buffer("pair_of_cell", pair_of_cell.flatten(), persistent=False)
        self._itself = itself
        self.out_features = dim + len(rows)
        self.padding = -self.out_features % pad_to_multiple_of

    def forward(self, dense_BD: Tensor, bags: Tensor) -> Tensor:
        dim = dense_BD.shape[1]
        if (library := self.library_for(bags)) and dim % 16 == 0:
            width = self.out_features + self.padding
            return PairProducts.apply(library, dense_BD, bags.contiguous(), self._itself, width)
        vectors_BND = torch.cat([dense_BD, bags], dim=1).unflatten(1, (-1, dim))
        device = vectors_BND.device.type
        if torch.is_autocast_enabled(device):  # autocast does not know our operator
            vectors_BND = vectors_BND.to(torch.get_autocast_dtype(device))
        products_BP = _TorchPairProducts.apply(vectors_BND, self.cell_of_pair, self.pair_of_cell, self._itself)
        zeros = [dense_BD.new_zeros(len(dense_BD), self.padding)] if self.padding else []
        return torch.cat([dense_BD, products_BP, *zeros], dim=1)


class _TorchPairProducts(torch.autograd.Function):
    """Dot products of pairs of a row's vectors, 1.2 to 1.5 times faster on CPU than with autograd.

    autograd scatters P columns into zeros and takes two matrix products, one per factor. The
    gradient is symmetric in the factors, so one gather and one matrix product are enough.
    """

    @staticmethod
    def forward(ctx: Any, vectors_BND: Tensor, cell_of_pair: Tensor, pair_of_cell: Tensor, itself: bool) -> Tensor:
        ctx.save_for_backward(vectors_BND, pair_of_cell)
        ctx.itself = itself
        return torch.bmm(vectors_BND, vectors_BND.transpose(1, 2)).flatten(1).index_select(1, cell_of_pair)

    @staticmethod
    def backward(ctx: Any, grad_BP: Tensor) -> tuple[Tensor, None, None, None]:
        vectors_BND, pair_of_cell = ctx.saved_tensors
        num_vectors = vectors_BND.shape[1]
        grad_BNN = grad_BP.index_select(1, pair_of_cell).view(-1, num_vectors, num_vectors)
        diagonal_BN = grad_BNN.diagonal(dim1=1, dim2=2)
        if ctx.itself:
            diagonal_BN.mul_(2)  # d(v.v) = 2 v
        else:
            diagonal_BN.zero_()  # not a pair
        return torch.bmm(grad_BNN, vectors_BND), None, None, None


class CrossInteraction(Interaction):
    """Cross layers over all vectors, concatenated (DCN V2: Wang et al., 2021)."""

    def __init__(self, in_features: int, num_layers: int, rank: int) -> None:
        """`in_features`: the width of all vectors together; `rank`: of the matrices, 0 is full."""
        super().__init__()
        self.out_features = in_features
        self.layers = nn.ModuleList(CrossLayer(self.out_features, rank) for _ in range(num_layers))

    def forward(self, dense_BD: Tensor, bags: Tensor) -> Tensor:
        first = x = torch.cat([dense_BD, bags], dim=1)
        for layer in self.layers:
            x = layer(first, x)
        return x


class CrossLayer(nn.Module):
    """first * (W V x + b) + x, elementwise, with V [rank, features] and W [features, rank]; for rank 0 without V."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(features, rank, bias=False) if rank else nn.Identity()
        self.up = Linear(rank or features, features)
        if rank:
            nn.init.xavier_normal_(self.down.weight)  # type: ignore[arg-type]
        nn.init.xavier_normal_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, first, self.up(self.down(x)))


class ProjectionInteraction(Interaction):
    """The dense vector, then the dot products of F1 with F2 vectors (TorchRec's DLRM_Projection).

    Two MLPs compute these vectors from all N. The output of the second is read as [D, F2].
    """

    def __init__(self, in_features: int, dim: int, branch1_mlp: Sequence[int], branch2_mlp: Sequence[int]) -> None:
        """`in_features`: the width of all N vectors together; `dim`: that of the dense vector and the computed ones."""
        super().__init__()
        self.branch1 = mlp(in_features, branch1_mlp)
        self.branch2 = mlp(in_features, branch2_mlp)
        self._dim = dim
        self.out_features = dim + (branch1_mlp[-1] // dim) * (branch2_mlp[-1] // dim)

    def forward(self, dense_BD: Tensor, bags: Tensor) -> Tensor:
        flat = torch.cat([dense_BD, bags], dim=1)
        left = self.branch1(flat).unflatten(1, (-1, self._dim))
        right = self.branch2(flat).unflatten(1, (self._dim, -1))
        return torch.cat([dense_BD, torch.bmm(left, right).flatten(1)], dim=1)
