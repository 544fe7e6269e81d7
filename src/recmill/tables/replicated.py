"""The optimizer of data_parallel tables, which TorchRec would leave to the optimizer of the dense layers.

It does what FBGEMM does to all other tables: it updates only rows that have a gradient, by the same rule, and its state
has the same names and shapes, so that a checkpoint can be loaded with another sharding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from recmill.config.sections import TablesOptim
from recmill.tables.optimizers import OPTIMIZERS, Rows
from recmill.tables.torchrec_internals import ShardKey, table_of


class ReplicatedTables(KeyedOptimizer):
    """Update the tables in `params`, [rows, dim] by key, with gradients that are averaged over all ranks."""

    def __init__(self, params: dict[str, nn.Parameter], settings: TablesOptim) -> None:
        self._optimizer = OPTIMIZERS[settings.name]
        self._settings = settings
        self._marks: list[dict[nn.Parameter, Tensor]] = []
        state = {
            weight: {f"{table_of(key)}.{name}": value for name, value in self._optimizer.new_state(weight).items()}
            for key, weight in params.items()
        }
        super().__init__(params, state, [{"params": list(params.values()), "lr": settings.lr}])

    def mark_rows(self) -> list[tuple[ShardKey, Tensor]]:
        """Mark changed rows from now on. Return each table with its marks, one per row; the caller may clear them."""
        marks = {weight: weight.new_zeros(len(weight), dtype=torch.bool) for weight in self.params.values()}
        self._marks.append(marks)
        return [((table_of(key) or key, 0), marks[weight]) for key, weight in self.params.items()]

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: the state exists from the start."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.params.values():
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for weight in group["params"]:
            rows = _rows_with_gradient(weight.grad)
            states = list(self.state[weight].values())
            self._optimizer.update(weight, rows, weight.grad[rows], states, self._settings, group["lr"])
            for marks in self._marks:
                marks[weight][rows] = True


def _rows_with_gradient(gradient: Tensor) -> Rows:
    """Return the rows that are not all 0, as a slice if they are contiguous: indexing with a slice copies nothing."""
    rows = gradient.any(dim=1).nonzero().squeeze(1)
    are_contiguous = len(rows) > 0 and len(rows) == rows[-1] - rows[0] + 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if are_contiguous else rows
