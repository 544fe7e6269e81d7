"""What a dataset module provides; `recmill prepare` uses nothing else of it."""

from typing import TYPE_CHECKING, Any, Protocol

from recmill.config import Section
from recmill.datasets.writing import Work
from recmill.schema import Description

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl


class DatasetPlan(Protocol):
    """Everything that is decided before work starts."""

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the bytes of the dataset, as JSON values. It is stored in dataset.json."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The files to read, with size and time: interrupted work is resumed only if they are the same."""


class DatasetModule(Protocol):
    """A module listed in `registry.DATASETS`. Its docstring and the fields of `Options` become the command's help."""

    Options: type[Section]

    def plan(self, options: Any) -> DatasetPlan:
        """Check `options` (this module's Options) and the input, without writing anything."""

    def write(self, plan: Any, work: Work) -> Description:
        """Write the dataset of `plan` (this module's plan) to `work.data`, dataset.json last."""


class FrameModule(Protocol):
    """What a dataset module provides as well, if options may be frames."""

    FRAMES: tuple[str, ...]  # these options

    def plan_frames(self, options: Any, frames: "Mapping[str, pl.DataFrame]") -> DatasetPlan:
        """Check `options` and the frames, which are read instead of the files of these options."""
