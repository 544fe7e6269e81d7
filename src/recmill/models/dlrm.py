"""DLRM: click-through rate from dense and sparse features (Naumov et al., 2019).

As in TorchRec's version, layers start with torch's initialization unless `init` says otherwise. With
`interaction_itself` the products are ordered by rows of the upper triangle; OneFlow orders them by the lower one.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from recmill.models.click_model import KIND, TASK, ClickModelConfig, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickModelConfig):
    interaction_itself: bool = Field(False, description="Include the dot product of each vector with itself.")
    init: Literal["torch", "dlrm"] = Field(
        "torch", description="Initial layer weights: torch's default (TorchRec), or normal (original DLRM, OneFlow)."
    )
    pad_to_multiple_of: PositiveInt = Field(
        16, description="Pad the input of both MLPs with zeros to a multiple of this; faster, with the same result."
    )


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    """Build the network with its tables on `device` ('meta' declares them only) and its layers in memory."""
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import DotInteraction

    interaction = DotInteraction(
        len(description.sparse) + 1, config.embedding_dim, config.interaction_itself, config.pad_to_multiple_of
    )
    layers = DenseLayers(
        len(description.dense), config.bottom_mlp, config.top_mlp, config.init, config.pad_to_multiple_of
    )
    return ClickNetwork(tables(config, description), layers, interaction, device)
