"""A factorization machine: a weight per feature and the dot products of all pairs of features (Rendle, 2010)."""

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.models.click_model import KIND, TASK, ClickTablesConfig, averaged, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickTablesConfig):
    embedding_dim: PositiveInt = key(16, "Width of the tables: a weight, and one factor less than this.", ge=2)


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.field_networks import FactorNetwork

    num_dense = len(description.dense)
    return FactorNetwork(tables(config, description), num_dense, [], device, averaged(config, description))
