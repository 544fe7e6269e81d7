"""The network of every sequence model: a transformer over the items of a history."""

from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.kernels.layers import UsesKernels
from recmill.nn.cross_entropy import Seen, cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.losses import Loss, sampled_sum
from recmill.nn.norms import apply_norm, make_norm
from recmill.nn.rows import Rows
from recmill.nn.transformer import EncoderBlock, TransformerShape
from recmill.tables.spec import TableSpec

Head = Literal["linear", "tied"]


class ItemTransformer(UsesKernels, nn.Module):
    """N tokens of B rows, D dims, M queries, V items.

    `head`: the output weights of an item belong to a linear layer, or are its table row (`tied`).
    """

    def __init__(
        self, table: TableSpec, num_items: int, shape: TransformerShape, device: torch.device, head: Head, loss: Loss
    ) -> None:
        super().__init__()
        self._feature = table.feature
        self._num_items = num_items
        self._loss = loss
        self._is_causal = shape.attention == "causal"
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
        longest: int,
        queries_M: Tensor,
        row_keys_B: Tensor,
        targets: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return logits [M, V] of the queries; column j is item j + 1.

        With `targets`, which are answers [M], weights [M] and negatives [K], return the weighted sum of the losses
        instead. Sampled losses score only the answers and the negatives.
        """
        rows = Rows(lengths_B, longest, queries_M, row_keys_B, len(tokens_N))
        items = None
        if targets and self._loss.name != "softmax":
            answers_M, _, negatives_K = targets
            items = torch.cat([answers_M, negatives_K])
        embedded_ND, head_VD, bias_V = self._embed(tokens_N, items)
        positions_ND = nn.functional.embedding(len(self.places) - 1 - rows.from_end_N, self.places)
        x_ND = self.dropout(apply_norm(self.norm, embedded_ND + positions_ND, rows), rows)
        for block in self.blocks:
            x_ND = block(x_ND, rows, outputs="queries" if block is self.blocks[-1] else "all")
        queries_MD = self.last_norm(x_ND)
        if not targets:
            return torch.addmm(bias_V, queries_MD, head_VD.t())
        answers_M, weights_M, _ = targets
        if items is not None:
            return sampled_sum(self._loss, queries_MD, head_VD, bias_V, items, weights_M, self._num_items)
        inputs = queries_MD, head_VD, bias_V, answers_M - 1, weights_M
        seen = None
        if self._loss.excludes_seen:
            ends_M = queries_M + 1 if self._is_causal else rows.ends_M
            seen = Seen(tokens_N, rows.begins_M, ends_M, longest)
        return cross_entropy_sum(*inputs, self._loss.smoothing, self.kernel_library, seen)

    def _embed(self, tokens_N: Tensor, items_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' vectors [N, D], and the items' output weights [V, D] and biases [V].

        `items_V` None: all items. A tied head shares the tokens' lookup, because fused optimizers
        update a table once per lookup.
        """
        ids = tokens_N
        if self.output is None:
            all_items = torch.arange(1, self._num_items + 1, device=ids.device)
            ids = torch.cat([ids, all_items if items_V is None else items_V])
        lengths = torch.full((1,), len(ids), dtype=torch.int32, device=ids.device)
        # With its length, so that TorchRec does not read it from the GPU.
        sparse = KeyedJaggedTensor([self._feature], ids, lengths=lengths, stride=1, length_per_key=[len(ids)])
        vectors = self.tables(sparse)[self._feature].values()
        weight_VD, bias_V = vectors[len(tokens_N) :], self.bias
        if self.output is not None:
            weight_VD = self.output.weight if items_V is None else self.output.weight[items_V - 1]
            bias_V = self.output.bias
        assert bias_V is not None
        return vectors[: len(tokens_N)], weight_VD, bias_V if items_V is None else bias_V[items_V - 1]
