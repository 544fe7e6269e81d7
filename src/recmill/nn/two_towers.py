"""The network of `two_tower`. R requests, C items, S = R + C rows, B rows with both, F dense features, D dims."""

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.click_network import TableNetwork
from recmill.nn.mlp import linear, mlp
from recmill.tables.spec import TableSpec


class TwoTowers(TableNetwork):
    """`towers`: layer widths for requests and for items. `is_dense_of_items`: which tower reads each dense feature."""

    def __init__(
        self,
        tables: list[TableSpec],
        is_dense_of_items: Sequence[bool],
        of_items: Collection[str],
        towers: tuple[Sequence[int], Sequence[int]],
        temperature: float,
        device: torch.device,
        averaged: Collection[str] = (),
    ) -> None:
        super().__init__(tables, device, averaged)
        self.temperature = temperature
        is_of_items = [*is_dense_of_items]
        for feature, dim in self._columns:
            is_of_items += [feature in of_items] * dim
        columns = torch.tensor(is_of_items, device="cpu")
        self.register_buffer("request_columns", (~columns).nonzero().squeeze(1), persistent=False)
        self.register_buffer("item_columns", columns.nonzero().squeeze(1), persistent=False)
        self.requests = _tower(len(self.request_columns), towers[0])
        self.items = _tower(len(self.item_columns), towers[1])

    request_columns: Tensor
    item_columns: Tensor

    def forward(
        self,
        dense_SF: Tensor,
        sparse: KeyedJaggedTensor,
        num_requests: int | None = None,
        tower: Literal["requests", "items"] | None = None,
    ) -> Tensor:
        """Return scores [R, C] of the first R rows, which are requests, with the other rows, which are items.

        Without `num_requests`, every row has both: return the scores [B] of its request with its item. With `tower`:
        return the vectors of all rows by this tower.
        """
        inputs = self.inputs(dense_SF, sparse)
        if tower is not None:
            return self.request_vectors(inputs) if tower == "requests" else self.item_vectors(inputs)
        if num_requests is None:
            return (self.request_vectors(inputs) * self.item_vectors(inputs)).sum(1) / self.temperature
        requests_RD, items_CD = self.request_vectors(inputs[:num_requests]), self.item_vectors(inputs[num_requests:])
        return requests_RD @ items_CD.t() / self.temperature

    def inputs(self, dense_SF: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return what both towers choose their columns from: dense features, then the vectors of all tables."""
        return torch.cat([dense_SF, self.bags(self.tables(sparse), sparse)], dim=1)

    def request_vectors(self, inputs: Tensor) -> Tensor:
        return F.normalize(self.requests(inputs.index_select(1, self.request_columns)), dim=1)

    def item_vectors(self, inputs: Tensor) -> Tensor:
        return F.normalize(self.items(inputs.index_select(1, self.item_columns)), dim=1)


def _tower(width: int, sizes: Sequence[int]) -> nn.Sequential:
    """Return an MLP without ReLU behind its last layer: vectors may point anywhere."""
    hidden = [mlp(width, sizes[:-1])] if len(sizes) > 1 else []
    return nn.Sequential(*hidden, linear(sizes[-2] if hidden else width, sizes[-1]))
