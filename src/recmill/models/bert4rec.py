"""BERT4Rec: predict masked items of a history from the items on both sides (Sun et al., 2019).

Differences from the paper: pre-norm blocks; by default a separate output layer instead of the transposed item table
(`head`); by default masked items are always replaced by the mask (`mask_random`, `mask_keep`); no dropout of attention
weights.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from recmill.config.sections import key
from recmill.data.windows import WindowRules
from recmill.models.sequence_model import KIND, TASK, SequenceModelConfig, item_table, network, sliding_window
from recmill.schema import HistoriesDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["KIND", "TASK", "Config", "build", "tables", "window_rules"]


class Config(SequenceModelConfig):
    mask_prob: float = key(0.2, "Share of a window's items that are masked.", gt=0.0, le=1.0)
    mask_last_only: float = key(
        0.1, "Share of windows in which only the last item is masked, as in evaluation.", ge=0.0, le=1.0
    )
    mask_last_anywhere: bool = key(
        False, "Shorten these windows to a random length first, so that any item can be the last."
    )
    mask_last_too: bool = key(False, "In the other windows, always mask a history's last training item as well.")
    mask_random: float = key(
        0.0, "Share of masked items that are replaced by a random item instead of the mask.", ge=0.0, le=1.0
    )
    mask_keep: float = key(0.0, "Share of masked items that stay visible, and are still predicted.", ge=0.0, le=1.0)
    dupe_factor: PositiveInt = key(1, "Copies of each window in an epoch, each with its own masks.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.mask_random + self.mask_keep > 1:
            problems.append(
                f"model.mask_random = {self.mask_random} and model.mask_keep = {self.mask_keep} add up to more than "
                "all masked items. Make their sum 1 or less."
            )
        if self.mask_last_anywhere and not self.mask_last_only:
            problems.append("model.mask_last_anywhere without model.mask_last_only does nothing. Set both.")
        return problems


def tables(config: Config, description: HistoriesDescription) -> list[TableSpec]:
    """Return one table: row 0 is padding, then come the items, then the mask."""
    return item_table(config, description.num_items + 2)


def window_rules(config: Config) -> WindowRules:
    return replace(
        sliding_window(config),
        probability=config.mask_prob,
        last_only=config.mask_last_only,
        last_anywhere=config.mask_last_anywhere,
        last_too=config.mask_last_too,
        random=config.mask_random,
        kept=config.mask_keep,
        copies=config.dupe_factor,
    )


def build(config: Config, description: HistoriesDescription, device: "torch.device") -> "nn.Module":
    (table,) = tables(config, description)
    return network(config, table, description, device, attention="bidirectional")
