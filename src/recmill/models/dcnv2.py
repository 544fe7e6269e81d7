"""DCN V2: DLRM with low-rank cross layers instead of dot products (Wang et al., 2021; MLPerf's DLRM-DCNv2).

As in TorchRec's DLRM_DCN, cross layers and top MLP are stacked, and there are no experts.
"""

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.models.click_model import KIND, TASK, ClickModelConfig, averaged, tables, width_of_all
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickModelConfig):
    needs_one_width: ClassVar[bool] = False

    num_cross_layers: PositiveInt = key(3, "Number of cross layers: N of them multiply up to N + 1 inputs.", le=1000)
    cross_rank: PositiveInt = key(512, "Rank of each cross layer's matrix.", le=10**6)


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import CrossInteraction

    declared = tables(config, description)
    in_features = width_of_all(config, declared)
    interaction = CrossInteraction(in_features, config.num_cross_layers, config.cross_rank)
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp, others=config.regularization())
    return ClickNetwork(declared, layers, interaction, device, averaged(config, description))
