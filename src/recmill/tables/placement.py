"""Which process holds which piece of which table: TorchRec's planner, with our rules and our count of bytes.

Needs neither a process group nor the device that it plans for.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from recmill.config.sections import ADAM_ON_CPU
from recmill.errors import ConfigError, ResourceError
from recmill.tables.spec import TableSpec

# 'auto' keeps small tables whole: cutting a few thousand rows costs more messages than it saves work.
_WHOLE_TABLE_ROWS = 1_000_000
_USABLE_SHARE = 0.9  # of the memory; the rest is for dense layers, the libraries and what loads the data
_ENDLESS = 1 << 60
_TORCHREC_NAMES = {"grid": "grid_shard"}
_SEQUENCE_TYPES = ("auto", "data_parallel", "table_wise", "row_wise", "column_wise")  # TorchRec has no others


@dataclass(frozen=True)
class Machines:
    """What there is to place tables on."""

    world_size: int
    local_size: int  # processes per machine
    device_type: str  # cpu, cuda
    bytes_per_rank: int


@dataclass(frozen=True)
class Request:
    """What is to be placed."""

    tables: list[TableSpec]
    types: dict[str, str]  # by table, as in the config
    optimizer: str
    kernels: list[str]
    batch_size_per_rank: int
    ids_per_row: dict[str, int]  # by feature: how many a sample has at most


@dataclass(frozen=True)
class Placed:
    """Where a table is, and the bytes of its pieces by rank, with the optimizer's state and a replica's gradient."""

    table: str
    rows: int
    dim: int
    type: str
    bytes_by_rank: dict[int, int]


def make_plan(network: nn.Module, sharders: list[Any], request: Request, machines: Machines) -> ShardingPlan:
    """`network` has its tables on 'meta'. An error if a rank would need more memory than it has."""
    _check_types(network, request, machines)
    usable = int(machines.bytes_per_rank * _USABLE_SHARE)
    needed: Counter[int] = Counter()
    try:
        return _planner(request, machines, usable, needed).plan(network, sharders)
    except PlannerError as error:
        _planner(request, machines, _ENDLESS, needed).plan(network, sharders)
        rank, most = max(needed.items(), key=lambda item: item[1])
        raise ResourceError(
            f"The tables do not fit: process {rank} of {machines.world_size} needs {_size(most)} for its rows, their "
            f"optimizer's state and batches, but can use {_size(usable)} ({_USABLE_SHARE:.0%} of its share of the "
            f"memory), {_size(most - usable)} too little. Use more machines, another sharding, smaller tables, a "
            "smaller model.embedding_dim or a smaller train.global_batch_size."
        ) from error


def placements(plan: ShardingPlan, tables: list[TableSpec], optimizer: str) -> list[Placed]:
    """In the order of `tables`."""
    how = {name: placed for module in plan.plan.values() for name, placed in module.items()}
    out = []
    for table in tables:
        placed, by_rank = how[table.name], Counter[int]()
        if placed.sharding_spec is None:
            pieces = [(rank, [table.rows, table.dim]) for rank in placed.ranks]
        else:
            pieces = [(shard.placement.rank(), shard.shard_sizes) for shard in placed.sharding_spec.shards]
        for rank, (rows, columns) in pieces:
            by_rank[rank] += _piece_bytes(placed.sharding_type, rows, columns, optimizer)
        kind = next((ours for ours, theirs in _TORCHREC_NAMES.items() if theirs == placed.sharding_type), None)
        out.append(
            Placed(table.name, table.rows, table.dim, kind or placed.sharding_type, dict(sorted(by_rank.items())))
        )
    return out


def as_text(placed: list[Placed], world_size: int) -> str:
    """One line a table."""
    header = ("table", "rows", "dim", "sharding", "ranks", "MB per rank")
    lines = [header]
    totals = Counter[int]()
    for p in placed:
        totals.update(p.bytes_by_rank)
        lines.append((p.table, f"{p.rows:,}", str(p.dim), p.type, _span(list(p.bytes_by_rank)), _mb(p.bytes_by_rank)))
    lines.append(("all", f"{sum(p.rows for p in placed):,}", "", "", _span(list(range(world_size))), _mb(totals)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _check_types(network: nn.Module, request: Request, machines: Machines) -> None:
    types = set(request.types.values())
    if request.optimizer == "adam" and machines.device_type == "cpu" and types != {"data_parallel"}:
        raise ConfigError(ADAM_ON_CPU)
    for module in network.modules():
        for table in module.embedding_configs() if isinstance(module, EmbeddingCollection) else []:
            if request.types[table.name] not in _SEQUENCE_TYPES:
                raise ConfigError(
                    f"sharding '{request.types[table.name]}' of table '{table.name}': TorchRec cannot cut a table of "
                    f"sequences that way. Use one of {', '.join(_SEQUENCE_TYPES)}."
                )


def _planner(request: Request, machines: Machines, usable: int, needed: Counter[int]) -> EmbeddingShardingPlanner:
    """Its plan leaves in `needed` the bytes that each rank needs."""
    on_gpu = machines.device_type == "cuda"
    topology = Topology(
        world_size=machines.world_size,
        local_world_size=machines.local_size,
        compute_device=machines.device_type,
        hbm_cap=usable if on_gpu else 0,
        ddr_cap=0 if on_gpu else usable,
    )
    constraints = {table.name: _constraints(table, request, machines) for table in request.tables}
    estimators: list[ShardEstimator] = [EmbeddingPerfEstimator(topology, constraints), _Memory(request, machines)]

    def note(options: list[ShardingOption]) -> list[ShardingOption]:
        for shard in (shard for option in options for shard in option.shards):
            needed[shard.rank] += shard.storage.hbm + shard.storage.ddr
        return options

    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request.batch_size_per_rank,
        enumerator=EmbeddingEnumerator(topology, request.batch_size_per_rank, constraints, estimators),
        storage_reservation=FixedPercentageStorageReservation(0.0),  # `usable` is without it
        constraints=constraints,
        stats=[],
        callbacks=[note],
    )


def _constraints(table: TableSpec, request: Request, machines: Machines) -> ParameterConstraints:
    kind = request.types[table.name]
    # Columns are cut into as many pieces as there are takers; TorchRec's own rule is never narrower than 128.
    takers = machines.world_size // machines.local_size if kind == "grid" else machines.world_size
    return ParameterConstraints(
        sharding_types=[_TORCHREC_NAMES.get(way, way) for way in _ways(kind, table, request, machines)],
        compute_kernels=request.kernels,
        min_partition=-(-table.dim // takers),
        pooling_factors=[float(request.ids_per_row[table.feature])],
    )


def _ways(kind: str, table: TableSpec, request: Request, machines: Machines) -> list[str]:
    if kind != "auto":
        return [kind]
    if machines.world_size == 1 or table.rows < _WHOLE_TABLE_ROWS:
        return ["table_wise"]
    # A piece of columns has a row-wise state of its own: another optimizer than that of the whole row.
    return ["table_wise", "row_wise"] + (["column_wise"] if request.optimizer != "rowwise_adagrad" else [])


class _Memory(ShardEstimator):
    """TorchRec's own estimate leaves out the optimizer's state (where it is named in fused_params) and gradients."""

    def __init__(self, request: Request, machines: Machines) -> None:
        self._request, self._machines = request, machines

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        for option in sharding_options:
            for shard in option.shards:
                rows, columns = shard.size
                needed = _piece_bytes(option.sharding_type, rows, columns, self._request.optimizer)
                needed += self._batch_bytes(option, columns)
                on_gpu = self._machines.device_type == "cuda"
                shard.storage = Storage(hbm=needed if on_gpu else 0, ddr=0 if on_gpu else needed)

    def _batch_bytes(self, option: ShardingOption, columns: int) -> int:
        """Ids as they come and as they are exchanged, rows looked up and their gradients."""
        is_local = option.sharding_type == "data_parallel"
        samples = self._request.batch_size_per_rank * (1 if is_local else self._machines.world_size)
        ids = round(option.input_lengths[0])
        return samples * (2 * 8 * ids + 2 * 4 * columns * (1 if option.is_pooled else ids))


def _piece_bytes(sharding_type: str, rows: int, columns: int, optimizer: str) -> int:
    values = rows * columns
    state = {"sgd": 0, "rowwise_adagrad": rows, "adagrad": values, "adam": 2 * values}[optimizer]
    gradient = 2 * values if sharding_type == "data_parallel" else 0  # the kernel's, and DDP's bucket
    return 4 * (values + state + gradient)


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _mb(bytes_by_rank: dict[int, int]) -> str:
    least, most = min(bytes_by_rank.values()), max(bytes_by_rank.values())
    return f"{most / 1e6:,.2f}" if least == most else f"{least / 1e6:,.2f} to {most / 1e6:,.2f}"


def _span(ranks: list[int]) -> str:
    is_run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks))
