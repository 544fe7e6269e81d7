"""DCN V2 on DLRM's frame: low-rank cross layers instead of dot products (Wang et al., 2021; MLPerf's DLRM-DCNv2).

As in TorchRec's DLRM_DCN the layers are stacked (crosses, then the top MLP) and have no experts.
"""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from recmill.models.click_model import ClickModelConfig, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]

TASK = "ctr"
KIND = "clicks"  # of dataset


class Config(ClickModelConfig):
    num_cross_layers: PositiveInt = Field(3, description="Cross layers: products of up to so many + 1 inputs.")
    cross_rank: PositiveInt = Field(512, description="Rank of each cross layer's matrix.")


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    """Tables on `device` ('meta': only declared), all else in memory."""
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import CrossInteraction

    interaction = CrossInteraction(
        len(description.sparse) + 1, config.embedding_dim, config.num_cross_layers, config.cross_rank
    )
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp)
    return ClickNetwork(tables(config, description), layers, interaction, device)
