"""What a model declares about an embedding table."""

from dataclasses import dataclass

VALUE_BYTES = 4  # rows, their optimizer state and their gradients are float32


@dataclass(frozen=True)
class TableSpec:
    """An embedding table as a model declares it. Rows start uniform in [-init_bound, init_bound]."""

    name: str
    feature: str
    rows: int
    dim: int
    init_bound: float
