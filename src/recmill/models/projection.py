"""DLRM with dot products between learned projections of all vectors (TorchRec's DLRM_Projection)."""

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

    branch1_mlp: list[PositiveInt] = key(
        [128, 128], "Layer widths over all vectors; the last is a multiple of embedding_dim.", min_length=1
    )
    branch2_mlp: list[PositiveInt] = key([128, 128], "The same for the other factor of the dot products.", min_length=1)

    def contradictions(self) -> list[str]:
        return super().contradictions() + [
            f"model.{name} ends with {sizes[-1]}, which is not a multiple of model.embedding_dim = "
            f"{self.embedding_dim}. Make it one: it is split into vectors of that width."
            for name, sizes in (("branch1_mlp", self.branch1_mlp), ("branch2_mlp", self.branch2_mlp))
            if sizes[-1] % self.embedding_dim
        ]


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.click_network import ClickNetwork, DenseLayers
    from recmill.nn.interactions import ProjectionInteraction

    declared = tables(config, description)
    in_features = width_of_all(config, declared)
    interaction = ProjectionInteraction(in_features, config.embedding_dim, config.branch1_mlp, config.branch2_mlp)
    layers = DenseLayers(len(description.dense), config.bottom_mlp, config.top_mlp, others=config.regularization())
    return ClickNetwork(declared, layers, interaction, device, averaged(config, description))
