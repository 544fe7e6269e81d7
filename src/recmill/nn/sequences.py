"""The network of every sequence model: items of a history through a transformer, and which item is asked for."""

import ctypes

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.cross_entropy import cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.norms import Norm, norm_of, normed
from recmill.nn.rows import Rows
from recmill.nn.sampled import SOFTMAX, Loss, gbce_sum
from recmill.nn.transformer import EncoderBlock
from recmill.tables.spec import TableSpec


class ItemTransformer(nn.Module):
    """B rows of N tokens together, D dims, M queries, V items.

    `is_causal`: a place sees itself and what was before (SASRec), else both sides (BERT4Rec). `is_tied`: an item's
    output weights are its row of the table, else a layer of its own.
    """

    native: ctypes.CDLL | None = None

    def __init__(
        self,
        table: TableSpec,
        num_items: int,
        max_length: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        device: torch.device,
        *,
        is_causal: bool = False,
        is_tied: bool = False,
        norm: Norm = "place",
        loss: Loss = SOFTMAX,
    ) -> None:
        super().__init__()
        self._feature, self._num_items = table.feature, num_items
        self._loss = loss
        config = EmbeddingConfig(
            name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
        )
        self.tables = EmbeddingCollection(tables=[config], device=device)
        self.places = nn.Parameter(torch.randn(max_length, table.dim) * 0.02)  # row -1 is the last place
        self.norm, self.dropout = norm_of(norm, max_length, table.dim), RowDropout(dropout, site=0)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                table.dim,
                num_heads,
                dropout,
                1 + 2 * layer,
                is_causal,
                (norm_of(norm, max_length, table.dim), norm_of(norm, max_length, table.dim)),
            )
            for layer in range(num_layers)
        )
        self.last_norm = nn.LayerNorm(table.dim)
        self.output = None if is_tied else nn.Linear(table.dim, num_items)
        self.bias = nn.Parameter(torch.zeros(num_items)) if is_tied else None

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
        """Logits [M, V] of the queries only, column j is item j + 1; with answers the weighted sum of their losses.

        Of a loss that samples, only the answers and the negatives are looked at.
        """
        rows = Rows(lengths_B, queries_M, row_keys_B, len(tokens_N))
        items = None
        if self._loss.name == "gbce" and answers_M is not None and negatives_K is not None:
            items = torch.cat([answers_M, negatives_K])
        embedded_ND, head_VD, bias_V = self._embed(tokens_N, items)
        x_ND = self.dropout(normed(self.norm, embedded_ND + self._places_of(rows), rows), rows)
        for block in self.blocks:
            x_ND = block(x_ND, rows, is_last=block is self.blocks[-1])
        asked_MD = self.last_norm(x_ND)
        if answers_M is None or weights_M is None:
            return torch.addmm(bias_V, asked_MD, head_VD.t())
        if items is not None:
            power = self._loss.power(self._num_items)
            return gbce_sum(asked_MD, head_VD, bias_V, items, weights_M, power)
        return cross_entropy_sum(asked_MD, head_VD, bias_V, answers_M - 1, weights_M, self._loss.smoothing, self.native)

    def _places_of(self, rows: Rows) -> Tensor:
        return nn.functional.embedding(len(self.places) - 1 - rows.from_end_N, self.places)

    def _embed(self, tokens_N: Tensor, items_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[N, D], and output weights [V, D] and biases [V] of these items, or of all.

        With a tied head in one lookup: the fused optimizers update a table once for each.
        """
        ids = tokens_N
        if self.bias is not None:
            every = torch.arange(1, self._num_items + 1, device=ids.device)
            ids = torch.cat([ids, every if items_V is None else items_V])
        lengths = torch.full((1,), len(ids), dtype=torch.int32, device=ids.device)
        listed = KeyedJaggedTensor(keys=[self._feature], values=ids, lengths=lengths)
        values = self.tables(listed)[self._feature].values()
        values_ND, weight_VD, bias_V = values[: len(tokens_N)], values[len(tokens_N) :], self.bias
        if self.output is not None:
            weight_VD, bias_V = self.output.weight, self.output.bias
            weight_VD = weight_VD if items_V is None else weight_VD[items_V - 1]
        assert bias_V is not None
        return values_ND, weight_VD, bias_V if items_V is None else bias_V[items_V - 1]
