"""The one place that cuts tables over processes: TorchRec's planner and DistributedModelParallel."""

import logging
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from recmill.config.sections import TablesOptim
from recmill.errors import ConfigError, ResourceError
from recmill.observe.run_dir import memory_bytes
from recmill.schema import TableSpec
from recmill.world import World

log = logging.getLogger(__name__)

_FUSED_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
}
# 'auto' keeps small tables whole: cutting a few thousand rows costs more messages than it saves work.
_WHOLE_TABLE_ROWS = 1_000_000


class _BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec lists fewer ways to cut a table for CPU than its gloo path can do."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


class _SequenceSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def shard(
    network: nn.Module,
    tables: list[TableSpec],
    *,
    sharding: str,
    kernels: list[str],
    optimizer: TablesOptim,
    batch_size_per_rank: int,
    world: World,
) -> DistributedModelParallel:
    """`network` has its tables on 'meta'; each rank gets memory for its own shards only. All ranks take part."""
    if optimizer.name == "adam" and world.device.type == "cpu":
        raise ConfigError(
            "optim.tables.name = 'adam' needs CUDA: FBGEMM has no fused Adam on CPU. "
            "Use 'rowwise_adagrad' or 'adagrad'."
        )
    fused: dict[str, Any] = {
        "optimizer": _FUSED_OPTIMIZERS[optimizer.name],
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        # Loading has checked every id; if one slips through, stop instead of training a wrong row.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    # Each sharder changes its dictionary: one copy each.
    sharders: list[Any] = [_BagSharder(fused_params=dict(fused)), _SequenceSharder(fused_params=dict(fused))]
    plan = _plan(network, tables, sharding, optimizer.name, kernels, sharders, batch_size_per_rank, world)
    if world.is_main:
        _log_plan(plan)
    return DistributedModelParallel(network, device=world.device, plan=plan, sharders=sharders)


def _plan(
    network: nn.Module,
    tables: list[TableSpec],
    sharding: str,
    optimizer: str,
    kernels: list[str],
    sharders: list[Any],
    batch_size_per_rank: int,
    world: World,
) -> ShardingPlan:
    memory = memory_bytes() // world.local_size
    on_gpu = world.device.type == "cuda"
    hbm = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else 0
    topology = Topology(
        world_size=world.size,
        local_world_size=world.local_size,
        compute_device=world.device.type,
        hbm_cap=hbm,
        ddr_cap=memory,
    )
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=_ways(sharding, optimizer, table, world), compute_kernels=kernels
        )
        for table in tables
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size_per_rank,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    try:
        return planner.collective_plan(network, sharders, dist.group.WORLD)
    except PlannerError as error:
        gigabytes = sum(4 * table.rows * table.dim for table in tables) / 1e9
        raise ResourceError(
            f"{gigabytes:.1f} GB of tables and their optimizer's state do not fit into {world.size} process(es) of "
            f"{(hbm or memory) / 1e9:.1f} GB, with batches of {batch_size_per_rank:,}. "
            "Use more machines, smaller tables, a smaller model.embedding_dim or a smaller train.global_batch_size."
        ) from error


def _log_plan(plan: ShardingPlan) -> None:
    """One line: how many tables are cut how."""
    cuts: Counter[str] = Counter()
    for parameters in plan.plan.values():
        for placed in parameters.values():
            pieces = len(placed.sharding_spec.shards)
            cuts[f"{placed.sharding_type} in {pieces} piece{'s' if pieces > 1 else ''}"] += 1
    log.info("sharding: %s", ", ".join(f"{count} table(s) {cut}" for cut, count in sorted(cuts.items())))


def _ways(sharding: str, optimizer: str, table: TableSpec, world: World) -> list[str]:
    if sharding != "auto":
        return [sharding]
    if world.size == 1 or table.rows < _WHOLE_TABLE_ROWS:
        return ["table_wise"]
    # A piece of columns has a row-wise state of its own: another optimizer than that of the whole row.
    return ["table_wise", "row_wise"] + (["column_wise"] if optimizer != "rowwise_adagrad" else [])
