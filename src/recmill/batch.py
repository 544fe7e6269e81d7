"""What a step works on. Shape letters: B rows, F dense features, N tokens, M queries, C negatives."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


class _OnDevice(Pipelineable):
    """Every field is a tensor, or moves like one."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        if device.type == "cpu":
            return self
        return type(self)(**{name: value.to(device, non_blocking=non_blocking) for name, value in vars(self).items()})

    def pin_memory(self) -> Self:
        """Copies from there to a GPU can run beside its work."""
        return type(self)(**{name: value.pin_memory() for name, value in vars(self).items()})

    def record_stream(self, stream: torch.Stream) -> None:
        for value in vars(self).values():
            value.record_stream(stream)


@dataclass
class CtrBatch(_OnDevice):
    """Rows of a click log. A row of weight 0 fills up a rank that got fewer: it must not count anywhere."""

    dense_BF: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor
    weights_B: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self.dense_BF, self.sparse

    def weight(self) -> float:
        return float(self.weights_B.sum())

    def to_proxy_tuple(self, network: Any) -> tuple[Any, ...]:
        """Tell TorchRec's pipeline which field each argument of the network's forward() is."""
        from recmill.tables.torchrec_internals import pipeline_inputs

        return pipeline_inputs("dense_BF", "sparse")


@dataclass
class SequenceBatch(_OnDevice):
    """Histories one after the other, without padding, and the places in `tokens_N` whose item is asked for.

    Queries are in order of the rows. `row_keys_B` names each row for dropout. Queries of weight 0 belong to rows that
    fill up a rank. `negatives_K` are the same on every rank; none where the loss samples none.
    """

    tokens_N: Tensor
    lengths_B: Tensor
    queries_M: Tensor
    answers_M: Tensor
    weights_M: Tensor
    row_keys_B: Tensor
    negatives_K: Tensor

    def inputs(self) -> tuple[Any, ...]:
        """The network makes the loss as well: it never holds the logits of all queries."""
        return *self._asked(), self.answers_M, self.weights_M, self.negatives_K

    def _asked(self) -> tuple[Any, ...]:
        return self.tokens_N, self.lengths_B, self.queries_M, self.row_keys_B

    def weight(self) -> float:
        return float(self.weights_M.sum())


@dataclass
class RankingBatch(SequenceBatch):
    """One query per row, at its end. `seen_rows[i], seen_items[i]`: an item that row's user has met before.

    `negatives_BC` holds the candidates of the sampled protocols that are asked for, one after the other.
    """

    seen_rows: Tensor
    seen_items: Tensor
    negatives_BC: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self._asked()
