"""Networks in which every feature, dense ones too, is a field with a vector of its own.

B rows, F dense features, N fields (the dense ones first), W width of a table row, D dims of a vector, H heads.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.click_network import TableNetwork
from recmill.nn.mlp import NONE, Regularization, linear, mlp
from recmill.tables.spec import TableSpec

_DENSE_INIT = 0.01  # standard deviation of the vectors of dense features


class LinearNetwork(TableNetwork):
    """Logistic regression: a weight per dense feature and per id, the first value of its row, and a bias."""

    def __init__(
        self, tables: list[TableSpec], num_dense: int, device: torch.device, averaged: Collection[str] = ()
    ) -> None:
        super().__init__(tables, device, averaged)
        self._row_width = tables[0].dim
        self.linear = linear(num_dense, 1)

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return logits [B]."""
        return self.weighted(dense_BF, self.rows(sparse))

    def rows(self, sparse: KeyedJaggedTensor) -> Tensor:
        return self.bags(self.tables(sparse), sparse).unflatten(1, (-1, self._row_width))

    def weighted(self, dense_BF: Tensor, rows_BNW: Tensor) -> Tensor:
        return self.linear(dense_BF).squeeze(1) + rows_BNW[:, :, 0].sum(1)


class FactorNetwork(LinearNetwork):
    """A factorization machine (Rendle, 2010); with an MLP beside it, if `deep_mlp` has layers (Guo et al., 2017).

    A row of a table holds the weight and the D = W - 1 factors of an id. The vector of a dense feature is its value
    times its factors. Fields are multiplied with each other; several ids of one field are not.
    """

    def __init__(
        self,
        tables: list[TableSpec],
        num_dense: int,
        deep_mlp: Sequence[int],
        device: torch.device,
        averaged: Collection[str] = (),
        others: Regularization = NONE,
    ) -> None:
        super().__init__(tables, num_dense, device, averaged)
        dim = self._row_width - 1
        self.dense_factors = nn.Parameter(torch.empty(num_dense, dim).normal_(std=_DENSE_INIT))
        self.deep = mlp((num_dense + len(self._features)) * dim, deep_mlp, others=others) if deep_mlp else None
        self.logit = nn.Linear(deep_mlp[-1], 1, bias=False) if deep_mlp else None

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor, row_keys_B: Tensor | None = None) -> Tensor:
        """Return logits [B]."""
        rows_BNW = self.rows(sparse)
        vectors_BND = torch.cat([dense_BF.unsqueeze(2) * self.dense_factors, rows_BNW[:, :, 1:]], dim=1)
        # The sum over all pairs of fields, in one pass: half of what remains of the squared sum without the squares.
        pairs_B = 0.5 * (vectors_BND.sum(1).square() - vectors_BND.square().sum(1)).sum(1)
        logits_B = self.weighted(dense_BF, rows_BNW) + pairs_B
        if self.deep is None or self.logit is None:
            return logits_B
        return logits_B + self.logit(self.deep(vectors_BND.flatten(1), row_keys_B)).squeeze(1)


class TwoStreamNetwork(TableNetwork):
    """FinalMLP (Mao et al., 2023): two MLPs, each over its own gated copy of all vectors, and a bilinear form of both.

    A gate multiplies the vectors by 0 to 2. It depends on the vectors of `gate_features` of its stream, or on nothing
    but learned numbers if they are empty. Without layers in `gate_mlp` there are no gates.
    """

    def __init__(
        self,
        tables: list[TableSpec],
        num_dense: int,
        streams: tuple[Sequence[int], Sequence[int]],
        gate_mlp: Sequence[int],
        gate_features: tuple[Sequence[str], Sequence[str]],
        num_heads: int,
        device: torch.device,
        averaged: Collection[str] = (),
        others: Regularization = NONE,
    ) -> None:
        super().__init__(tables, device, averaged)
        self._dim = tables[0].dim
        self.dense_factors = nn.Parameter(torch.empty(num_dense, self._dim).normal_(std=_DENSE_INIT))
        width = (num_dense + len(self._features)) * self._dim
        places = [[num_dense + self._features.index(name) for name in names] for names in gate_features]
        self.gates = nn.ModuleList(Gate(width, self._dim, gate_mlp, fields) for fields in places if gate_mlp)
        per_stream = others, replace(others, first_site=len(streams[0]))
        self.streams = nn.ModuleList(
            mlp(width, sizes, others=of_stream) for sizes, of_stream in zip(streams, per_stream, strict=True)
        )
        self.logits = nn.ModuleList(nn.Linear(sizes[-1], 1) for sizes in streams)
        left, right = (sizes[-1] // num_heads for sizes in streams)
        self.bilinear = nn.Parameter(torch.empty(num_heads, left, right))
        nn.init.normal_(self.bilinear, std=math.sqrt(2 / (num_heads * left * right + 1)))

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor, row_keys_B: Tensor | None = None) -> Tensor:
        """Return logits [B]."""
        bags_BND = self.bags(self.tables(sparse), sparse).unflatten(1, (-1, self._dim))
        vectors_BND = torch.cat([dense_BF.unsqueeze(2) * self.dense_factors, bags_BND], dim=1)
        flat = vectors_BND.flatten(1)
        inputs = [flat * gate(vectors_BND) for gate in self.gates] or [flat, flat]
        left, right = (stream(given, row_keys_B) for stream, given in zip(self.streams, inputs, strict=True))
        num_heads = self.bilinear.shape[0]
        left_HB = left.unflatten(1, (num_heads, -1)).transpose(0, 1)
        fused = torch.bmm(left_HB, self.bilinear).transpose(0, 1).flatten(1) * right
        return (self.logits[0](left) + self.logits[1](right)).squeeze(1) + fused.sum(1)


class Gate(nn.Module):
    """(vectors [B, N, D]) -> [B, width], from the vectors of `fields`, or [1, width] if there are none."""

    def __init__(self, width: int, dim: int, sizes: Sequence[int], fields: Sequence[int]) -> None:
        super().__init__()
        self._fields = list(fields)
        self.constant = None if fields else nn.Parameter(torch.zeros(1, dim))
        self.hidden = mlp(dim * max(len(fields), 1), sizes)
        self.out = nn.Linear(sizes[-1], width)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        context = vectors_BND[:, self._fields].flatten(1) if self.constant is None else self.constant
        return 2 * torch.sigmoid(self.out(self.hidden(context)))
