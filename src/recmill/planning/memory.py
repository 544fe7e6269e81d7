"""Explain a plan: what each table and each rank holds, and what a checkpoint adds."""

from collections import defaultdict
from dataclasses import dataclass, fields

from recmill.checkpoints.saver import COPY_MARGIN
from recmill.planning.work import Case, Work
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import ShardBytes, is_sequence_table, nccl_bytes, shard_bytes, shards_of, span
from recmill.tables.slots import bytes_by_table, plan_caches
from recmill.tables.spec import VALUE_BYTES


@dataclass(frozen=True)
class TableMemory:
    """A table on ranks that hold equal shards of it. Bytes are those of each of these ranks."""

    table: str
    rows: int
    dim: int
    sharding: str
    store: str
    ranks: str
    bytes: ShardBytes


@dataclass(frozen=True)
class RankMemory:
    """The bytes of each of the `ranks`, which are equal. `total` is what the check compares with `usable`."""

    ranks: str
    tables: ShardBytes
    dense: int  # layers with gradients and optimizer state; on CPU not part of `total`
    buffers: int  # of NCCL
    layer_values: int  # activations of layers; not part of `total`
    total: int
    usable: int
    checkpoint_copy: int  # in host memory
    checkpoint_waits: bool  # there is no copy, or no room for it: training waits until the checkpoint is written
    checkpoint_peak: int  # of the device's memory
    margin: int


def explain(case: Case, work: Work, in_background: bool) -> tuple[list[TableMemory], list[RankMemory]]:
    """Return the memory of each table and of each rank, equal ranks as one entry. ConfigError: a cache is too small."""
    request, machines = case.request, case.machines
    of_tables: list[TableMemory] = []
    of_ranks = {rank: ShardBytes() for rank in range(machines.world_size)}
    caches = {}
    if request.cached:
        caches = bytes_by_table(plan_caches(case.planned.sharding, request, machines.world_size))
    for table, sharding in case.shardings():
        kind = sharding.sharding_type
        is_pooled = not is_sequence_table(case.network, table.name)
        held: dict[int, ShardBytes] = defaultdict(ShardBytes)
        for rank, rows, columns in shards_of(sharding, table):
            held[rank] = _sum(held[rank], shard_bytes(table, (kind, rows, columns), is_pooled, request, machines))
        for rank, found in held.items():
            of_ranks[rank] = _sum(of_ranks[rank], found)
            if table.name in request.stores.in_files:
                held[rank] = _sum(found, ShardBytes(cache=caches[table.name].get(rank, 0)))
        name = "grid" if kind == "grid_shard" else kind
        facts = (table.name, table.rows, table.dim, name, request.stores.of(table.name))
        of_tables += [TableMemory(*facts, span(ranks), found) for found, ranks in _equal(held).items()]
    found_ranks = _equal(of_ranks).items()
    return of_tables, [_rank_memory(span(ranks), held, case, work, in_background) for held, ranks in found_ranks]


def _rank_memory(ranks: str, held: ShardBytes, case: Case, work: Work, in_background: bool) -> RankMemory:
    request, machines, planned = case.request, case.machines, case.planned
    on_gpu = machines.device_type == "cuda"
    buffers = nccl_bytes(machines)
    budget = request.stores.budget_bytes if request.stores.in_files else 0
    held = _sum(held, ShardBytes(cache=budget))
    dense = VALUE_BYTES * case.dense_values * (2 + request.dense_state)
    if on_gpu:
        dense = planned.beside - buffers - budget
    total = held.total + planned.beside - budget
    copy = 0
    if in_background:
        copy = held.rows + held.state + VALUE_BYTES * case.dense_values * (1 + request.dense_state)
    values = round(VALUE_BYTES * work.values)
    peak = total + values + (0 if on_gpu else dense)
    has_room = on_gpu or peak + COPY_MARGIN * copy <= machines.bytes_per_rank
    waits = not (in_background and has_room)
    at_checkpoint = peak if on_gpu or waits else peak + copy
    facts = (held, dense, buffers, values, total, planned.usable, copy, waits, at_checkpoint, planned.usable - total)
    return RankMemory(ranks, *facts)


def checkpoint_bytes(case: Case) -> int:
    """Return the size of a full checkpoint: each row and layer once, with the state of its optimizer."""
    optimizer = OPTIMIZERS[case.request.optimizer]
    tables = case.request.tables
    values = sum(table.rows * table.dim + optimizer.state_values(table.rows, table.dim) for table in tables)
    return VALUE_BYTES * (values + case.dense_values * (1 + case.request.dense_state))


def _equal(by_rank: dict[int, ShardBytes]) -> dict[ShardBytes, list[int]]:
    found: dict[ShardBytes, list[int]] = defaultdict(list)
    for rank, held in sorted(by_rank.items()):
        found[held].append(rank)
    return found


def _sum(a: ShardBytes, b: ShardBytes) -> ShardBytes:
    return ShardBytes(**{field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(ShardBytes)})
