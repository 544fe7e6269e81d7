"""The BERT4Rec network (Sun et al., 2019): items of a history, some hidden, and which item each hidden one was."""

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.dropout import RowDropout
from recmill.nn.transformer import EncoderBlock
from recmill.schema import PAD_ITEM, TableSpec


class Bert4Rec(nn.Module):
    """B rows, T places (left-padded), D dims, M queries, V items."""

    def __init__(
        self,
        table: TableSpec,
        num_items: int,
        max_length: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._feature = table.feature
        config = EmbeddingConfig(
            name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
        )
        self.tables = EmbeddingCollection(tables=[config], device=device)
        self.places = nn.Parameter(torch.randn(max_length, table.dim) * 0.02)  # row -1 is the last place
        self.norm, self.dropout = nn.LayerNorm(table.dim), RowDropout(dropout, site=0)
        self.blocks = nn.ModuleList(
            EncoderBlock(table.dim, num_heads, dropout, site=1 + 2 * layer) for layer in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(table.dim), nn.Linear(table.dim, num_items))

    def forward(self, tokens_BT: Tensor, queries_M: Tensor, row_keys_B: Tensor) -> Tensor:
        """Logits [M, V] of the queries only; column j is item j + 1."""
        real_BT = tokens_BT != PAD_ITEM
        x_BTD = self._embed(tokens_BT, real_BT) + self.places[-tokens_BT.shape[1] :]
        x_BTD = self.dropout(self.norm(x_BTD), row_keys_B)
        may_see_B11T = real_BT[:, None, None, :]
        for block in self.blocks:
            x_BTD = block(x_BTD, may_see_B11T, row_keys_B)
        return self.head(x_BTD.flatten(0, 1).index_select(0, queries_M))

    def _embed(self, tokens_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Looks up real items only; padding is zero."""
        items = KeyedJaggedTensor.from_lengths_sync(
            keys=[self._feature], values=tokens_BT[real_BT], lengths=real_BT.sum(1, dtype=torch.int32)
        )
        values_ND = self.tables(items)[self._feature].values()
        places = real_BT.flatten().nonzero().squeeze(1)
        empty = values_ND.new_zeros(tokens_BT.numel(), values_ND.shape[1])
        return empty.index_copy(0, places, values_ND).view(*tokens_BT.shape, -1)
