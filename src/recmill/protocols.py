"""The protocols of what plugs into training: models, tasks, batch sources.

Models and tasks are modules, with these functions at module level. Arguments of type `Any` are the plug-in's own: a
model gets the `Config` that it declares, a task the batches of its models and the metrics that it made.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from recmill.config.sections import EvalSection, Section
    from recmill.data.windows import WindowRules
    from recmill.metrics.binary import Values
    from recmill.tables.spec import TableSpec
    from recmill.world import World


@runtime_checkable
class ModelModule(Protocol):
    """A model: its config keys, its tables, and its network, which knows nothing of ranks.

    To add one: a module anywhere, or a file in `models/` that imports torch inside functions only, and a line in
    `registry.MODELS`. Covered by the checks of `contracts/models.py`.
    """

    TASK: str  # a name in registry.TASKS
    KIND: Literal["clicks", "histories"]  # the kind of dataset that it learns from
    Config: "type[Section]"

    def tables(self, config: Any, description: Any) -> "list[TableSpec]": ...

    def build(self, config: Any, description: Any, device: "torch.device") -> "nn.Module":
        """Build the network, which takes `Batch.inputs()`, with its tables on `device` and its layers in memory."""


@runtime_checkable
class SequenceModelModule(ModelModule, Protocol):
    """A model of histories, which also says how they are cut into windows."""

    def window_rules(self, config: Any) -> "WindowRules": ...


class Batch(Protocol):
    """This rank's part of a global batch.

    To add one: a dataclass of tensors and plain integers in `batch.py`. Covered by tests/unit/test_batch.py.
    """

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments of the network."""

    def weight(self) -> float:
        """Return the number of samples (clicks) or queries (histories), without fillers; the batch is on CPU."""

    def to(self, device: "torch.device", non_blocking: bool = False) -> Self: ...

    def pin_memory(self) -> Self: ...


class BatchSource(Protocol):
    """This rank's batches of a prepared dataset; every rank gets the same number, of equal size.

    To add one: a file in `data/`, chosen in `assemble.build_source`. Covered by tests/contracts/test_models.py.
    """

    samples_per_epoch: int

    @property
    def batches_per_epoch(self) -> int: ...

    def train_batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield batch `first` of the epoch and all later ones, in an order that depends only on seed and epoch."""

    def global_ids(self, epoch: int, batch: int) -> "dict[str, np.ndarray]":
        """Return the ids of all ranks in a training batch, by feature.

        Called in another thread than the batches are made in.
        """

    def eval_batches(self, split: str) -> Iterator[Batch]:
        """Yield every sample of the split exactly once."""

    def num_eval_batches(self, split: str) -> int: ...


class Metrics(Protocol):
    """Metrics of one evaluation. To add one: a class in `metrics/`. Covered by tests/unit/metrics/."""

    def compute(self, world: "World") -> "Values":
        """Return the values over all ranks. All ranks take part and get the same values."""


@runtime_checkable
class MetricModule(Protocol):
    """A metric that is not part of its task: sums over rows, and their value. The last part of its name is its name.

    To add one: a module anywhere. Covered by the checks of `contracts/metrics.py`.
    """

    TASK: str  # a name in registry.TASKS

    def sums(self, *rows: "np.ndarray") -> "Sequence[float]":
        """Return sums over these rows: of sums(logits, labels) for clicks, sums(ranks) for targets; rank 0 is best."""

    def value(self, *sums: float) -> float:
        """Return the metric, given the sums over all rows of all processes; there is at least one row."""


@runtime_checkable
class TaskModule(Protocol):
    """What a model learns: its loss and its metrics.

    To add one: a file in `tasks/` and a line in `registry.TASKS`. Covered by tests/contracts/test_models.py.
    """

    def loss_sum(self, network: "Callable[..., Tensor]", batch: Any) -> "Tensor":
        """Run the network and return the sum of this rank's losses; the caller divides by the global weight."""

    def new_metrics(self, section: "EvalSection", resamples: int = 0) -> Metrics: ...

    def update(self, metrics: Any, outputs: "Tensor", batch: Any) -> None:
        """Add an evaluation batch to the metrics."""

    def headline(self, values: "Values") -> str:
        """Return the name of the metric that chooses the best checkpoint; higher is better."""
