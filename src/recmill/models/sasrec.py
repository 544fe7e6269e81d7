"""SASRec: predict the next item at every position of a history, from the items before it (Kang & McAuley, 2018).

As in later work, the loss is cross-entropy over the whole catalogue (Klenitskiy & Vasilev, 2023) or uses hundreds of
negatives (gSASRec: Petrov & Macdonald, 2023; sampled softmax), not one per item. With sampled softmax and LiGR blocks
it is eSASRec (Tikhonovich et al., 2025). Differences from the papers: GELU and four times the width in plain
feed-forward layers, no dropout of attention weights or within feed-forward layers, negatives shared by a batch.
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
    loss: Literal["softmax", "sampled_softmax", "gbce"] = key(
        "softmax", "Cross-entropy over the catalogue, or over the target and sampled negatives; or gBCE over these."
    )
    num_negatives: PositiveInt = key(256, "Random items that all targets of a batch are compared with, if sampled.")
    gbce_t: float = key(0.75, "Calibration: 0 is plain binary cross-entropy (gbce).", ge=0.0, le=1.0)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        softmax, sampled = ("softmax",), ("sampled_softmax", "gbce")
        users = {"num_negatives": sampled, "gbce_t": ("gbce",), "label_smoothing": softmax, "exclude_seen": softmax}
        problems += [
            f"model.{key} has no meaning for model.loss = '{self.loss}'. "
            f"Leave it out or at its default, or use {' or '.join(map(repr, losses))}."
            for key, losses in users.items()
            if key in self.changed_keys() and self.loss not in losses
        ]
        return problems


def tables(config: Config, description: HistoriesDescription) -> list[TableSpec]:
    """Return one table: row 0 is padding, then come the items."""
    return item_table(config, description.num_items + 1)


def window_rules(config: Config) -> WindowRules:
    negatives = 0 if config.loss == "softmax" else config.num_negatives
    return replace(sliding_window(config), predicts_next=True, negatives=negatives)


def build(config: Config, description: HistoriesDescription, device: "torch.device") -> "nn.Module":
    (table,) = tables(config, description)
    loss = {"name": config.loss, "negatives": config.num_negatives, "calibration": config.gbce_t}
    return network(config, table, description, device, attention="causal", **loss)
