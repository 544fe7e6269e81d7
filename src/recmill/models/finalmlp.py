"""FinalMLP: two MLPs over differently gated features, joined by a bilinear form (Mao et al., 2023).

As in FuxiCTR's version, dense features are values times learned vectors. Gates read the same vectors as the MLPs; in
FuxiCTR's version they have tables of their own.
"""

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.errors import ConfigError
from recmill.models.click_model import KIND, TASK, ClickMlpsConfig, averaged
from recmill.models.click_model import tables as tables_of_features
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables"]


class Config(ClickMlpsConfig):
    embedding_dim: PositiveInt = key(16, "Width of the tables and of dense features' vectors.")
    stream1_mlp: list[PositiveInt] = key([64, 32], "Layer widths of the first MLP.", min_length=1)
    stream2_mlp: list[PositiveInt] = key([64, 32], "Layer widths of the second MLP.", min_length=1)
    num_heads: PositiveInt = key(1, "Parts of both MLPs' outputs that are multiplied separately.")
    gate_mlp: list[PositiveInt] = key([32], "Hidden layer widths of the gates of both MLPs' inputs; empty: no gates.")
    gate1_features: list[str] = key([], "Features that determine the first gate, such as the user's; empty: none.")
    gate2_features: list[str] = key([], "Features that determine the second gate, such as the item's.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        problems += [
            f"model.{name} ends with {sizes[-1]}, which model.num_heads = {self.num_heads} does not divide. Change one."
            for name, sizes in (("stream1_mlp", self.stream1_mlp), ("stream2_mlp", self.stream2_mlp))
            if sizes[-1] % self.num_heads
        ]
        if not self.gate_mlp and (self.gate1_features or self.gate2_features):
            problems.append("model.gate_mlp is empty, so there are no gates for gate1_features or gate2_features.")
        return problems


def tables(config: Config, description: ClicksDescription) -> list[TableSpec]:
    """Return the tables; raise a ConfigError if keys of [model] do not fit the dataset, before a process is started."""
    known = [feature.name for feature in description.sparse]
    if unknown := [name for name in (*config.gate1_features, *config.gate2_features) if name not in known]:
        fact = f"model.gate1_features, model.gate2_features: the dataset has no table '{unknown[0]}'"
        raise ConfigError(f"{fact}. It has {', '.join(known)}.")
    return tables_of_features(config, description)


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.field_networks import TwoStreamNetwork

    return TwoStreamNetwork(
        tables(config, description),
        len(description.dense),
        (config.stream1_mlp, config.stream2_mlp),
        config.gate_mlp,
        (config.gate1_features, config.gate2_features),
        config.num_heads,
        device,
        averaged(config, description),
        config.regularization(),
    )
