"""What the sequence models declare alike. No plug-in."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from recmill.config.sections import Section
from recmill.schema import HistoriesDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn


class SequenceModelConfig(Section):
    embedding_dim: PositiveInt = Field(64, multiple_of=4, description="Width of items and layers; a multiple of 4.")
    num_layers: PositiveInt = Field(2, description="Transformer blocks.")
    num_heads: PositiveInt = Field(2, description="Attention heads; embedding_dim is a multiple of it.")
    max_length: int = Field(50, ge=2, description="Items of a history that the model sees at once.")
    dropout: float = Field(0.1, ge=0.0, lt=1.0, description="Share of activations dropped in training.")
    head: Literal["linear", "tied"] = Field(
        "linear", description="Output weights of an item: a layer's own, or the item's row of the table."
    )
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0, description="Share of a target that goes to all items alike.")
    norm: Literal["place", "window"] = Field(
        "place", description="Layer normalization of each place, or of a whole window, as TorchRec's example has it."
    )
    sliding_step: int | float = Field(
        0,
        ge=0,
        description="Items between a long history's windows; below 1: a share of max_length; 0: no overlap.",
    )

    def contradictions(self) -> list[str]:
        problems = []
        if self.embedding_dim % self.num_heads:
            problems.append(
                f"model.embedding_dim = {self.embedding_dim} is not a multiple of model.num_heads = {self.num_heads}."
            )
        if self.sliding_step > self.max_length:
            problems.append(
                f"model.sliding_step = {self.sliding_step} is larger than model.max_length = {self.max_length}: "
                "items between windows would never be trained on."
            )
        elif self.sliding_step > 1 and self.sliding_step % 1:
            problems.append(
                f"model.sliding_step = {self.sliding_step} is neither a number of items nor a share below 1."
            )
        return problems


def item_table(config: SequenceModelConfig, rows: int) -> list[TableSpec]:
    return [TableSpec("item", "item", rows, config.embedding_dim, init_bound=0.05)]


def windows(config: SequenceModelConfig) -> dict[str, Any]:
    """Fields of `data.histories.Masking` that say how histories are cut."""
    step = config.sliding_step
    if 0 < step < 1:
        step = max(1, int(step * config.max_length))
    return {"max_length": config.max_length, "step": int(step) or config.max_length}


def network(
    config: SequenceModelConfig,
    table: TableSpec,
    description: HistoriesDescription,
    device: "torch.device",
    *,
    attention: Literal["causal", "bidirectional"],
    **loss: Any,
) -> "nn.Module":
    """Tables on `device` ('meta': only declared), all else in memory. `loss`: fields of `nn.losses.Loss`."""
    from recmill.nn.losses import Loss
    from recmill.nn.sequences import ItemTransformer
    from recmill.nn.transformer import TransformerShape

    shape = TransformerShape(
        config.max_length, config.num_layers, config.num_heads, config.dropout, attention, config.norm
    )
    own_loss = Loss(smoothing=config.label_smoothing, **loss)
    return ItemTransformer(table, description.num_items, shape, device, config.head, own_loss)
