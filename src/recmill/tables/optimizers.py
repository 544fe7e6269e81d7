"""The optimizers of tables. A new one needs an entry in OPTIMIZERS and its name in the config.

FBGEMM, or our CPU kernel, updates fused tables in backward; `update` is for replicated tables.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from recmill.config.sections import TablesOptim
from recmill.tables.spec import OPTIMIZER_STATES, Shape, state_values

_BETA1, _BETA2 = 0.9, 0.999  # FBGEMM's defaults

Rows = Tensor | slice


@dataclass(frozen=True)
class TableOptimizer:
    """`rule(weight, rows, gradient, states, settings, lr)` updates `rows` of a table and of its states, without weight
    decay. States have FBGEMM's names, so that checkpoints do not depend on whether a table is fused or replicated.
    """

    fbgemm_type: EmbOptimType
    state: dict[str, Shape]
    rule: Callable[[Tensor, Rows, Tensor, list[Tensor], TablesOptim, float], None]
    native_rule: int  # its number in kernels/steps.cpp
    is_in_fbgemm: tuple[str, ...] = ("cpu", "cuda")  # the devices for which FBGEMM has its kernel

    def state_values(self, rows: int, columns: int) -> int:
        return state_values(self.state, rows, columns)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a table that was never updated."""
        sizes = {"per row": weight.shape[:1], "per value": weight.shape, "scalar": ()}
        dtypes = {"scalar": torch.float64}
        return {name: weight.new_zeros(sizes[kind], dtype=dtypes.get(kind)) for name, kind in self.state.items()}

    def update(
        self, weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float
    ) -> None:
        if settings.l2:
            gradient = gradient + settings.l2 * weight[rows]
        before = weight[rows].clone() if settings.weight_decay else None
        if before is not None and self.rule is not _ftrl:
            weight[rows] -= lr * settings.weight_decay * before
        self.rule(weight, rows, gradient, states, settings, lr)
        if before is not None and self.rule is _ftrl:  # its rows are functions of its state, so decay comes last
            weight[rows] -= (lr * settings.weight_decay * before).where(weight[rows] != 0, 0.0)


def kernel_settings(settings: TablesOptim, lr: float, step: int) -> list[float]:
    """Return the `settings` of `update_row` in kernels/steps.cpp, for step `step`, counted from 1."""
    common = [lr, settings.eps, settings.weight_decay, settings.l2]
    if settings.name == "adam":
        return [*common, 1 - _BETA1, 1 - _BETA2, 1 - _BETA1**step, 1 - _BETA2**step]
    if settings.name == "ftrl":
        return [*common, settings.lambda1, settings.lambda2, settings.beta, settings.initial_accumulator]
    return common


def _sgd(weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float) -> None:
    weight[rows] -= lr * gradient


def _adagrad(
    weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float
) -> None:
    (squares,) = states
    squares[rows] += gradient.square()
    weight[rows] -= lr * gradient / (squares[rows].sqrt() + settings.eps)


def _rowwise_adagrad(
    weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float
) -> None:
    (squares,) = states
    squares[rows] += gradient.square().mean(dim=1)
    weight[rows] -= gradient * (lr / (squares[rows].sqrt() + settings.eps))[:, None]


def _adam(weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float) -> None:
    mean, square, steps = states
    steps += 1
    mean[rows] = mean[rows].lerp(gradient, 1 - _BETA1)
    square[rows] = square[rows].lerp(gradient.square(), 1 - _BETA2)
    unbiased_mean = mean[rows] / (1 - _BETA1**steps)
    weight[rows] -= lr * unbiased_mean / ((square[rows] / (1 - _BETA2**steps)).sqrt() + settings.eps)


def _ftrl(weight: Tensor, rows: Rows, gradient: Tensor, states: list[Tensor], settings: TablesOptim, lr: float) -> None:
    """FTRL-proximal (McMahan et al., 2013); in OneFlow's kernel this is lr_power = 0.5.

    The first accumulator is not in the state, so that it is 0 in rows that were never updated.
    """
    z, squares = states
    before = (settings.initial_accumulator + squares[rows]).sqrt()
    squares[rows] += gradient.square()
    after = (settings.initial_accumulator + squares[rows]).sqrt()
    z[rows] += gradient - (after - before) / lr * weight[rows]
    shrunk = torch.nn.functional.softshrink(z[rows], settings.lambda1)
    weight[rows] = -shrunk / ((settings.beta + after) / lr + settings.lambda2)


OPTIMIZERS = {
    "sgd": TableOptimizer(EmbOptimType.EXACT_SGD, OPTIMIZER_STATES["sgd"], _sgd, native_rule=0),
    "adagrad": TableOptimizer(EmbOptimType.EXACT_ADAGRAD, OPTIMIZER_STATES["adagrad"], _adagrad, native_rule=1),
    "rowwise_adagrad": TableOptimizer(
        EmbOptimType.EXACT_ROWWISE_ADAGRAD, OPTIMIZER_STATES["rowwise_adagrad"], _rowwise_adagrad, native_rule=2
    ),
    "adam": TableOptimizer(EmbOptimType.ADAM, OPTIMIZER_STATES["adam"], _adam, native_rule=3, is_in_fbgemm=("cuda",)),
    "ftrl": TableOptimizer(EmbOptimType.ADAM, OPTIMIZER_STATES["ftrl"], _ftrl, native_rule=4, is_in_fbgemm=()),
}
