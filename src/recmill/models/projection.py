"""DLRM with dot products between learned projections of all vectors (TorchRec's DLRM_Projection)."""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from recmill.models.click_model import KIND, TASK, ClickModelConfig, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickModelConfig):
    branch1_mlp: list[PositiveInt] = Field(
        [128, 128], min_length=1, description="Layer widths over all vectors; the last is a multiple of embedding_dim."
    )
    branch2_mlp: list[PositiveInt] = Field(
        [128, 128], min_length=1, description="The same for the other factor of the dot products."
    )

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        for key, sizes in (("branch1_mlp", self.branch1_mlp), ("branch2_mlp", self.branch2_mlp)):
            if sizes[-1] % self.embedding_dim:
                problems.append(
                    f"model.{key} ends with {sizes[-1]}, which is not a multiple of model.embedding_dim = "
                    f"{self.embedding_dim}. Make it one: it is split into vectors of that width."
                )
        return problems


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    """Build the network with its tables on `device` ('meta' declares them only) and its layers in memory."""
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import ProjectionInteraction

    interaction = ProjectionInteraction(
        len(description.sparse) + 1, config.embedding_dim, config.branch1_mlp, config.branch2_mlp
    )
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp)
    return ClickNetwork(tables(config, description), layers, interaction, device)
