"""How dense and sparse features meet. B rows, N vectors, D dims."""

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Every pair's dot product (strict upper triangle, row by row), with the dense vector in front."""

    pairs: Tensor

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.out_features = dim + len(rows)

    def forward(self, dense_BD: Tensor, sparse_BND: Tensor) -> Tensor:
        all_BND = torch.cat([dense_BD.unsqueeze(1), sparse_BND], dim=1)
        products_BNN = torch.bmm(all_BND, all_BND.transpose(1, 2))
        return torch.cat([dense_BD, products_BNN.flatten(1).index_select(1, self.pairs)], dim=1)
