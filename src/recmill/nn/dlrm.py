"""The DLRM network (Naumov et al., 2019) on TorchRec's embedding tables."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp
from recmill.schema import TableSpec


class Dlrm(nn.Module):
    """Bottom MLP over dense features, sum-pooled tables, dot products of all pairs, top MLP -> one logit."""

    def __init__(
        self,
        tables: list[TableSpec],
        num_dense: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._features = [table.feature for table in tables]
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table.name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[table.feature]
                )
                for table in tables
            ],
            device=device,
        )
        self.bottom = mlp(num_dense, bottom_mlp)
        self.interaction = DotInteraction(len(tables) + 1, tables[0].dim)
        self.top = mlp(self.interaction.out_features, top_mlp)
        self.logit = nn.Linear(top_mlp[-1], 1)

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        pooled = self.tables(sparse).to_dict()
        # By name: the order of a sharded collection's columns depends on the sharding plan.
        sparse_BND = torch.stack([pooled[feature] for feature in self._features], dim=1)
        return self.logit(self.top(self.interaction(self.bottom(dense_BF), sparse_BND))).squeeze(1)
