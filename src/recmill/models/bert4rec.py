"""BERT4Rec: the next item from both sides of a history (Sun et al., 2019).

Differs from the paper: pre-norm blocks, by default an output layer of its own instead of the item table's
transpose (`head`), hidden items are always replaced by the mask, no dropout of attention weights.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from recmill.models.sequence_model import SequenceModelConfig, item_table, network, windows
from recmill.schema import HistoriesDescription, TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

TASK = "next_item"
KIND = "histories"  # of dataset


class Config(SequenceModelConfig):
    mask_prob: float = Field(0.2, gt=0.0, le=1.0, description="Share of a window's items that are hidden.")
    mask_last_only: float = Field(
        0.1, ge=0.0, le=1.0, description="Share of windows where just the last item is hidden, as at evaluation."
    )


def tables(config: Config, about: HistoriesDescription) -> list[TableSpec]:
    """One table: padding (row 0), the items, the mask (last row)."""
    return item_table(config, about.num_items + 2)


def masking(config: Config) -> dict[str, Any]:
    """How training examples are made; the fields of `data.histories.Masking`."""
    return windows(config) | {"probability": config.mask_prob, "last_only": config.mask_last_only}


def build(config: Config, about: HistoriesDescription, device: "torch.device") -> "nn.Module":
    return network(config, tables(config, about)[0], about, device, is_causal=False)
