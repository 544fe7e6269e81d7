"""The embedding tables that a model declares."""

from dataclasses import dataclass

VALUE_BYTES = 4  # rows, their optimizer state and their gradients are float32


@dataclass(frozen=True)
class TableSpec:
    name: str
    feature: str
    rows: int
    dim: int
    init_bound: float  # initial values are uniform in [-init_bound, init_bound]
