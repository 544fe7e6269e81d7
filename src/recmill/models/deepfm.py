"""DeepFM: a factorization machine and an MLP over the same vectors, added (Guo et al., 2017)."""

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.models import fm
from recmill.models.click_model import KIND, TASK, ClickMlpsConfig, averaged, tables
from recmill.schema import ClicksDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(fm.Config, ClickMlpsConfig):
    deep_mlp: list[PositiveInt] = key([64, 32], "Layer widths over all vectors, before the logit.", min_length=1)


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.field_networks import FactorNetwork

    num_dense = len(description.dense)
    features = tables(config, description), num_dense
    means = averaged(config, description)
    return FactorNetwork(*features, config.deep_mlp, device, means, config.regularization())
