"""The tables' optimizer for tables that every rank holds whole (data_parallel).

TorchRec leaves them to whoever optimizes the dense layers. Here they get what FBGEMM's fused kernels do to the
other tables: the same rule, only for rows that have a gradient, and a state of the same name and shape, so that
checkpoints go from one kind to the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from recmill.config.sections import TablesOptim

_BETA1, _BETA2 = 0.9, 0.999  # FBGEMM's


class ReplicatedTables(KeyedOptimizer):
    """`params`: 'path.embedding_bags.TABLE.weight' -> [rows, dim], with the averaged gradient after backward."""

    def __init__(self, params: dict[str, nn.Parameter], settings: TablesOptim) -> None:
        self._rule, self._eps = _RULES[settings.name], settings.eps
        state = {weight: _new_state(key.split(".")[-2], weight, settings.name) for key, weight in params.items()}
        self.marks: dict[nn.Parameter, Tensor] = {}  # where somebody wants to know which rows were changed
        super().__init__(params, state, [{"params": list(params.values()), "lr": settings.lr}])

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """It is there from the start."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.params.values():
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for weight in group["params"]:
            rows = _rows_with(weight.grad)
            state = list(self.state[weight].values())
            change = self._rule(weight.grad[rows], rows, state, self._eps)
            weight.detach()[rows] -= change.mul_(group["lr"])
            if weight in self.marks:
                self.marks[weight][rows] = True


def _rows_with(grad: Tensor) -> Tensor | slice:
    """Those that are not all 0. A slice where they are one stretch, as with a tied head: nothing is gathered then."""
    rows = grad.any(dim=1).nonzero().squeeze(1)
    if not len(rows) or len(rows) != rows[-1] - rows[0] + 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _new_state(table: str, weight: Tensor, optimizer: str) -> dict[str, Tensor]:
    """Names as FBGEMM and TorchRec have them."""
    if optimizer == "sgd":
        return {}
    if optimizer == "rowwise_adagrad":
        return {f"{table}.momentum1": weight.new_zeros(weight.shape[0])}
    names = ["momentum1"] if optimizer == "adagrad" else ["momentum1", "exp_avg_sq"]
    state = {f"{table}.{name}": torch.zeros_like(weight) for name in names}
    return state if optimizer == "adagrad" else {**state, f"{table}.steps": weight.new_zeros((), dtype=torch.float64)}


def _sgd(grad: Tensor, rows: Tensor | slice, state: list[Tensor], eps: float) -> Tensor:
    return grad.clone()


def _adagrad(grad: Tensor, rows: Tensor | slice, state: list[Tensor], eps: float) -> Tensor:
    (squares,) = state
    squares[rows] += grad.square()
    return grad / (squares[rows].sqrt() + eps)


def _rowwise_adagrad(grad: Tensor, rows: Tensor | slice, state: list[Tensor], eps: float) -> Tensor:
    (squares,) = state
    squares[rows] += grad.square().mean(dim=1)
    return grad / (squares[rows].sqrt() + eps)[:, None]


def _adam(grad: Tensor, rows: Tensor | slice, state: list[Tensor], eps: float) -> Tensor:
    mean, square, steps = state
    steps += 1
    mean[rows] = mean[rows].lerp(grad, 1 - _BETA1)
    square[rows] = square[rows].lerp(grad.square(), 1 - _BETA2)
    unbiased_mean = mean[rows] / (1 - _BETA1**steps)
    return unbiased_mean / ((square[rows] / (1 - _BETA2**steps)).sqrt() + eps)


_RULES: dict[str, Callable[[Tensor, Tensor | slice, list[Tensor], float], Tensor]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
}
