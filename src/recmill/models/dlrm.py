"""DLRM: click-through rate from dense and sparse features (Naumov et al., 2019).

As in TorchRec's version, layers start with torch's initialization unless `init` says otherwise. With
`interaction_itself` the products come in the order of the upper triangle's rows; OneFlow uses the lower triangle.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.models.click_model import KIND, TASK, ClickModelConfig, averaged, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickModelConfig):
    interaction_itself: bool = key(False, "Include the dot product of each vector with itself.")
    init: Literal["torch", "dlrm"] = key(
        "torch", "Initial layer weights: torch's default (TorchRec), or normal (original DLRM, OneFlow)."
    )
    pad_to_multiple_of: PositiveInt = key(
        16, "Pad the input of both MLPs with zeros to a multiple of this; faster, with the same result."
    )


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import DotInteraction

    num_vectors = len(description.sparse) + 1  # the dense features become one as well
    padding = config.pad_to_multiple_of
    interaction = DotInteraction(num_vectors, config.embedding_dim, config.interaction_itself, padding)
    sizes = len(description.dense), config.bottom_mlp, config.top_mlp
    layers = DenseLayers(*sizes, config.init, padding, config.regularization())
    return ClickNetwork(tables(config, description), layers, interaction, device, averaged(config, description))
