"""What a step works on. Shape letters: B rows, F dense features, T positions, M queries, C negatives."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass
class CtrBatch:
    """Rows of a click log. A row of weight 0 fills up a rank that got fewer: it must not count anywhere."""

    dense_BF: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor
    weights_B: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self.dense_BF, self.sparse

    def weight(self) -> float:
        return float(self.weights_B.sum())

    def to(self, device: torch.device) -> "CtrBatch":
        if device.type == "cpu":
            return self
        return CtrBatch(
            self.dense_BF.to(device), self.sparse.to(device), self.labels_B.to(device), self.weights_B.to(device)
        )


@dataclass
class SequenceBatch:
    """Histories, padded on the left with 0, and the places (flat in B x T) whose item is asked for.

    `row_keys_B` names each row for dropout. Queries of weight 0 belong to rows that fill up a rank.
    """

    tokens_BT: Tensor
    queries_M: Tensor
    answers_M: Tensor
    weights_M: Tensor
    row_keys_B: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self.tokens_BT, self.queries_M, self.row_keys_B

    def weight(self) -> float:
        return float(self.weights_M.sum())

    def to(self, device: torch.device) -> "SequenceBatch":
        if device.type == "cpu":
            return self
        moved = {name: value.to(device) for name, value in vars(self).items()}
        return type(self)(**moved)


@dataclass
class RankingBatch(SequenceBatch):
    """One query per row, at its end. `seen_rows[i], seen_items[i]`: an item that row's user has met before.

    `negatives_BC` holds the candidates of `pop100`; [B, 0] where that protocol is not asked for.
    """

    seen_rows: Tensor
    seen_items: Tensor
    negatives_BC: Tensor
