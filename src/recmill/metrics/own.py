"""Metrics that users wrote: modules with the functions of `recmill.protocols.MetricModule`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

if TYPE_CHECKING:
    from recmill.protocols import MetricModule
    from recmill.world import World

UNDEFINED = "undefined"  # for example the AUROC of rows without clicks

Values = dict[str, float | int | str]


class Metrics(dict[str, Any]):
    """Metrics by name, with the step and the checkpoint that they are of. An undefined one is the text "undefined".

    Type checkers know that the others are numbers.
    """

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, name: Literal["checkpoint"], /) -> str: ...  # type: ignore[overload-overlap]
        @overload
        def __getitem__(self, name: Literal["step", "rows", "users"], /) -> int: ...  # type: ignore[overload-overlap]
        @overload
        def __getitem__(self, name: str, /) -> float: ...
        def __getitem__(self, name: str, /) -> Any: ...


class OwnMetrics:
    """Adds up the sums of each metric over the batches of this rank, and over the ranks at the end."""

    def __init__(self, modules: "Mapping[str, MetricModule]") -> None:
        self._modules = modules
        self._sums: dict[str, np.ndarray] = {}
        self._rows = 0

    def update(self, *rows: np.ndarray) -> None:
        self._rows += len(rows[0])
        for name, module in self._modules.items():
            sums = np.asarray(module.sums(*rows), np.float64)
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def compute(self, world: "World | None", prefix: str = "") -> Values:
        """Return the values by name. All ranks of `world` take part; each has had the same number of batches."""
        values: Values = {}
        for name, module in self._modules.items():
            own = [float(self._rows), *self._sums.get(name, np.empty(0)).tolist()]
            rows, *sums = world.sum(own) if world else own
            value = module.value(*sums) if rows else math.nan
            values[prefix + name] = float(value) if math.isfinite(value) else UNDEFINED
        return values
