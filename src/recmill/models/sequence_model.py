"""Config keys, item table, windows and network that all sequence models share. Not a model itself."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from recmill.config.sections import Section, key
from recmill.data.windows import WindowRules
from recmill.schema import HistoriesDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

TASK = "next_item"
KIND = "histories"


class SequenceModelConfig(Section):
    embedding_dim: PositiveInt = key(64, "Width of items and layers; a multiple of 4.", multiple_of=4)
    num_layers: PositiveInt = key(2, "Transformer blocks.", le=1000)
    num_heads: PositiveInt = key(2, "Attention heads; embedding_dim is a multiple of it.")
    max_length: int = key(50, "Most recent items of a history that the model sees at once.", ge=2)
    dropout: float = key(0.1, "Share of activations that are dropped in training.", ge=0.0, lt=1.0)
    head: Literal["linear", "tied"] = key(
        "linear", "Output weights of an item: a separate linear layer, or the item's row of the table."
    )
    label_smoothing: float = key(
        0.0, "Share of a target's probability that is spread evenly over all items.", ge=0.0, lt=1.0
    )
    exclude_seen: bool = key(
        False,
        "Compare a target only with items that its window does not show, because metrics and recommendations leave out "
        "what a user has seen.",
    )
    norm: Literal["place", "window"] = key(
        "place", "Layer normalization of each position, or of all positions of a window (TorchRec's example)."
    )
    block: Literal["plain", "ligr"] = key(
        "plain", "Transformer blocks as in the papers, or with gates and SwiGLU (LiGR, as in eSASRec)."
    )
    sliding_step: int | float = key(
        0, "Items between the windows of a long history; below 1: a share of max_length; 0: no overlap.", ge=0
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
        if self.exclude_seen and self.label_smoothing:
            problems.append(
                "model.label_smoothing gives a share of the probability to all items, also to those that "
                "model.exclude_seen leaves out. Remove one of the two."
            )
        return problems


def item_table(config: SequenceModelConfig, rows: int) -> list[TableSpec]:
    return [TableSpec("item", "item", rows, config.embedding_dim, init_bound=0.05)]


def sliding_window(config: SequenceModelConfig) -> WindowRules:
    """Return the rules that cut histories into windows, without masks."""
    step = config.sliding_step
    if 0 < step < 1:
        step = max(1, int(step * config.max_length))
    return WindowRules(config.max_length, int(step) or config.max_length, probability=0.0, last_only=0.0)


def network(
    config: SequenceModelConfig,
    table: TableSpec,
    description: HistoriesDescription,
    device: "torch.device",
    attention: Literal["causal", "bidirectional"],
    **loss_fields: Any,
) -> "nn.Module":
    """Build the network with its table on `device`; `loss_fields` are those of `nn.losses.Loss`."""
    from recmill.nn.losses import Loss
    from recmill.nn.sequences import ItemTransformer
    from recmill.nn.transformer import TransformerShape

    shape = TransformerShape(
        config.max_length, config.num_layers, config.num_heads, config.dropout, attention, config.norm, config.block
    )
    loss = Loss(smoothing=config.label_smoothing, excludes_seen=config.exclude_seen, **loss_fields)
    return ItemTransformer(table, description.num_items, shape, device, config.head, loss)
