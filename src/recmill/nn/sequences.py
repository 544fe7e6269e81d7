"""The network of every sequence model: items of a history through a transformer, and which item is asked for."""

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.cross_entropy import cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.transformer import EncoderBlock
from recmill.schema import PAD_ITEM, TableSpec


class ItemTransformer(nn.Module):
    """B rows, T places (left-padded), D dims, M queries, V items, N real items of the batch.

    `is_causal`: a place sees itself and what was before (SASRec), else both sides (BERT4Rec). `is_tied`: an item's
    output weights are its row of the table, else a layer of its own.
    """

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
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self._feature, self._num_items = table.feature, num_items
        self._is_causal, self._label_smoothing = is_causal, label_smoothing
        config = EmbeddingConfig(
            name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
        )
        self.tables = EmbeddingCollection(tables=[config], device=device)
        self.places = nn.Parameter(torch.randn(max_length, table.dim) * 0.02)  # row -1 is the last place
        self.norm, self.dropout = nn.LayerNorm(table.dim), RowDropout(dropout, site=0)
        self.blocks = nn.ModuleList(
            EncoderBlock(table.dim, num_heads, dropout, site=1 + 2 * layer) for layer in range(num_layers)
        )
        self.last_norm = nn.LayerNorm(table.dim)
        self.output = None if is_tied else nn.Linear(table.dim, num_items)
        self.bias = nn.Parameter(torch.zeros(num_items)) if is_tied else None

    def forward(
        self,
        tokens_BT: Tensor,
        queries_M: Tensor,
        row_keys_B: Tensor,
        answers_M: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> Tensor:
        """Logits [M, V] of the queries only, column j is item j + 1; with answers the weighted sum of their losses."""
        real_BT = tokens_BT != PAD_ITEM
        embedded_BTD, items_VD = self._embed(tokens_BT, real_BT)
        x_BTD = self.dropout(self.norm(embedded_BTD + self.places[-tokens_BT.shape[1] :]), row_keys_B)
        may_see = self._may_see(real_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, may_see, row_keys_B)
        asked_MD = self.last_norm(x_BTD.flatten(0, 1).index_select(0, queries_M))
        weight_VD, bias_V = (self.output.weight, self.output.bias) if self.output is not None else (items_VD, self.bias)
        assert bias_V is not None
        if answers_M is None or weights_M is None:
            return torch.addmm(bias_V, asked_MD, weight_VD.t())
        return cross_entropy_sum(asked_MD, weight_VD, bias_V, answers_M - 1, weights_M, self._label_smoothing)

    def _may_see(self, real_BT: Tensor) -> Tensor:
        """[B, 1, T or 1, T]. Where nothing is real before a place, it sees itself: it must see something."""
        if not self._is_causal:
            return real_BT[:, None, None, :]
        length = real_BT.shape[1]
        before_TT = torch.ones(length, length, dtype=torch.bool, device=real_BT.device).tril()
        itself_TT = torch.eye(length, dtype=torch.bool, device=real_BT.device)
        return ((real_BT[:, None, :] & before_TT) | itself_TT)[:, None]

    def _embed(self, tokens_BT: Tensor, real_BT: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D], zero for padding, and for a tied head all items [V, D].

        In one lookup: the fused optimizers update a table once for each.
        """
        ids_N, lengths = tokens_BT[real_BT], real_BT.sum(1, dtype=torch.int32)
        if self.output is None:
            every = torch.arange(1, self._num_items + 1, device=ids_N.device)
            ids_N, lengths = torch.cat([ids_N, every]), torch.cat([lengths, lengths.new_tensor([self._num_items])])
        ids = KeyedJaggedTensor.from_lengths_sync(keys=[self._feature], values=ids_N, lengths=lengths)
        values_ND = self.tables(ids)[self._feature].values()
        places = real_BT.flatten().nonzero().squeeze(1)
        empty = values_ND.new_zeros(tokens_BT.numel(), values_ND.shape[1])
        embedded = empty.index_copy(0, places, values_ND[: len(places)]).view(*tokens_BT.shape, -1)
        return embedded, values_ND[len(places) :]
