"""What the click models declare alike: their tables, and the MLPs below and above their interaction. No plug-in."""

from pydantic import Field, PositiveFloat, PositiveInt

from recmill.config.sections import Section
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec


class ClickModelConfig(Section):
    embedding_dim: PositiveInt = Field(16, multiple_of=4, description="Width of every table; a multiple of 4.")
    table_init_scale: PositiveFloat = Field(
        1.0, description="Table rows start uniform in +-scale / sqrt(rows); less than 1 for few samples."
    )
    bottom_mlp: list[PositiveInt] = Field(
        [64, 16], min_length=1, description="Layers over the dense features; the last equals embedding_dim."
    )
    top_mlp: list[PositiveInt] = Field(
        [64, 32], min_length=1, description="Layers over the interactions, before the logit."
    )

    def contradictions(self) -> list[str]:
        if self.bottom_mlp[-1] == self.embedding_dim:
            return []
        return [
            f"model.bottom_mlp ends with {self.bottom_mlp[-1]}, but model.embedding_dim is {self.embedding_dim}: "
            "the dense vector meets the tables' vectors, so make them equal."
        ]


def tables(config: ClickModelConfig, description: ClicksDescription) -> list[TableSpec]:
    """One per sparse feature; by default uniform in +-sqrt(1/rows) as in the original DLRM."""
    bounds = [config.table_init_scale * feature.rows**-0.5 for feature in description.sparse]
    return [
        TableSpec(f"table_{feature.name}", feature.name, feature.rows, config.embedding_dim, bound)
        for feature, bound in zip(description.sparse, bounds, strict=True)
    ]
