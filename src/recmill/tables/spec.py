"""The embedding tables that a model declares."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

VALUE_BYTES = 4  # rows, their optimizer state and their gradients are float32
USABLE_SHARE = 0.9  # of the memory; the rest is for activations, the libraries and, on CPU, dense layers and data
Shape = Literal["per row", "per value", "scalar"]
# The state that each optimizer of tables keeps, by FBGEMM's names.
OPTIMIZER_STATES: dict[str, dict[str, Shape]] = {
    "sgd": {},
    "adagrad": {"momentum1": "per value"},
    "rowwise_adagrad": {"momentum1": "per row"},
    "adam": {"momentum1": "per value", "exp_avg_sq": "per value", "steps": "scalar"},
    "ftrl": {"momentum1": "per value", "exp_avg_sq": "per value"},  # z, and the sum of squares: in Adam's places
}


def state_values(state: dict[str, Shape], rows: int, columns: int) -> int:
    """Return the number of values in an optimizer's state of a table or shard, without scalars."""
    sizes = {"per row": rows, "per value": rows * columns, "scalar": 0}
    return sum(sizes[shape] for shape in state.values())


@dataclass(frozen=True)
class Dynamic:
    """The rules of a dynamic table, whose ids are not known in advance."""

    max_rows: int  # over all processes
    min_count: int = 1
    admit_probability: float = 1.0
    expire_after_steps: int = 0  # 0: never


@dataclass(frozen=True)
class TableSpec:
    name: str
    feature: str
    rows: int
    dim: int
    init_bound: float  # initial values are uniform in [-init_bound, init_bound]
    more_features: tuple[str, ...] = ()  # that look up the same rows
    padding_id: int | None = None  # stands for no id: batches do not contain it, and its row is 0
    dynamic: Dynamic | None = None  # None: ids are numbers of rows

    @property
    def features(self) -> tuple[str, ...]:
        return (self.feature, *self.more_features)


@dataclass(frozen=True)
class Stores:
    """Where the rows of tables live, and the cache of those that do not live in the device's memory."""

    by_table: dict[str, str] = field(default_factory=dict)  # default: device_mem
    budget_bytes: int = 0  # of the cache of each process
    directory: Path = Path()  # of the row files of cached_ssd
    lookahead: int | None = None  # batches whose rows cached_ssd loads ahead; None: as many as fit
    disk_budget_bytes: int = 0
    seed: int = 0  # of first values

    def of(self, table: str) -> str:
        return self.by_table.get(table, "device_mem")

    @property
    def in_files(self) -> set[str]:
        """The tables in cached_ssd."""
        return {table for table, store in self.by_table.items() if store == "cached_ssd"}
