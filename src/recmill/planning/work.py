"""Count what one training step computes, looks up and sends, from the network and TorchRec's plan."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import nn

from recmill.tables.placement import (
    ID_BYTES,
    Machines,
    ParameterSharding,
    Planned,
    Request,
    is_sequence_table,
    shards_of,
)
from recmill.tables.spec import VALUE_BYTES, TableSpec

_PASSES = 3  # of a product: forward, and the gradients of inputs and of weights
_LAYERS_PER_BLOCK = 4  # of a sequence model
_ATTENTION_PRODUCTS = 2  # scores, and sums weighted by them


@dataclass(frozen=True)
class Samples:
    """An average sample: its positions that go through the layers, and those of them at which items are scored."""

    tokens: float = 1.0
    queries: float = 0.0


@dataclass(frozen=True)
class Case:
    """A network, its tables, the machines, and TorchRec's plan for them."""

    network: nn.Module
    request: Request
    machines: Machines
    planned: Planned
    samples: Samples

    @property
    def dense_values(self) -> int:
        """The number of values in the dense layers."""
        return sum(parameter.numel() for parameter in self.network.parameters() if not parameter.is_meta)

    def shardings(self) -> list[tuple[TableSpec, ParameterSharding]]:
        plan = self.planned.sharding.plan
        by_table = {name: sharding for module in plan.values() for name, sharding in module.items()}
        return [(table, by_table[table.name]) for table in self.request.tables]


@dataclass(frozen=True)
class Work:
    """What the busiest rank does in a step."""

    flops: float  # of matrix products, forward and backward
    values: float  # inputs and outputs of layers, which each pass reads or writes
    calls: int  # layers and tables
    lookups: float  # rows that are read, and then updated
    row_values: float  # columns of these rows
    link_bytes: float = 0.0  # sent or received, whichever is more: within the machine
    network_bytes: float = 0.0  # to or from other machines
    collectives: int = 0


@dataclass
class _Tables:
    """The work of each rank's shards: rows to look up, and bytes from and to each of the other ranks."""

    lookups: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    row_values: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    ids: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    vectors: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # and as much for their gradients
    added: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # in a machine, before they are sent
    replicated: int = 0  # bytes of tables that every rank holds
    kinds: set[str] = field(default_factory=set)  # each has exchanges of its own


def step_work(case: Case) -> Work:
    flops, values, layers = _dense_work(case.network, case.request, case.samples)
    tables = _table_work(case)
    machines, size = case.machines, case.machines.world_size
    gradients = 2 * (VALUE_BYTES * case.dense_values + tables.replicated) * (size - 1) / size
    # A rank sends to all others what it holds, and receives from each what that one holds. 16 bits are half of float32.
    precisions = case.request.forward_precision, case.request.backward_precision
    passes = sum(1.0 if precision == "fp32" else 0.5 for precision in precisions)
    busiest = sum(
        count * max((size - 1) * max(of.values(), default=0.0), sum(of.values()))
        for count, of in ((1, tables.ids), (passes, tables.vectors))
    )
    added = passes * max(tables.added.values(), default=0.0)
    far = (size - machines.local_size) / max(size - 1, 1)  # share of the peers on other machines
    has_others = size > 1
    return Work(
        flops=flops,
        values=values,
        calls=layers + len(case.request.tables),
        lookups=max(tables.lookups.values()),
        row_values=max(tables.row_values.values()),
        link_bytes=has_others * (busiest * (1 - far) + gradients * (far == 0)) + added,
        network_bytes=busiest * far + gradients * (far > 0),
        collectives=has_others * (4 * len(tables.kinds) + 1),  # lengths, ids, sums, gradients; dense gradients
    )


def _dense_work(network: nn.Module, request: Request, samples: Samples) -> tuple[float, float, int]:
    """Return the flops and values of all layers and of what combines them, and the number of layers."""
    batch, catalogue = request.batch_size_per_rank, request.catalogue
    positions = batch * samples.tokens
    shapes = [(layer.in_features, layer.out_features) for layer in network.modules() if isinstance(layer, nn.Linear)]
    flops = values = 0.0
    for width, height in shapes:
        if not (catalogue and height == catalogue.items):  # that is the head
            flops += 2 * _PASSES * positions * width * height
            values += positions * (width + height)
    dim = max(table.dim for table in request.tables)
    if catalogue:
        flops += 2 * _PASSES * batch * samples.queries * catalogue.items * catalogue.dim
    if samples.queries:
        blocks = len(shapes) / _LAYERS_PER_BLOCK
        flops += blocks * _ATTENTION_PRODUCTS * 2 * _PASSES * positions * samples.tokens * dim
    else:
        vectors = 1 + sum(len(table.features) for table in request.tables)
        flops += _PASSES * batch * vectors**2 * dim  # half of the pairs, twice a flop
        values += batch * vectors * dim
    return flops, values, len(shapes)


def _table_work(case: Case) -> _Tables:
    request, machines, samples = case.request, case.machines, case.samples
    batch, size = request.batch_size_per_rank, machines.world_size
    found = _Tables()
    for table, sharding in case.shardings():
        kind = sharding.sharding_type
        found.kinds.add(kind)
        ids = batch * sum(request.ids_per_row[feature] for feature in table.features)  # of a rank
        is_sequence = is_sequence_table(case.network, table.name)
        if is_sequence:
            ids = round(batch * samples.tokens)
            if request.catalogue and request.catalogue.is_tied:
                ids += request.catalogue.items
        vectors = ids if is_sequence else batch * len(table.features)  # that a rank receives
        parts = {"row_wise": size, **dict.fromkeys(("table_row_wise", "grid_shard"), machines.local_size)}.get(kind, 1)
        adds_first = kind in ("table_row_wise", "grid_shard") and size > machines.local_size
        senders = 1 if kind == "data_parallel" else size
        for rank, _, columns in shards_of(sharding, table):
            found.lookups[rank] += senders * ids / parts
            found.row_values[rank] += senders * ids / parts * columns
            if kind != "data_parallel":
                found.ids[rank] += ID_BYTES * ids / parts
                of_vectors = VALUE_BYTES * vectors * columns
                found.vectors[rank] += of_vectors / (parts if is_sequence or adds_first else 1)
                found.added[rank] += of_vectors * size * (parts - 1) / parts if adds_first else 0.0
        if kind == "data_parallel":
            found.replicated += VALUE_BYTES * table.rows * table.dim
    return found
