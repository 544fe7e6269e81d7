"""DCN V2: DLRM with cross layers instead of dot products (Wang et al., 2021; MLPerf's DLRM-DCNv2).

By default cross layers have low rank and the top MLP is stacked on them, as in TorchRec's DLRM_DCN. No experts.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

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
    cross_rank: NonNegativeInt = key(512, "Rank of each cross layer's matrix; 0: full.", le=10**6)
    structure: Literal["stacked", "parallel"] = key(
        "stacked", "The top MLP is over the cross layers, or beside them: the logit is then linear in both."
    )


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.click_network import ClickNetwork, DenseLayers, ParallelNetwork
    from recmill.nn.interactions import CrossInteraction

    declared = tables(config, description)
    in_features = width_of_all(config, declared)
    interaction = CrossInteraction(in_features, config.num_cross_layers, config.cross_rank)
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp, others=config.regularization())
    network = ParallelNetwork if config.structure == "parallel" else ClickNetwork
    return network(declared, layers, interaction, device, averaged(config, description))
