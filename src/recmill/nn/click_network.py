"""The network of every click model, on TorchRec's embedding tables; the models differ in their interaction."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill.nn.interactions import Interaction
from recmill.nn.mlp import Init, linear, mlp
from recmill.tables.spec import TableSpec


class ClickNetwork(nn.Module):
    """Bottom MLP over dense features, sum-pooled tables, their interaction, top MLP -> one logit.

    The dense features are filled up with zeros to a multiple of `pad_dense_to_multiple_of`.
    """

    def __init__(
        self,
        tables: list[TableSpec],
        num_dense: int,
        bottom_mlp: Sequence[int],
        interaction: Interaction,
        top_mlp: Sequence[int],
        device: torch.device,
        init: Init = "torch",
        pad_dense_to_multiple_of: int = 1,
    ) -> None:
        super().__init__()
        self._features = [table.feature for table in tables]
        self._dense_padding = -num_dense % pad_dense_to_multiple_of
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
                )
                for table in tables
            ],
            device=device,
        )
        self.bottom = mlp(num_dense, bottom_mlp, init, self._dense_padding)
        self.interaction = interaction
        self.top = mlp(interaction.out_features, top_mlp, init, interaction.padding)
        self.logit = linear(top_mlp[-1], 1, init)

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        pooled = self.tables(sparse)
        if self._dense_padding:
            dense_BF = F.pad(dense_BF, (0, self._dense_padding))
        dense_BD = self.bottom(dense_BF)
        return self.logit(self.top(self.interaction(dense_BD, _in_order(pooled, self._features)))).squeeze(1)


def _in_order(pooled: KeyedTensor, features: list[str]) -> Tensor:
    """By name: the order of a sharded collection's columns depends on the sharding plan."""
    if pooled.keys() == features:
        return pooled.values()
    by_name = pooled.to_dict()
    return torch.cat([by_name[feature] for feature in features], dim=1)


torch.fx.wrap("_in_order")  # TorchRec's pipeline traces forward() symbolically, and a branch on values cannot be
