"""The network of every sequence model: a transformer over the items of a history."""

from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.kernels.layers import UsesKernels
from recmill.nn.cross_entropy import cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.losses import SOFTMAX, Loss, gbce_sum
from recmill.nn.norms import apply_norm, make_norm
from recmill.nn.rows import Rows
from recmill.nn.transformer import EncoderBlock, TransformerShape
from recmill.tables.spec import TableSpec


class ItemTransformer(UsesKernels, nn.Module):
    """B rows with N tokens altogether, D dims, M queries, V items.

    `head`: an item's output weights are those of a linear layer, or `tied` to its table row.
    """

    def __init__(
        self,
        table: TableSpec,
        num_items: int,
        shape: TransformerShape,
        device: torch.device,
        head: Literal["linear", "tied"] = "linear",
        loss: Loss = SOFTMAX,
    ) -> None:
        super().__init__()
        self._feature = table.feature
        self._num_items = num_items
        self._loss = loss
        config = EmbeddingConfig(
            name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
        )
        self.tables = EmbeddingCollection(tables=[config], device=device)
        self.places = nn.Parameter(torch.randn(shape.max_length, table.dim) * 0.02)  # row -1: the last position
        self.norm = make_norm(shape.norm, shape.max_length, table.dim)
        self.dropout = RowDropout(shape.dropout, site=0)
        self.blocks = nn.ModuleList(EncoderBlock(table.dim, shape, 1 + 2 * layer) for layer in range(shape.num_layers))
        self.last_norm = nn.LayerNorm(table.dim)
        self.output = nn.Linear(table.dim, num_items) if head == "linear" else None
        self.bias = nn.Parameter(torch.zeros(num_items)) if head == "tied" else None

    def forward(
        self,
        tokens_N: Tensor,
        lengths_B: Tensor,
        queries_M: Tensor,
        row_keys_B: Tensor,
        answers_M: Tensor | None = None,
        weights_M: Tensor | None = None,
        negatives_K: Tensor | None = None,
    ) -> Tensor:
        """Return logits [M, V] of the queries, or with answers the weighted sum of their losses.

        Column j is item j + 1. gBCE scores only the answers and the negatives.
        """
        rows = Rows(lengths_B, queries_M, row_keys_B, len(tokens_N))
        items = None
        if self._loss.name == "gbce" and answers_M is not None and negatives_K is not None:
            items = torch.cat([answers_M, negatives_K])
        embedded_ND, head_VD, bias_V = self._embed(tokens_N, items)
        x_ND = self.dropout(apply_norm(self.norm, embedded_ND + self._position_vectors(rows), rows), rows)
        for block in self.blocks:
            x_ND = block(x_ND, rows, outputs="queries" if block is self.blocks[-1] else "all")
        queries_MD = self.last_norm(x_ND)
        if answers_M is None or weights_M is None:
            return torch.addmm(bias_V, queries_MD, head_VD.t())
        if items is not None:
            power = self._loss.power(self._num_items)
            return gbce_sum(queries_MD, head_VD, bias_V, items, weights_M, power)
        smoothing = self._loss.smoothing
        return cross_entropy_sum(queries_MD, head_VD, bias_V, answers_M - 1, weights_M, smoothing, self.kernel_library)

    def _position_vectors(self, rows: Rows) -> Tensor:
        return nn.functional.embedding(len(self.places) - 1 - rows.from_end_N, self.places)

    def _embed(self, tokens_N: Tensor, items_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' vectors [N, D], and output weights [V, D] and biases [V].

        `items_V` None: those of all items. A tied head shares the tokens' lookup: the fused
        optimizers update a table once per lookup.
        """
        ids = tokens_N
        if self.bias is not None:
            all_items = torch.arange(1, self._num_items + 1, device=ids.device)
            ids = torch.cat([ids, all_items if items_V is None else items_V])
        lengths = torch.full((1,), len(ids), dtype=torch.int32, device=ids.device)
        sparse = KeyedJaggedTensor(keys=[self._feature], values=ids, lengths=lengths)
        values = self.tables(sparse)[self._feature].values()
        values_ND, weight_VD, bias_V = values[: len(tokens_N)], values[len(tokens_N) :], self.bias
        if self.output is not None:
            weight_VD, bias_V = self.output.weight, self.output.bias
            weight_VD = weight_VD if items_V is None else weight_VD[items_V - 1]
        assert bias_V is not None
        return values_ND, weight_VD, bias_V if items_V is None else bias_V[items_V - 1]
