"""Two towers: the vectors of a request and of an item, whose dot product says how well they fit (Yi et al., 2019).

One MLP reads the features of the item, the other all other features. Both outputs have length 1. Trained on rows with
label 1: the item of a row competes with the other items of its global batch (in-batch softmax), whose scores are
corrected for how often they occur.
"""

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat, PositiveInt

from recmill.config.sections import key
from recmill.errors import ConfigError, did_you_mean
from recmill.models.click_model import KIND, ClickTablesConfig, averaged
from recmill.models.click_model import tables as tables_of_features
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "item_features", "tables"]

TASK = "retrieval"


class Config(ClickTablesConfig):
    needs_one_width: ClassVar[bool] = False

    item_id: str = key(..., "The feature whose id says which item a row is about; one id per row.")
    item_features: list[str] = key(
        [], "Other features of items, dense ones too. Those whose role is 'item' in the dataset need not be named."
    )
    request_mlp: list[PositiveInt] = key([64, 32], "Layer widths over the features of requests.", min_length=1)
    item_mlp: list[PositiveInt] = key([64, 32], "Layer widths over the features of items.", min_length=1)
    temperature: PositiveFloat = key(0.05, "Scores are divided by this: smaller values separate items more sharply.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.request_mlp[-1] != self.item_mlp[-1]:
            problems.append(
                f"model.request_mlp ends with {self.request_mlp[-1]}, but model.item_mlp with {self.item_mlp[-1]}: "
                "their outputs are multiplied. Make them equal."
            )
        return problems


def item_features(config: Config, description: ClicksDescription) -> set[str]:
    """Return the features of items; raise a ConfigError if the keys of [model] do not fit the dataset."""
    roles = {feature.name: feature.role for feature in description.sparse} | {
        name: description.dense_roles.get(name) for name in description.dense
    }
    sparse = {feature.name: ids for feature, ids in zip(description.sparse, description.ids_per_row, strict=True)}
    if config.item_id not in sparse:
        meant = did_you_mean(config.item_id, sparse)
        raise ConfigError(
            f"model.item_id: the dataset has no table '{config.item_id}'. {meant}Set model.item_id to the feature that "
            f"identifies an item, one of {', '.join(sparse)}."
        )
    if sparse[config.item_id] != 1:
        raise ConfigError(f"model.item_id: '{config.item_id}' has several ids per row. Name the one id of an item.")
    if unknown := [name for name in config.item_features if name not in roles]:
        raise ConfigError(f"model.item_features: the dataset has no feature '{unknown[0]}'. It has {', '.join(roles)}.")
    found = {config.item_id, *config.item_features, *(name for name, role in roles.items() if role == "item")}
    if len(found) == len(roles):
        raise ConfigError("model.item_features: all features are of items, and none is left for requests. Remove some.")
    for table in tables_of_features(config, description):
        if 0 < len(found & {*table.features}) < len(table.features):
            raise ConfigError(
                f"model.item_features: {', '.join(table.features)} share a table, but not all are features of items."
            )
    return found


def tables(config: Config, description: ClicksDescription) -> list[TableSpec]:
    """Return the tables; raise a ConfigError if keys of [model] do not fit the dataset, before a process is started."""
    item_features(config, description)
    return tables_of_features(config, description)


def build(config: Config, description: ClicksDescription, device: "torch.device") -> "nn.Module":
    from recmill.nn.two_towers import TwoTowers

    of_items = item_features(config, description)
    return TwoTowers(
        tables(config, description),
        [name in of_items for name in description.dense],
        of_items,
        (config.request_mlp, config.item_mlp),
        config.temperature,
        device,
        averaged(config, description),
    )
