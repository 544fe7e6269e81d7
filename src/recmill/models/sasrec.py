"""SASRec: predict the next item at every position of a history, from the items before it (Kang & McAuley, 2018).

As in later work, the loss is cross-entropy over the whole catalogue (Klenitskiy & Vasilev, 2023) or uses hundreds of
negatives (gSASRec: Petrov & Macdonald, 2023), not one per item. Differences from the paper: GELU and four times the
width in the feed-forward layers, no dropout of attention weights.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

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
    loss: Literal["softmax", "gbce"] = key(
        "softmax", "Cross-entropy over the catalogue, or gBCE over the target and sampled negatives."
    )
    num_negatives: PositiveInt = key(256, "Random items that every target of a batch is compared with (gbce).")
    gbce_t: float = key(0.75, "Calibration: 0 is plain binary cross-entropy (gbce).", ge=0.0, le=1.0)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.loss == "softmax":
            problems += [
                f"model.{key} has no meaning for model.loss = 'softmax'. Remove it, or use 'gbce'."
                for key in self.changed_keys()
                if key in ("num_negatives", "gbce_t")
            ]
        elif self.label_smoothing:
            problems.append("model.label_smoothing has no meaning for model.loss = 'gbce'. Remove it.")
        return problems


def tables(config: Config, description: HistoriesDescription) -> list[TableSpec]:
    """Return one table: row 0 is padding, then come the items."""
    return item_table(config, description.num_items + 1)


def window_rules(config: Config) -> WindowRules:
    negatives = config.num_negatives if config.loss == "gbce" else 0
    return replace(sliding_window(config), predicts_next=True, negatives=negatives)


def build(config: Config, description: HistoriesDescription, device: "torch.device") -> "nn.Module":
    (table,) = tables(config, description)
    gbce = {"name": "gbce", "negatives": config.num_negatives, "calibration": config.gbce_t}
    loss = gbce if config.loss == "gbce" else {}
    return network(config, table, description, device, attention="causal", **loss)
