"""DLRM: click-through rate from dense and sparse features (Naumov et al., 2019).

As in TorchRec's version, layers start with torch's own initialisation, tables uniform in +-sqrt(1/rows).
"""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt, model_validator

from recmill.config.sections import Section
from recmill.schema import ClicksDescription, TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

TASK = "ctr"
KIND = "clicks"  # of dataset


class Config(Section):
    embedding_dim: PositiveInt = Field(16, multiple_of=4, description="Width of every table; a multiple of 4.")
    bottom_mlp: list[PositiveInt] = Field(
        [64, 16], min_length=1, description="Layers over the dense features; the last equals embedding_dim."
    )
    top_mlp: list[PositiveInt] = Field(
        [64, 32], min_length=1, description="Layers over the interactions, before the logit."
    )

    @model_validator(mode="after")
    def ends_at_the_tables_width(self) -> "Config":
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise ValueError(
                f"model.bottom_mlp ends with {self.bottom_mlp[-1]}, but model.embedding_dim is {self.embedding_dim}: "
                "dot products need them equal."
            )
        return self


def tables(config: Config, about: ClicksDescription) -> list[TableSpec]:
    return [
        TableSpec(f"table_{feature.name}", feature.name, feature.rows, config.embedding_dim, feature.rows**-0.5)
        for feature in about.sparse
    ]


def build(config: Config, about: ClicksDescription, device: "torch.device") -> "nn.Module":
    """Tables on `device` ('meta': only declared), all else in memory."""
    from recmill.nn.dlrm import Dlrm

    return Dlrm(tables(config, about), len(about.dense), config.bottom_mlp, config.top_mlp, device)
