"""BERT4Rec: the next item from both sides of a history (Sun et al., 2019).

Differs from the paper: pre-norm blocks, an output layer of its own instead of the item table's transpose, hidden
items are always replaced by the mask, no dropout of attention weights.
"""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt, model_validator

from recmill.config.sections import Section
from recmill.schema import HistoriesDescription, TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

TASK = "next_item"
KIND = "histories"  # of dataset


class Config(Section):
    embedding_dim: PositiveInt = Field(64, multiple_of=4, description="Width of items and layers; a multiple of 4.")
    num_layers: PositiveInt = Field(2, description="Transformer blocks.")
    num_heads: PositiveInt = Field(2, description="Attention heads; embedding_dim is a multiple of it.")
    max_length: int = Field(50, ge=2, description="Items of a history that the model sees at once.")
    dropout: float = Field(0.1, ge=0.0, lt=1.0, description="Share of activations dropped in training.")
    mask_prob: float = Field(0.2, gt=0.0, le=1.0, description="Share of a window's items that are hidden.")
    mask_last_only: float = Field(
        0.1, ge=0.0, le=1.0, description="Share of windows where just the last item is hidden, as at evaluation."
    )
    window_stride: int = Field(
        0, ge=0, description="Items between the ends of a long history's windows; 0: max_length, no overlap."
    )

    @model_validator(mode="after")
    def sizes_fit_together(self) -> "Config":
        problems = []
        if self.embedding_dim % self.num_heads:
            problems.append(
                f"model.embedding_dim = {self.embedding_dim} is not a multiple of model.num_heads = {self.num_heads}."
            )
        if self.window_stride > self.max_length:
            problems.append(
                f"model.window_stride = {self.window_stride} is larger than model.max_length = {self.max_length}: "
                "items between windows would never be trained on."
            )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self


def tables(config: Config, about: HistoriesDescription) -> list[TableSpec]:
    """One table: padding (row 0), the items, the mask (last row)."""
    return [TableSpec("item", "item", about.num_items + 2, config.embedding_dim, init_bound=0.05)]


def masking(config: Config) -> dict[str, float]:
    """How training examples are made; the fields of `data.histories.Masking`."""
    return {
        "max_length": config.max_length,
        "stride": config.window_stride or config.max_length,
        "probability": config.mask_prob,
        "last_only": config.mask_last_only,
    }


def build(config: Config, about: HistoriesDescription, device: "torch.device") -> "nn.Module":
    """Tables on `device` ('meta': only declared), all else in memory."""
    from recmill.nn.bert4rec import Bert4Rec

    return Bert4Rec(
        tables(config, about)[0],
        about.num_items,
        config.max_length,
        config.num_layers,
        config.num_heads,
        config.dropout,
        device,
    )
