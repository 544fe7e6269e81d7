"""BERT4Rec: the next item from both sides of a history (Sun et al., 2019).

Differs from the paper: pre-norm blocks, by default an output layer of its own instead of the item table's
transpose (`head`), hidden items are always replaced by the mask (`mask_random`, `mask_keep`), no dropout of attention
weights.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveInt

from recmill.models.sequence_model import SequenceModelConfig, item_table, network, windows
from recmill.schema import HistoriesDescription
from recmill.tables.spec import TableSpec

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
    mask_last_anywhere: bool = Field(
        False, description="Cut these windows at a random place first, so that every item is a last one at times."
    )
    mask_last_too: bool = Field(
        False, description="In other windows, hide a history's last training item always, beside those of mask_prob."
    )
    mask_random: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of hidden items in whose place a random item is seen, not the mask."
    )
    mask_keep: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of hidden items that are seen as they are, and asked for all the same."
    )
    dupe_factor: PositiveInt = Field(1, description="Copies of each window in an epoch, each with masks of its own.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.mask_random + self.mask_keep > 1:
            problems.append(
                f"model.mask_random = {self.mask_random} and model.mask_keep = {self.mask_keep} are more than all of "
                "the hidden items. Make them 1 or less together."
            )
        if self.mask_last_anywhere and not self.mask_last_only:
            problems.append("model.mask_last_anywhere without model.mask_last_only does nothing. Set both.")
        return problems


def tables(config: Config, description: HistoriesDescription) -> list[TableSpec]:
    """One table: padding (row 0), the items, the mask (last row)."""
    return item_table(config, description.num_items + 2)


def window_rules(config: Config) -> dict[str, Any]:
    """How training examples are made; the fields of `data.histories.Masking`."""
    return windows(config) | {
        "probability": config.mask_prob,
        "last_only": config.mask_last_only,
        "last_anywhere": config.mask_last_anywhere,
        "last_too": config.mask_last_too,
        "random": config.mask_random,
        "kept": config.mask_keep,
        "copies": config.dupe_factor,
    }


def build(config: Config, description: HistoriesDescription, device: "torch.device") -> "nn.Module":
    return network(config, tables(config, description)[0], description, device, attention="bidirectional")
