"""Plan which rank holds which shards of which tables: TorchRec's planner with our rules and our memory estimate.

Planning needs neither a process group nor the device that it plans for.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from recmill.errors import ConfigError, ResourceError
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.spec import USABLE_SHARE, VALUE_BYTES, Stores, TableSpec
from recmill.tables.stores.key_table import index_bytes, shard_keys

_MIN_SHARDED_ROWS = 1_000_000  # for 'auto': sharding a smaller table costs more in messages than it saves
_GPU_BATCHES = 3  # in flight: one is computed, the ids of the next are exchanged, the one after is copied
# Estimates, never measured. NCCL_BUFFSIZE is 4 MiB by default, for each channel and direction; 8 channels.
_NCCL_PEER_BYTES = 2 * 8 * (4 << 20)
_NCCL_NETWORK_BYTES = 512 << 20
_UNLIMITED_BYTES = 1 << 60
ID_BYTES = 8
_GRID = "grid_shard"  # TorchRec's name of our 'grid'
_SEQUENCE_TYPES = ("auto", "data_parallel", "table_wise", "row_wise", "column_wise")  # TorchRec has no others


@dataclass(frozen=True)
class Machines:
    world_size: int
    local_size: int  # processes per machine
    device_type: str  # cpu, cuda
    bytes_per_rank: int


@dataclass(frozen=True)
class Catalogue:
    """The items that a sequence model scores in every step.

    `is_tied`: their output weights are the rows of the table, all of which every step looks up.
    """

    items: int
    dim: int
    is_tied: bool


@dataclass(frozen=True)
class Request:
    """The tables to place, and what training does with them."""

    tables: list[TableSpec]
    types: dict[str, str]  # sharding type by table, as in the config
    optimizer: str
    batch_size_per_rank: int
    ids_per_row: dict[str, int]  # maximum per sample, by feature
    dense_state: int = 0  # values of optimizer state for each value of the dense layers
    catalogue: Catalogue | None = None
    stores: Stores = field(default_factory=Stores)
    forward_precision: str = "fp32"  # of looked-up rows, sent between ranks
    backward_precision: str = "fp32"  # of their gradients

    @property
    def cached(self) -> set[str]:
        """The tables whose rows are in the slots of a cache: those in files, and dynamic ones."""
        return self.stores.in_files | {table.name for table in self.tables if table.dynamic}

    def cache_share(self, world_size: int) -> float:
        """Return how much of the tables in cached_host_mem fits in the budgets of all GPUs together."""
        cached = [table for table in self.tables if self.stores.of(table.name) == "cached_host_mem"]
        needed = sum(VALUE_BYTES * table.rows * table.dim for table in cached)
        return min(1.0, self.stores.budget_bytes * world_size / needed) if needed else 1.0


@dataclass(frozen=True)
class Placed:
    """The placement of one table, as sharding.json shows it."""

    table: str
    rows: int
    dim: int
    type: str
    bytes_by_rank: dict[int, int]  # of rows, their optimizer state and the gradients of replicas, or of a cache
    store: str = "device_mem"


@dataclass(frozen=True)
class Planned:
    """TorchRec's plan for tables. If they do not fit, it is the one for ranks with unlimited memory."""

    sharding: ShardingPlan
    needed: dict[int, int]  # bytes by rank, with those beside tables
    beside: int  # bytes of each rank for dense layers, NCCL and the cache of files
    usable: int  # bytes of each rank
    fits: bool

    @property
    def most(self) -> tuple[int, int]:
        """The rank that needs most, and its bytes."""
        return max(self.needed.items(), key=lambda item: item[1])


def find_plan(network: nn.Module, sharders: list[Any], request: Request, machines: Machines) -> Planned:
    """Place the tables of `network`, which are on 'meta', whether they fit or not."""
    _check_types(network, request)
    usable = int(machines.bytes_per_rank * USABLE_SHARE)
    beside = bytes_beside_tables(network, request, machines)
    if request.stores.in_files:
        beside += request.stores.budget_bytes
    needed: Counter[int] = Counter()
    try:
        plan = _planner(request, machines, max(usable - beside, 0), needed).plan(network, sharders)
        fits = beside <= usable
    except PlannerError:
        plan = _planner(request, machines, _UNLIMITED_BYTES, needed).plan(network, sharders)
        fits = False
    by_rank = {rank: needed[rank] + beside for rank in range(machines.world_size)}
    return Planned(plan, by_rank, beside, usable, fits)


def make_plan(network: nn.Module, sharders: list[Any], request: Request, machines: Machines) -> ShardingPlan:
    """Place the tables of `network`, which are on 'meta'. Raise ResourceError if a rank lacks memory."""
    planned = find_plan(network, sharders, request, machines)
    if not planned.fits:
        raise does_not_fit(planned, request, machines)
    return planned.sharding


def does_not_fit(planned: Planned, request: Request, machines: Machines) -> ResourceError:
    rank, most = planned.most
    needed, usable, lacking = map(_size, (most, planned.usable, most - planned.usable))
    what = "the cache" if request.stores.in_files else "dense layers and NCCL"
    dense = f" ({_size(planned.beside)} of it for {what})" if planned.beside else ""
    budget = "a smaller tables.cache_memory_budget_mb, " if request.stores.in_files else ""
    memory = "the free memory of its GPU" if machines.device_type == "cuda" else "its share of the memory"
    return ResourceError(
        f"The tables do not fit: process {rank} of {machines.world_size} needs {needed} for its rows, their "
        f"optimizer's state and batches{dense}, but can use {usable} ({USABLE_SHARE:.0%} of {memory}), "
        f"{lacking} too little. Use {budget}more machines, another sharding, smaller tables, a "
        "smaller model.embedding_dim or a smaller train.global_batch_size."
    )


def bytes_beside_tables(network: nn.Module, request: Request, machines: Machines) -> int:
    """Estimate what training holds on a GPU beside tables, ids and looked-up rows.

    These are the dense layers with gradients and optimizer state, the copies that the loss makes of the catalogue's
    output weights or of their gradient, and NCCL's buffers. Activations are not among them. On CPU the result is 0:
    `USABLE_SHARE` leaves room for the dense layers.
    """
    if machines.device_type == "cpu":
        return 0
    dense = sum(parameter.numel() for parameter in network.parameters() if not parameter.is_meta)
    values = dense * (2 + request.dense_state)
    if request.catalogue:
        # The loss computes the gradient in forward and multiplies it in backward. A tied head also has the looked-up
        # rows and the gradient of the lookup; with several processes, DDP copies a linear head's gradient.
        copies = 4 if request.catalogue.is_tied else 1 + (machines.world_size > 1)
        values += request.catalogue.items * request.catalogue.dim * copies
    return VALUE_BYTES * values + nccl_bytes(machines)


def nccl_bytes(machines: Machines) -> int:
    """Estimate the buffers of NCCL on a GPU."""
    if machines.device_type == "cpu":
        return 0
    has_network = machines.world_size > machines.local_size
    return _NCCL_PEER_BYTES * (machines.local_size - 1) + _NCCL_NETWORK_BYTES * has_network


def placements(
    plan: ShardingPlan,
    tables: list[TableSpec],
    optimizer: str,
    cache_bytes: dict[str, dict[int, int]] | None = None,
    stores: Stores | None = None,
) -> list[Placed]:
    """Describe the plan, in the order of `tables`. `cache_bytes`: those of cached tables, by table and rank."""
    by_table = {name: sharding for module in plan.plan.values() for name, sharding in module.items()}
    out = []
    for table in tables:
        sharding = by_table[table.name]
        kind = "grid" if sharding.sharding_type == _GRID else sharding.sharding_type
        if cache_bytes and table.name in cache_bytes:
            store = stores.of(table.name) if stores else "cached_ssd"
            out.append(Placed(table.name, table.rows, table.dim, kind, cache_bytes[table.name], store))
            continue
        by_rank = Counter[int]()
        for rank, rows, columns in shards_of(sharding, table):
            by_rank[rank] += _resident_bytes(sharding.sharding_type, rows, columns, optimizer).total
        out.append(Placed(table.name, table.rows, table.dim, kind, dict(sorted(by_rank.items()))))
    return out


def shards_of(sharding: ParameterSharding, table: TableSpec) -> list[tuple[int, int, int]]:
    """Return (rank, rows, columns) of each shard of a table."""
    if sharding.sharding_spec is None:  # every rank holds the complete table
        return [(rank, table.rows, table.dim) for rank in sharding.ranks or []]
    return [(shard.placement.rank(), *shard.shard_sizes) for shard in sharding.sharding_spec.shards]


def as_rows(placed: list[Placed], world_size: int, largest: int | None = None) -> list[list[str]]:
    """Return the cells of a printed table: a header, the `largest` embedding tables or all, and the totals."""
    rows = [["table", "rows", "dim", "sharding", "process", "MB per process"]]
    for p in sorted(placed, key=lambda p: -sum(p.bytes_by_rank.values()))[:largest]:
        rows.append([p.table, f"{p.rows:,}", str(p.dim), p.type, span(list(p.bytes_by_rank)), _mb(p.bytes_by_rank)])
    totals = Counter[int]()
    for p in placed:
        totals.update(p.bytes_by_rank)
    label = "all" if len(rows) > len(placed) else f"all {len(placed)}"
    rows.append([label, f"{sum(p.rows for p in placed):,}", "", "", span(list(range(world_size))), _mb(totals)])
    rows = rows if len(placed) > 1 else rows[:2]
    return rows if world_size > 1 else [[*row[:3], row[5].removesuffix(" per process")] for row in rows]


def is_sequence_table(network: nn.Module, table: str) -> bool:
    """Return whether a table gives a vector for each id; others give the sum of a row's vectors."""
    collections = [module for module in network.modules() if isinstance(module, EmbeddingCollection)]
    return any(config.name == table for module in collections for config in module.embedding_configs())


def _check_types(network: nn.Module, request: Request) -> None:
    for table, kind in request.types.items():
        if kind not in _SEQUENCE_TYPES and is_sequence_table(network, table):
            raise ConfigError(
                f"sharding '{kind}' of table '{table}': TorchRec cannot shard a table of sequences that way. Use one "
                f"of {', '.join(_SEQUENCE_TYPES)}."
            )


def _planner(request: Request, machines: Machines, usable: int, needed: Counter[int]) -> EmbeddingShardingPlanner:
    """Return a planner for `usable` bytes per rank. When it succeeds, it adds the bytes of each rank to `needed`."""
    on_gpu = machines.device_type == "cuda"
    topology = Topology(
        world_size=machines.world_size,
        local_world_size=machines.local_size,
        compute_device=machines.device_type,
        hbm_cap=usable if on_gpu else 0,
        ddr_cap=0 if on_gpu else usable,
    )
    constraints = {table.name: _constraints(table, request, machines) for table in request.tables}
    estimators = [EmbeddingPerfEstimator(topology, constraints), _MemoryEstimator(request, machines)]

    def count_bytes(options: list[ShardingOption]) -> list[ShardingOption]:
        for shard in (shard for option in options for shard in option.shards):
            needed[shard.rank] += shard.storage.hbm + shard.storage.ddr
        return options

    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request.batch_size_per_rank,
        enumerator=EmbeddingEnumerator(topology, request.batch_size_per_rank, constraints, estimators),
        storage_reservation=FixedPercentageStorageReservation(0.0),  # `usable` is already reduced
        constraints=constraints,
        stats=[],
        callbacks=[count_bytes],
    )


def _constraints(table: TableSpec, request: Request, machines: Machines) -> ParameterConstraints:
    kind = request.types[table.name]
    num_column_shards = machines.world_size // machines.local_size if kind == "grid" else machines.world_size
    is_uvm = machines.device_type == "cuda" and request.stores.of(table.name) == "cached_host_mem"
    share = request.cache_share(machines.world_size)
    return ParameterConstraints(
        sharding_types=_allowed_types(kind, table, request, machines),
        # FBGEMM's lookup with a fused optimizer; 'dense' is for data_parallel tables.
        compute_kernels=["fused_uvm_caching"] if is_uvm else ["fused", "dense"],
        cache_params=CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=share) if is_uvm else None,
        min_partition=-(-table.dim // num_column_shards),  # TorchRec's default makes none narrower than 128
        pooling_factors=[float(request.ids_per_row[feature]) for feature in table.features],
    )


def _allowed_types(kind: str, table: TableSpec, request: Request, machines: Machines) -> list[str]:
    if kind != "auto":
        return [_GRID if kind == "grid" else kind]
    if table.dynamic and machines.world_size > 1:
        return ["row_wise"]
    if machines.world_size == 1 or table.rows < _MIN_SHARDED_ROWS:
        return ["table_wise"]
    is_cached = request.stores.of(table.name) == "cached_ssd"
    # Column shards would each have their own state of a row.
    if is_cached or "per row" in OPTIMIZERS[request.optimizer].state.values():
        return ["table_wise", "row_wise"]
    return ["table_wise", "row_wise", "column_wise"]


class _MemoryEstimator(ShardEstimator):
    """Estimates memory, including what TorchRec leaves out: states of fused optimizers, and gradients."""

    def __init__(self, request: Request, machines: Machines) -> None:
        self._request = request
        self._machines = machines
        self._tables = {table.name: table for table in request.tables}

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        on_gpu = self._machines.device_type == "cuda"
        for option in sharding_options:
            kind, pooled, table = option.sharding_type, option.is_pooled, self._tables[option.name]
            for shard in option.shards:
                needed = shard_bytes(table, (kind, *shard.size), pooled, self._request, self._machines).total
                shard.storage = Storage(hbm=needed if on_gpu else 0, ddr=0 if on_gpu else needed)


@dataclass(frozen=True)
class ShardBytes:
    """What a shard of a table needs on its device."""

    rows: int = 0
    state: int = 0  # of the optimizer
    gradients: int = 0  # of replicas: the kernel's, and DDP's bucket
    cache: int = 0  # rows behind which the others are in host memory; the keys of dynamic tables
    ids: int = 0  # before and after the exchange
    looked_up: int = 0  # rows of a batch, and their gradients

    @property
    def total(self) -> int:
        return self.rows + self.state + self.gradients + self.cache + self.ids + self.looked_up


def shard_bytes(
    table: TableSpec, shard: tuple[str, int, int], is_pooled: bool, request: Request, machines: Machines
) -> ShardBytes:
    """Return what a shard (sharding type, rows, columns) needs. The cache of tables in files is counted elsewhere."""
    kind, rows, columns = shard
    store = request.stores.of(table.name)
    on_gpu = machines.device_type == "cuda"
    if store == "cached_ssd":
        held = ShardBytes()
    elif rules := table.dynamic:
        keys = shard_keys(table.name, rules, 0, machines.world_size if rows < rules.max_rows else 1)
        held = _resident_bytes("row_wise", keys.rows, columns, request.optimizer)
        held = replace(held, cache=index_bytes(keys, rules))
    elif store == "cached_host_mem" and on_gpu:
        # FBGEMM keeps the state of rows on the GPU, that of values in host memory.
        state = rows if "per row" in OPTIMIZERS[request.optimizer].state.values() else 0
        share = request.cache_share(machines.world_size)
        held = ShardBytes(cache=VALUE_BYTES * round(rows * columns * share), state=VALUE_BYTES * state)
    else:
        held = _resident_bytes(kind, rows, columns, request.optimizer)
    ranks = 1 if kind == "data_parallel" else machines.world_size  # that send ids
    ids = sum(request.ids_per_row[feature] for feature in table.features)
    values = columns * (len(table.features) if is_pooled else ids)
    copies = request.batch_size_per_rank * ranks * 2  # of ids: before and after the exchange; of rows: gradients
    id_bytes = copies * ID_BYTES * ids * (_GPU_BATCHES if on_gpu else 1)
    looked_up = copies * VALUE_BYTES * values
    if on_gpu and request.catalogue and request.catalogue.is_tied:  # every rank looks up every row
        id_bytes += rows * ranks * 2 * ID_BYTES
        looked_up += rows * ranks * 2 * VALUE_BYTES * columns
    return replace(held, ids=id_bytes, looked_up=looked_up)


def _resident_bytes(sharding_type: str, rows: int, columns: int, optimizer: str) -> ShardBytes:
    values = rows * columns
    state = OPTIMIZERS[optimizer].state_values(rows, columns)
    gradients = 2 * values if sharding_type == "data_parallel" else 0
    return ShardBytes(VALUE_BYTES * values, VALUE_BYTES * state, VALUE_BYTES * gradients)


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _mb(bytes_by_rank: dict[int, int]) -> str:
    least, most = min(bytes_by_rank.values()), max(bytes_by_rank.values())
    return f"{most / 1e6:,.2f}" if least == most else f"{least / 1e6:,.2f} to {most / 1e6:,.2f}"


def span(ranks: list[int]) -> str:
    is_run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks))
