"""Adam of fused tables, by FBGEMM on GPUs and by our kernels on CPU, with its step count as a state of each table.

FBGEMM keeps the count outside of any state, and counts the batches of evaluations, too. As a state it is saved, and a
checkpoint can be loaded into replicated tables, which have the same state, and back.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from recmill.tables.table_lookup import TableLookup
from recmill.tables.torchrec_internals import table_of


class FusedAdam(OptimizerWrapper):
    """Count the steps of `fused`, TorchRec's optimizer of all fused tables, which `lookups` look up."""

    def __init__(self, fused: KeyedOptimizer, lookups: Iterable[TableLookup]) -> None:
        super().__init__(fused)
        self._steps = torch.zeros((), dtype=torch.float64)  # of all tables: each step updates all of them
        for key, weight in self.params.items():
            self.state[weight][f"{table_of(key)}.steps"] = self._steps
        for lookup in lookups:
            lookup.steps = self._steps

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self._steps += 1
