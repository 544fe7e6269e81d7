"""The optimizers of tables. A new one needs an entry in OPTIMIZERS and its name in the config.

FBGEMM, or our CPU kernel, updates fused tables in backward; `update` is for replicated tables.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from recmill.tables.spec import OPTIMIZER_STATES, Shape, state_values

_BETA1, _BETA2 = 0.9, 0.999  # FBGEMM's defaults

Rows = Tensor | slice


@dataclass(frozen=True)
class TableOptimizer:
    """`update(gradient, rows, states, eps)` updates the states of `rows` and returns the change to subtract from the
    rows, not yet multiplied by the learning rate. States have FBGEMM's names, so that checkpoints do not depend on
    whether a table is fused or replicated.
    """

    fbgemm_type: EmbOptimType
    state: dict[str, Shape]
    update: Callable[[Tensor, Rows, list[Tensor], float], Tensor]
    native_rule: int | None  # its number in kernels/steps.cpp
    is_fused_on_cpu: bool = True

    def state_values(self, rows: int, columns: int) -> int:
        return state_values(self.state, rows, columns)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a table that was never updated."""
        sizes = {"per row": weight.shape[:1], "per value": weight.shape, "scalar": ()}
        dtypes = {"scalar": torch.float64}
        return {name: weight.new_zeros(sizes[kind], dtype=dtypes.get(kind)) for name, kind in self.state.items()}


def _sgd(gradient: Tensor, rows: Rows, states: list[Tensor], eps: float) -> Tensor:
    return gradient.clone()


def _adagrad(gradient: Tensor, rows: Rows, states: list[Tensor], eps: float) -> Tensor:
    (squares,) = states
    squares[rows] += gradient.square()
    return gradient / (squares[rows].sqrt() + eps)


def _rowwise_adagrad(gradient: Tensor, rows: Rows, states: list[Tensor], eps: float) -> Tensor:
    (squares,) = states
    squares[rows] += gradient.square().mean(dim=1)
    return gradient / (squares[rows].sqrt() + eps)[:, None]


def _adam(gradient: Tensor, rows: Rows, states: list[Tensor], eps: float) -> Tensor:
    mean, square, steps = states
    steps += 1
    mean[rows] = mean[rows].lerp(gradient, 1 - _BETA1)
    square[rows] = square[rows].lerp(gradient.square(), 1 - _BETA2)
    unbiased_mean = mean[rows] / (1 - _BETA1**steps)
    return unbiased_mean / ((square[rows] / (1 - _BETA2**steps)).sqrt() + eps)


OPTIMIZERS = {
    "sgd": TableOptimizer(EmbOptimType.EXACT_SGD, OPTIMIZER_STATES["sgd"], _sgd, native_rule=0),
    "adagrad": TableOptimizer(EmbOptimType.EXACT_ADAGRAD, OPTIMIZER_STATES["adagrad"], _adagrad, native_rule=1),
    "rowwise_adagrad": TableOptimizer(
        EmbOptimType.EXACT_ROWWISE_ADAGRAD, OPTIMIZER_STATES["rowwise_adagrad"], _rowwise_adagrad, native_rule=2
    ),
    "adam": TableOptimizer(EmbOptimType.ADAM, OPTIMIZER_STATES["adam"], _adam, native_rule=None, is_fused_on_cpu=False),
}
