"""SASRec: the next item after every place of a history, from what was before it (Kang & McAuley, 2018).

As in later work (Klenitskiy & Vasilev, 2023) it learns by cross-entropy over the whole catalogue, not from one
negative per item. Differs from the paper: GELU and four times the width in the feed-forward layers, no dropout of
attention weights.
"""

from typing import TYPE_CHECKING, Any

from recmill.models.sequence_model import SequenceModelConfig, item_table, network, windows
from recmill.schema import HistoriesDescription, TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

TASK = "next_item"
KIND = "histories"  # of dataset


class Config(SequenceModelConfig):
    pass


def tables(config: Config, about: HistoriesDescription) -> list[TableSpec]:
    """One table: padding (row 0), the items."""
    return item_table(config, about.num_items + 1)


def masking(config: Config) -> dict[str, Any]:
    """How training examples are made; the fields of `data.histories.Masking`."""
    return windows(config) | {"probability": 0.0, "last_only": 0.0, "asks_next": True}


def build(config: Config, about: HistoriesDescription, device: "torch.device") -> "nn.Module":
    return network(config, tables(config, about)[0], about, device, is_causal=True)
