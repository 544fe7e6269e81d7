"""The network of click models with a bottom and a top MLP, which differ in their interaction; and what all share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill.nn.interactions import Interaction
from recmill.nn.mlp import NONE, Init, Regularization, linear, mlp
from recmill.tables.spec import TableSpec


@dataclass(frozen=True)
class DenseLayers:
    """The MLPs below and above the interaction. Dense features are padded with zeros."""

    num_dense: int
    bottom_mlp: Sequence[int]
    top_mlp: Sequence[int]
    init: Init = "torch"
    pad_to_multiple_of: int = 1
    others: Regularization = NONE  # dropout only above the interaction


class TableNetwork(nn.Module):
    """What every click model has: its tables, and their vectors in the order of the features.

    `averaged`: features whose vectors are averaged over a row's ids; those of the others are summed.
    """

    def __init__(self, tables: list[TableSpec], device: torch.device, averaged: Collection[str]) -> None:
        super().__init__()
        self._columns = [(feature, table.dim) for table in tables for feature in table.features]
        self._features = [feature for feature, _ in self._columns]
        self._averaged = list(averaged)
        self.tables = pooled_tables(tables, device)

    def bags(self, pooled: KeyedTensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return the vectors of all features, side by side: [B, width of all]."""
        bags = in_order(pooled, self._features)
        if self._averaged:
            bags = averaged_over_ids(bags, sparse, self._columns, self._averaged)
        return bags


class ClickNetwork(TableNetwork):
    """Bottom MLP over dense features, pooled tables, their interaction, top MLP, one logit."""

    def __init__(
        self,
        tables: list[TableSpec],
        layers: DenseLayers,
        interaction: Interaction,
        device: torch.device,
        averaged: Collection[str] = (),
    ) -> None:
        super().__init__(tables, device, averaged)
        self._dense_padding = -layers.num_dense % layers.pad_to_multiple_of
        of_bottom = replace(layers.others, dropout=0.0)
        self.bottom = mlp(layers.num_dense, layers.bottom_mlp, layers.init, self._dense_padding, of_bottom)
        self.interaction = interaction
        self.top = mlp(interaction.out_features, layers.top_mlp, layers.init, interaction.padding, layers.others)
        self.logit = linear(layers.top_mlp[-1], 1, layers.init)

    def forward(self, dense_BF: Tensor, sparse: KeyedJaggedTensor, row_keys_B: Tensor | None = None) -> Tensor:
        """Return logits [B]."""
        pooled = self.tables(sparse)  # sharded tables exchange rows while the bottom MLP computes
        if self._dense_padding:
            dense_BF = F.pad(dense_BF, (0, self._dense_padding))
        dense_BD = self.bottom(dense_BF, row_keys_B)
        return self.logit(self.combined(dense_BD, self.bags(pooled, sparse), row_keys_B)).squeeze(1)

    def combined(self, dense_BD: Tensor, bags: Tensor, row_keys_B: Tensor | None) -> Tensor:
        """Return what the logit is a linear function of."""
        return self.top(self.interaction(dense_BD, bags), row_keys_B)


class ParallelNetwork(ClickNetwork):
    """The same, but the top MLP is over all vectors, beside the interaction, and the logit is linear in both outputs.

    As DCN V2 "parallel" (Wang et al., 2021); the interaction keeps the width of its input.
    """

    def __init__(
        self,
        tables: list[TableSpec],
        layers: DenseLayers,
        interaction: Interaction,
        device: torch.device,
        averaged: Collection[str] = (),
    ) -> None:
        super().__init__(tables, layers, interaction, device, averaged)
        self.logit = linear(interaction.out_features + layers.top_mlp[-1], 1, layers.init)

    def combined(self, dense_BD: Tensor, bags: Tensor, row_keys_B: Tensor | None) -> Tensor:
        crossed = self.interaction(dense_BD, bags)
        return torch.cat([crossed, self.top(torch.cat([dense_BD, bags], dim=1), row_keys_B)], dim=1)


def pooled_tables(tables: list[TableSpec], device: torch.device) -> EmbeddingBagCollection:
    """Return the tables as a module, which sums the vectors of a row's ids for each feature."""
    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=[*t.features])
        for t in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=device)


def in_order(pooled: KeyedTensor, features: list[str]) -> Tensor:
    """Return the columns in the order of `features`; a sharded collection may order them differently."""
    if pooled.keys() == features:
        return pooled.values()
    by_name = pooled.to_dict()
    return torch.cat([by_name[feature] for feature in features], dim=1)


def averaged_over_ids(
    bags: Tensor, sparse: KeyedJaggedTensor, columns: list[tuple[str, int]], averaged: list[str]
) -> Tensor:
    """Divide the sums of `averaged` features by the number of a row's ids. `columns`: features and widths, in order."""
    numbers = dict(zip(sparse.keys(), sparse.lengths().view(len(sparse.keys()), -1, 1).clamp(min=1), strict=True))
    one = torch.ones_like(next(iter(numbers.values())))
    return bags / torch.cat([(numbers[f] if f in averaged else one).expand(-1, dim) for f, dim in columns], dim=1)


# TorchRec's pipeline traces forward() symbolically, which cannot branch on values.
torch.fx.wrap("in_order")
torch.fx.wrap("averaged_over_ids")
