"""The batches that networks, tasks and steps work on.

The capitals at the end of an array's name are its axes: B rows, F dense features, N tokens, M queries, K and C
negatives.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


class _TensorBatch(Pipelineable):
    """A batch whose fields are tensors, have the methods with which tensors change devices, plain numbers or None."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on `device`: itself if it is there already."""
        if all(value.device == device for value in vars(self).values() if isinstance(value, Tensor)):
            return self
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, from which a GPU can copy while it computes."""
        return self._map(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        for value in vars(self).values():
            if value is not None and not isinstance(value, int):
                value.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Self:
        """Return a batch with `function` applied to every field that is neither a plain number nor None."""
        fields = vars(self).items()
        plain = int | None
        return type(self)(**{name: value if isinstance(value, plain) else function(value) for name, value in fields})


@dataclass
class CtrBatch(_TensorBatch):
    """Rows of a click log. A row of weight 0 is a filler for a rank with fewer rows and must count nowhere.

    `row_keys_B` identifies each row in training, for networks with dropout or batch norm; -1: a filler.
    """

    dense_BF: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor
    weights_B: Tensor
    row_keys_B: Tensor | None = None
    groups_B: Tensor | None = None  # in an evaluation by groups: their numbers; 0: no value
    numbers_B: Tensor | None = None  # in an evaluation: of the rows in the split

    def inputs(self) -> tuple[Any, ...]:
        keys = [] if self.row_keys_B is None else [self.row_keys_B]
        return self.dense_BF, self.sparse, *keys

    def weight(self) -> float:
        return float(self.weights_B.sum())

    def to_proxy_tuple(self, network: Any) -> tuple[Any, ...]:
        """Return for TorchRec's pipeline which field each argument of the network's forward() is."""
        from recmill.tables.torchrec_internals import pipeline_inputs

        takes_keys = len(inspect.signature(network.forward).parameters) > 2  # a plug-in's need not
        keys = pipeline_inputs("row_keys_B") if self.row_keys_B is not None else (None,)
        return *pipeline_inputs("dense_BF", "sparse"), *(keys if takes_keys else ())


@dataclass
class RetrievalBatch(_TensorBatch):
    """R requests, then C items, in S = R + C rows: features of items have no ids in the first, others none in the last.

    The items are the same on every rank. `answers_R` are indices of items; requests of weight 0 are fillers, as in
    `CtrBatch`. `log_inclusion_C`: the log of the probability that a global batch has the item.
    """

    dense_SF: Tensor
    sparse: KeyedJaggedTensor
    num_requests: int
    answers_R: Tensor
    weights_R: Tensor
    log_inclusion_C: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self.dense_SF, self.sparse, self.num_requests

    def weight(self) -> float:
        return float(self.weights_R.sum())

    def to_proxy_tuple(self, network: Any) -> tuple[Any, ...]:
        """Return for TorchRec's pipeline which field each argument of the network's forward() is."""
        from recmill.tables.torchrec_internals import pipeline_inputs

        return *pipeline_inputs("dense_SF", "sparse", "num_requests"), None


class RequestBatch(RetrievalBatch):
    """Requests of an evaluation without items; `answers_R` are indices of all items."""

    def inputs(self) -> tuple[Any, ...]:
        return *super().inputs(), "requests"


class ItemBatch(RetrievalBatch):
    """Some of the items of an evaluation, without requests."""

    def inputs(self) -> tuple[Any, ...]:
        return *super().inputs(), "items"


class HistoryInputs(NamedTuple):
    """The arguments of a sequence network that returns logits, in their order.

    Histories follow each other in `tokens_N` without padding; `queries_M` are positions in it, in row order.
    `row_keys_B` identifies each row for dropout. `longest` is the largest length: to read it from a GPU, the host would
    wait for the GPU.
    """

    tokens_N: Tensor
    lengths_B: Tensor
    longest: int
    queries_M: Tensor
    row_keys_B: Tensor


@dataclass
class SequenceBatch(_TensorBatch):
    """Histories with the items that the network must predict at `queries_M`.

    Queries of weight 0 belong to fillers, as in `CtrBatch`. `negatives_K` are the same on every rank, and empty
    if the loss does not sample any.
    """

    tokens_N: Tensor
    lengths_B: Tensor
    longest: int
    queries_M: Tensor
    row_keys_B: Tensor
    answers_M: Tensor
    weights_M: Tensor
    negatives_K: Tensor

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments with which the network computes its loss, without holding all logits at once."""
        return *self.history_inputs(), (self.answers_M, self.weights_M, self.negatives_K)

    def history_inputs(self) -> HistoryInputs:
        return HistoryInputs(self.tokens_N, self.lengths_B, self.longest, self.queries_M, self.row_keys_B)

    def weight(self) -> float:
        return float(self.weights_M.sum())


@dataclass
class RankingBatch(SequenceBatch):
    """One query per row, at its end. The user of row `seen_rows[i]` has seen the item `seen_items[i]` before.

    `negatives_BC` holds the candidates of the sampled protocols, side by side.
    """

    seen_rows: Tensor
    seen_items: Tensor
    negatives_BC: Tensor

    def inputs(self) -> tuple[Any, ...]:
        return self.history_inputs()
