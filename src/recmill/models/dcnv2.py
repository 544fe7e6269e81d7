"""DCN V2: DLRM with low-rank cross layers instead of dot products (Wang et al., 2021; MLPerf's DLRM-DCNv2).

As in TorchRec's DLRM_DCN, cross layers and top MLP are stacked, and there are no experts.
"""

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.models.click_model import KIND, TASK, ClickModelConfig, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickModelConfig):
    num_cross_layers: PositiveInt = key(3, "Number of cross layers: N of them multiply up to N + 1 inputs.")
    cross_rank: PositiveInt = key(512, "Rank of each cross layer's matrix.")


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import CrossInteraction

    num_vectors = len(description.sparse) + 1  # the dense features become one as well
    interaction = CrossInteraction(num_vectors, config.embedding_dim, config.num_cross_layers, config.cross_rank)
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp)
    return ClickNetwork(tables(config, description), layers, interaction, device)
