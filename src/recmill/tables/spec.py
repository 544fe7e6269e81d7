"""What a model declares about an embedding table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TableSpec:
    """An embedding table as a model declares it. Rows start uniform in [-init_bound, init_bound]."""

    name: str
    feature: str
    rows: int
    dim: int
    init_bound: float
