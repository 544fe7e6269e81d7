"""Config keys and tables that all click models share. Not a model itself."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from recmill.config.sections import Section, key
from recmill.errors import ConfigError
from recmill.schema import ClicksDescription
from recmill.tables.spec import TableSpec

if TYPE_CHECKING:
    from recmill.nn.mlp import Regularization

Width = PositiveInt
TASK = "ctr"
KIND = "clicks"


class ClickTablesConfig(Section):
    needs_one_width: ClassVar[bool] = True  # whether all vectors must be equally wide

    embedding_dim: PositiveInt = key(16, "Width of the tables and of the dense vector.")
    embedding_dims: dict[str, Width] = key(
        {}, "Other widths of single tables, by feature: { C2 = 32 }. For dcnv2, projection, two_tower."
    )
    share_tables: dict[str, str] = key(
        {}, "Features that use the table of another one, by name: { C2 = 'C1' }. The dataset may name more."
    )
    padding_ids: dict[str, NonNegativeInt] = key(
        {}, "Ids that stand for no id, by feature: { C2 = 0 }. They add nothing, and their row stays 0."
    )
    pooling: dict[str, Literal["sum", "mean"]] = key(
        {}, "How the vectors of a row's ids are combined, by feature; by default as the dataset says, or 'sum'."
    )
    table_init_scale: PositiveFloat = key(
        1.0, "Table rows start uniform in +-scale / sqrt(rows); use less than 1 for few samples."
    )
    table_init_std: float = key(
        0.0, "Instead: table rows start uniform with this standard deviation, whatever their number.", ge=0.0, le=1e6
    )

    def init_bound(self, rows: int) -> float:
        """Return the largest first value of a table."""
        return self.table_init_std * 3**0.5 if self.table_init_std else self.table_init_scale * rows**-0.5

    def contradictions(self) -> list[str]:
        problems = []
        if self.table_init_std and self.table_init_scale != 1.0:
            problems.append("model.table_init_std replaces model.table_init_scale. Remove one of them.")
        if not self.needs_one_width:
            return problems
        return problems + [
            f"model.embedding_dims.{name} = {width}, but model.embedding_dim is {self.embedding_dim}: this model needs "
            "vectors of one width, to multiply them. Remove it, or use 'dcnv2' or 'projection'."
            for name, width in self.embedding_dims.items()
            if width != self.embedding_dim
        ]


class ClickMlpsConfig(ClickTablesConfig):
    batch_norm: bool = key(False, "Normalize each layer of the MLPs before its ReLU, by the global batch.")
    dropout: float = key(
        0.0,
        "Share of the outputs of each layer that are dropped in training; not of bottom_mlp, not of gates.",
        ge=0,
        lt=1,
    )

    @property
    def needs_row_keys(self) -> bool:
        """Whether the network must know in training which rows it has."""
        return self.batch_norm or self.dropout > 0

    def regularization(self) -> "Regularization":
        from recmill.nn.mlp import Regularization

        return Regularization(self.batch_norm, self.dropout)


class ClickModelConfig(ClickMlpsConfig):
    bottom_mlp: list[PositiveInt] = key(
        [64, 16],
        "Layer widths over the dense features; the last equals embedding_dim, and follows it if the key is not given.",
        min_length=1,
    )
    top_mlp: list[PositiveInt] = key([64, 32], "Layer widths over the interactions, before the logit.", min_length=1)

    @model_validator(mode="after")
    def _follow_embedding_dim(self) -> Self:
        if "bottom_mlp" not in self.model_fields_set:
            self.__dict__["bottom_mlp"] = [*self.bottom_mlp[:-1], self.embedding_dim]
        return self

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if "bottom_mlp" in self.model_fields_set and self.bottom_mlp[-1] != self.embedding_dim:
            problems.append(
                f"model.bottom_mlp ends with {self.bottom_mlp[-1]}, but model.embedding_dim is {self.embedding_dim}: "
                "the dense vector interacts with the tables' vectors. Make them equal."
            )
        return problems


def tables(config: ClickTablesConfig, description: ClicksDescription) -> list[TableSpec]:
    """Return the tables, each for a feature and those that share it.

    By default rows start uniform in +-sqrt(1 / rows), as in the original DLRM. Raise ConfigError if keys of [model] do
    not fit the features of the dataset.
    """
    owners = {f.name: f.share_table or f.name for f in description.sparse} | config.share_tables
    rows = {f.name: f.rows for f in description.sparse}
    padding = {f.name: f.padding_id for f in description.sparse} | config.padding_ids
    if problems := list(_problems(config, owners, rows, padding)):
        raise ConfigError("\n".join(problems))
    made = []
    for name in (name for name in rows if owners[name] == name):
        others = tuple(other for other in rows if owners[other] == name != other)
        most = max(rows[user] for user in (name, *others))  # usually all features of a table have the same number
        dim = config.embedding_dims.get(name, config.embedding_dim)
        made.append(TableSpec(f"table_{name}", name, most, dim, config.init_bound(most), others, padding[name]))
    return made


def width_of_all(config: ClickModelConfig, tables: list[TableSpec]) -> int:
    """Return the width of the dense vector and of the vectors of all features together."""
    return config.embedding_dim + sum(table.dim * len(table.features) for table in tables)


def averaged(config: ClickTablesConfig, description: ClicksDescription) -> set[str]:
    """Return the features whose vectors are averaged over the ids of a row."""
    pooling = {f.name: f.pooling for f in description.sparse} | config.pooling
    return {name for name, kind in pooling.items() if kind == "mean"}


def _problems(
    config: ClickTablesConfig, owners: dict[str, str], rows: dict[str, int], padding: Mapping[str, int | None]
) -> Iterator[str]:
    """Yield what does not fit in the keys of single features. `owners`: of the table of each feature."""
    named = {
        "share_tables": {*config.share_tables, *config.share_tables.values()},
        "embedding_dims": set(config.embedding_dims),
        "padding_ids": set(config.padding_ids),
        "pooling": set(config.pooling),
    }
    unknown = {name: place for place, names in named.items() for name in names - rows.keys()}
    for name, place in sorted(unknown.items()):
        yield f"model.{place}: the dataset has no feature '{name}'. It has {', '.join(rows)}."
    for name, owner in owners.items():
        if not unknown.keys().isdisjoint((name, owner)):
            continue
        if owners[owner] != owner:
            yield f"'{name}' cannot use the table of '{owner}', which uses that of '{owners[owner]}'. Name that one."
        if name in config.embedding_dims and name != owner:
            yield f"model.embedding_dims.{name}: it uses the table of '{owner}'. Set model.embedding_dims.{owner}."
        if padding[name] not in (None, padding[owner]):
            yield (
                f"the padding id of '{name}' is {padding[name]}, but '{owner}', whose table it uses, has "
                f"{padding[owner] if padding[owner] is not None else 'none'}. Set model.padding_ids.{owner}."
            )
        elif (padding[name] or 0) >= rows[name]:
            yield f"the padding id of '{name}' is {padding[name]}, but its ids are 0 to {rows[name] - 1:,}. Change it."
