"""DLRM: click-through rate from dense and sparse features (Naumov et al., 2019).

As in TorchRec's version, layers start with torch's own initialisation unless `init` says otherwise. With
`interaction_itself` the products come in rows of the upper triangle; OneFlow's come in those of the lower one.
"""

from typing import TYPE_CHECKING, Literal

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
    interaction_itself: bool = Field(False, description="Also each vector's dot product with itself.")
    init: Literal["torch", "dlrm"] = Field(
        "torch", description="How layers start: as torch's do (TorchRec), or normal (original DLRM, OneFlow)."
    )
    pad_to_multiple_of: PositiveInt = Field(
        16, description="Zeros fill up the input of both MLPs to a multiple: even rows are faster. Changes no result."
    )


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    """Tables on `device` ('meta': only declared), all else in memory."""
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import DotInteraction

    interaction = DotInteraction(
        len(description.sparse) + 1, config.embedding_dim, config.interaction_itself, config.pad_to_multiple_of
    )
    layers = DenseLayers(
        len(description.dense), config.bottom_mlp, config.top_mlp, config.init, config.pad_to_multiple_of
    )
    return ClickNetwork(tables(config, description), layers, interaction, device)
