"""Config keys and tables that all click models share. Not a model itself."""

from pydantic import PositiveFloat, PositiveInt

from recmill.config.sections import Section, key
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec

TASK = "ctr"
KIND = "clicks"


class ClickModelConfig(Section):
    embedding_dim: PositiveInt = key(16, "Width of every table; a multiple of 4.", multiple_of=4)
    table_init_scale: PositiveFloat = key(
        1.0, "Table rows start uniform in +-scale / sqrt(rows); use less than 1 for few samples."
    )
    bottom_mlp: list[PositiveInt] = key(
        [64, 16], "Layer widths over the dense features; the last equals embedding_dim.", min_length=1
    )
    top_mlp: list[PositiveInt] = key([64, 32], "Layer widths over the interactions, before the logit.", min_length=1)

    def contradictions(self) -> list[str]:
        if self.bottom_mlp[-1] == self.embedding_dim:
            return []
        return [
            f"model.bottom_mlp ends with {self.bottom_mlp[-1]}, but model.embedding_dim is {self.embedding_dim}: "
            "the dense vector interacts with the tables' vectors. Make them equal."
        ]


def tables(config: ClickModelConfig, description: ClicksDescription) -> list[TableSpec]:
    """Return one table per sparse feature, by default uniform in +-sqrt(1 / rows) as in the original DLRM."""
    scale = config.table_init_scale
    return [
        TableSpec(f"table_{f.name}", f.name, f.rows, config.embedding_dim, init_bound=scale * f.rows**-0.5)
        for f in description.sparse
    ]
