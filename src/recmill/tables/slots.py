"""Tables in cached_ssd and dynamic tables as TorchRec sees them: with as many rows as their cache has slots.

Cached tables of a process that have the same sharding type and width share one cache, whose slots are the weights of
their FBGEMM module.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.types import ShardingPlan

from recmill import rng
from recmill.errors import ConfigError
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import Request
from recmill.tables.stores.key_table import SHARED_ROWS, KeyShard, index_bytes, shard_keys
from recmill.tables.stores.row_cache import CachePlan, RowLayout, Shard, plan_cache
from recmill.tables.torchrec_internals import ShardMetadata, tables_of


@dataclass(frozen=True)
class CacheGroup:
    """The tables in one cache of a rank, with (first row, rows) of the shard that it holds of each."""

    shards: dict[str, tuple[int, int]]
    plan: CachePlan
    keys: dict[str, KeyShard] = field(default_factory=dict)  # of dynamic tables

    def rows_in_fbgemm(self, table: str) -> int:
        """Return the rows of FBGEMM's table: one in all but the first, which has the rest of the slots."""
        is_first = table == next(iter(self.shards))
        return max(1, self.plan.slots - len(self.shards) + 1) if is_first else 1


_MAX_BUDGET_MB = 1 << 24
GroupKey = tuple[int, str, int]  # rank, sharding type, width
CacheGroups = dict[GroupKey, CacheGroup]


def plan_caches(plan: ShardingPlan, request: Request, world_size: int) -> CacheGroups:
    """Divide the budget of each rank among its caches. Raise ConfigError if it is too small."""
    shards: dict[GroupKey, dict[str, tuple[int, int]]] = defaultdict(dict)
    keys: dict[GroupKey, dict[str, KeyShard]] = defaultdict(dict)
    rules = {table.name: table.dynamic for table in request.tables if table.dynamic}
    if rules and world_size > SHARED_ROWS:
        raise ConfigError(f"tables.dynamic: at most {SHARED_ROWS:,} processes can share a dynamic table.")
    for name, sharding in _cached(plan, request):
        own_shards = sharding.sharding_spec.shards
        for part, shard in enumerate(own_shards):
            rows, dim = shard.shard_sizes
            group = shard.placement.rank(), sharding.sharding_type, dim
            shards[group][name] = shard.shard_offsets[0], rows
            if name in rules:
                keys[group][name] = shard_keys(name, rules[name], part, len(own_shards))
                shards[group][name] = 0, keys[group][name].rows
    groups: CacheGroups = {}
    for rank in {rank for rank, *_ in shards}:
        own = {key: held for key, held in shards.items() if key[0] == rank}
        plan_with = partial(_plan_rank, own, keys, request, request.batch_size_per_rank * world_size)
        try:
            groups |= plan_with(request.stores.budget_bytes)
        except ConfigError as error:
            if len(own) == 1 or not _fits(plan_with, _MAX_BUDGET_MB):
                raise
            least = bisect_left(range(_MAX_BUDGET_MB), True, key=partial(_fits, plan_with))
            raise ConfigError(
                f"tables.cache_memory_budget_mb: {request.stores.budget_bytes >> 20:,} MB is too little for the "
                f"{len(own)} caches of process {rank}, one for each sharding type and width, which share it. Set it to "
                f"at least {least:,}, or use more processes."
            ) from error
    return groups


def _plan_rank(
    own: dict[GroupKey, dict[str, tuple[int, int]]],
    keys: dict[GroupKey, dict[str, KeyShard]],
    request: Request,
    samples: int,
    budget: int,
) -> CacheGroups:
    """Divide the budget of a rank among its caches. `samples`: those of a global batch."""
    groups: CacheGroups = {}
    rules = {table.name: table.dynamic for table in request.tables if table.dynamic}
    lookups = {key: _most_rows_in_batch(held, request, samples) for key, held in own.items()}
    # Begin with the caches that have the fewest rows per lookup: they may not need all of their share.
    for key in sorted(own, key=lambda key: _all_rows(own[key]) / max(1, lookups[key])):
        share = budget * lookups[key] * key[2] // max(1, sum(lookups[key] * key[2] for key in lookups))
        min_slots = max(lookups.pop(key), len(own[key]))
        of_keys = sum(index_bytes(shard, rules[name]) for name, shard in keys[key].items())
        layout, in_files = layout_of(own[key], request), request.stores.in_files & {*own[key]}
        try:
            made = _plan(layout, share, (min_slots, None), of_keys, in_files)
        except ConfigError:
            if len(own) == 1:
                raise
            made = _plan(layout, budget, (min_slots, min_slots), of_keys, in_files)  # no more than it needs
        groups[key] = CacheGroup(own[key], made, keys[key])
        budget -= made.memory_bytes
    return groups


def _fits(plan_with: Callable[[int], CacheGroups], budget_mb: int) -> bool:
    try:
        plan_with(budget_mb << 20)
    except ConfigError:
        return False
    return True


def _plan(
    layout: RowLayout, share: int, slots: tuple[int, int | None], key_bytes: int, in_files: set[str]
) -> CachePlan:
    """Plan a cache with `key_bytes` for the keys of dynamic tables. One that is not for files has all rows."""
    if not in_files:
        return CachePlan(layout.rows, 0, layout.rows * layout.value_bytes + key_bytes, key_bytes)
    made = plan_cache(layout, share - key_bytes, *slots)
    return replace(made, memory_bytes=made.memory_bytes + key_bytes, index_bytes=made.index_bytes + key_bytes)


def bytes_by_table(groups: CacheGroups) -> dict[str, dict[int, int]]:
    """Divide the memory of each cache among its tables by their rows: bytes by table and rank."""
    out: dict[str, dict[int, int]] = defaultdict(dict)
    for (rank, *_), group in sorted(groups.items()):
        for name, (_, rows) in group.shards.items():
            out[name][rank] = round(group.plan.memory_bytes * rows / max(1, _all_rows(group.shards)))
    return out


def layout_of(shards: dict[str, tuple[int, int]], request: Request) -> RowLayout:
    """Describe the shards of a cache, in this order."""
    specs = {table.name: table for table in request.tables}
    seed = request.stores.seed

    def shard(name: str) -> Shard:
        first, rows = shards[name]
        return Shard(rows, first, rng.stream_key(seed, "table", name), specs[name].init_bound)

    (dim,) = {specs[name].dim for name in shards}
    return RowLayout(tuple(map(shard, shards)), dim, OPTIMIZERS[request.optimizer].state_values(1, dim))


def use_slots(network: nn.Module, plan: ShardingPlan, groups: CacheGroups, request: Request) -> None:
    """Give the cached tables of `network`, which are on 'meta', and of its plan the sizes of their caches."""
    sizes: dict[str, int] = {}
    for name, sharding in _cached(plan, request):
        slots, offset = [], 0
        for shard in sharding.sharding_spec.shards:
            rows = groups[shard.placement.rank(), sharding.sharding_type, shard.shard_sizes[1]].rows_in_fbgemm(name)
            slots.append(ShardMetadata([offset, 0], [rows, shard.shard_sizes[1]], shard.placement))
            offset += rows
        sharding.sharding_spec.shards = slots
        # TorchRec then puts cached tables into other groups than those that FBGEMM checks the ids of.
        sharding.bounds_check_mode = BoundsCheckMode.NONE
        sizes[name] = offset
    resize_tables(network, sizes)


def resize_tables(network: nn.Module, sizes: dict[str, int]) -> None:
    """Give tables of `network`, which are on 'meta', other numbers of rows."""
    for config, table in tables_of(network):
        if config.name in sizes:
            config.num_embeddings = table.num_embeddings = sizes[config.name]
            table.weight = nn.Parameter(torch.empty(sizes[config.name], config.embedding_dim, device="meta"))


def _cached(plan: ShardingPlan, request: Request) -> list[tuple[str, Any]]:
    return [item for module in plan.plan.values() for item in module.items() if item[0] in request.cached]


def _most_rows_in_batch(shards: dict[str, tuple[int, int]], request: Request, samples: int) -> int:
    """Return how many distinct rows a global batch of `samples` can need."""
    specs = {table.name: table for table in request.tables}
    ids = {name: sum(request.ids_per_row[feature] for feature in specs[name].features) for name in shards}
    return sum(min(rows, samples * ids[name]) for name, (_, rows) in shards.items())


def _all_rows(shards: dict[str, tuple[int, int]]) -> int:
    return sum(rows for _, rows in shards.values())
