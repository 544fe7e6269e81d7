"""Config keys and tables that all click models share. Not a model itself."""

from collections.abc import Iterator

from pydantic import PositiveFloat, PositiveInt

from recmill.config.sections import Section, key
from recmill.errors import ConfigError
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec

TASK = "ctr"
KIND = "clicks"


class ClickModelConfig(Section):
    embedding_dim: PositiveInt = key(16, "Width of every table; a multiple of 4.", multiple_of=4)
    share_tables: dict[str, str] = key(
        {}, "Features that use the table of another one, by name: { C2 = 'C1' }. The dataset may name more."
    )
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
    """Return the tables, each for a feature and those that share it.

    By default rows start uniform in +-sqrt(1 / rows), as in the original DLRM. Raise ConfigError if keys of [model] do
    not fit the features of the dataset.
    """
    owners = {f.name: f.share_table or f.name for f in description.sparse} | config.share_tables
    rows = {f.name: f.rows for f in description.sparse}
    if problems := list(_problems(config, owners, rows)):
        raise ConfigError("\n".join(problems))
    made = []
    for name in (name for name in rows if owners[name] == name):
        others = tuple(other for other in rows if owners[other] == name != other)
        most = max(rows[user] for user in (name, *others))  # usually all features of a table have the same number
        bound = config.table_init_scale * most**-0.5
        made.append(TableSpec(f"table_{name}", name, most, config.embedding_dim, bound, others))
    return made


def _problems(config: ClickModelConfig, owners: dict[str, str], rows: dict[str, int]) -> Iterator[str]:
    """Yield what does not fit in the keys of single features. `owners`: of the table of each feature."""
    named = {"share_tables": {*config.share_tables, *config.share_tables.values()}}
    unknown = {name: place for place, names in named.items() for name in names - rows.keys()}
    for name, place in sorted(unknown.items()):
        yield f"model.{place}: the dataset has no feature '{name}'. It has {', '.join(rows)}."
    for name, owner in owners.items():
        if unknown.keys().isdisjoint((name, owner)) and owners[owner] != owner:
            yield f"'{name}' cannot use the table of '{owner}', which uses that of '{owners[owner]}'. Name that one."
