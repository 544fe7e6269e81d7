"""Logistic regression: a weight per id and per dense feature. It learns no interactions: a yardstick for what does."""

from typing import TYPE_CHECKING, Literal

from recmill.config.sections import key
from recmill.models.click_model import KIND, TASK, ClickTablesConfig, averaged, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickTablesConfig):
    embedding_dim: Literal[4] = key(4, "Width of the tables, FBGEMM's smallest; the first value is an id's weight.")


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.field_networks import LinearNetwork

    return LinearNetwork(tables(config, description), len(description.dense), device, averaged(config, description))
