"""The plan of a generated dataset: its options are its recipe, and it has no input."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from recmill.config.sections import Section

OptionsT = TypeVar("OptionsT", bound=Section)


@dataclass(frozen=True)
class GeneratedPlan(Generic[OptionsT]):
    options: OptionsT
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> dict[str, Any]:
        return self.options.model_dump()


plan = GeneratedPlan
