"""Shard a network's tables over the ranks with TorchRec, following the plan of `placement`."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import CommOp, QuantizedCommCodecs, ShardingPlan

from recmill.config.sections import TablesOptim
from recmill.errors import ConfigError, UserError
from recmill.hardware.memory import memory_bytes
from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.tables.cached_tables import CachedTables
from recmill.tables.native_lookup import RowKernels
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import Machines, Request, make_plan
from recmill.tables.slots import CacheGroups, bytes_by_table, layout_of, plan_caches, resize_tables, use_slots
from recmill.tables.stores.key_table import KeyTable, keys_per_part
from recmill.tables.stores.memory_rows import MemoryRows
from recmill.tables.stores.row_cache import RowCache
from recmill.tables.table_lookup import install_lookups
from recmill.tables.torchrec_internals import (
    FusedTables,
    adam_on_cpu,
    any_width_on_cpu,
    cut_ids_of,
    grouping_by_width,
    place_on,
)
from recmill.world import World


# On CPU, too, offer every sharding type that TorchRec lists for GPUs: they all work over gloo.
class _BagSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


class _SequenceSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def shard(
    network: nn.Module, request: Request, optimizer: TablesOptim, world: World, library: KernelLibrary | None = None
) -> DistributedModelParallel:
    """Shard the tables of `network`, which are on 'meta': a rank allocates only its own shards. All ranks take part.

    `library` has our CPU kernels for tables and layers; without it, torch's and FBGEMM's are used.
    """
    if world.device.type == "cuda" and (problem := optimizer.problem_on_cuda()):
        raise ConfigError(problem)
    odd = [table for table in request.tables if table.dim % 4]
    if world.device.type == "cuda" and odd:
        raise ConfigError(
            f"{odd[0].name} is {odd[0].dim} wide: FBGEMM's CUDA kernels need widths that are multiples of 4. Change "
            "model.embedding_dim, or train on CPU."
        )
    sharders = make_sharders(optimizer, _codecs(request) if world.size > 1 else None)
    resize_tables(network, {table.name: table.rows for table in request.tables if table.dynamic})
    plan, groups = _plan_on_rank_0(network, sharders, request, world)
    use_slots(network, plan, groups, request)
    is_on_cpu = world.device.type == "cpu"
    # DDP averages the gradients of replicas; one process needs none.
    needs_adam = is_on_cpu and OPTIMIZERS[optimizer.name].fbgemm_type == EmbOptimType.ADAM
    widths = any_width_on_cpu() if is_on_cpu else nullcontext()
    with grouping_by_width(), widths, adam_on_cpu() if needs_adam else nullcontext():
        model = DistributedModelParallel(
            network, device=world.device, plan=plan, sharders=sharders, init_data_parallel=world.size > 1
        )
    if world.size == 1:  # with several, DDP moves the dense layers to the device
        model.module.to(world.device)
    open_cache = partial(_open_cache, plan, groups, request, world)
    install_lookups(model, RowKernels(optimizer, library), world.device, world.size, open_cache)
    model.cache_bytes = bytes_by_table(groups)
    model.stores = request.stores
    model.cached_specs = [table for table in request.tables if table.name in request.cached]
    num_keys = keys_per_part(world.size) * world.size
    sizes = {table: num_keys if table.dynamic else table.rows for table in model.cached_specs}
    cut_ids_of({feature: size for table, size in sizes.items() for feature in table.features}, model)
    if library is not None:
        use_kernels(model, library)
    return model


class _Codec(QuantizedCommCodec):
    """FBGEMM's codec, with a `scale` that keeps small gradients away from the smallest numbers of fp16.

    FBGEMM's own `loss_scale` is undone before values are float32 again, which loses them.
    """

    def __init__(self, precision: str, scale: float = 1.0) -> None:
        super().__init__(SparseType(precision))
        self._scale = scale

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        return super().encode(input_tensor * self._scale, ctx)

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        return super().decode(input_tensor, ctx) / self._scale


def _codecs(request: Request) -> dict[str, QuantizedCommCodecs] | None:
    """Return how TorchRec sends looked-up rows and their gradients, by kind of exchange; None: as they are."""
    if request.forward_precision == request.backward_precision == "fp32":
        return None
    # The loss is a mean over the batch, so gradients shrink with it; a power of two changes no digit.
    scale = 2.0 ** request.batch_size_per_rank.bit_length() if request.backward_precision == "fp16" else 1.0
    codecs = QuantizedCommCodecs(_Codec(request.forward_precision), _Codec(request.backward_precision, scale))
    exchanges = (
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
    )
    return {exchange.name: codecs for exchange in exchanges}


def make_sharders(optimizer: TablesOptim, codecs: dict[str, QuantizedCommCodecs] | None = None) -> list[Any]:
    """Return TorchRec's sharders for bags and for sequences; FBGEMM applies `optimizer` in backward."""
    fused: dict[str, Any] = {
        "optimizer": OPTIMIZERS[optimizer.name].fbgemm_type,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        # Ids are checked when they are loaded: a bad one is a defect, and must not train a wrong row.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if optimizer.weight_decay:  # our kernels decay rows on CPU, with the same meaning
        fused["weight_decay"] = optimizer.weight_decay
        if optimizer.name == "rowwise_adagrad":
            fused["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    if optimizer.l2 and optimizer.name == "rowwise_adagrad" and not optimizer.weight_decay:
        fused |= {"weight_decay": optimizer.l2, "weight_decay_mode": WeightDecayMode.L2}
    # Each sharder changes its own copy.
    return [sharder(dict(fused), qcomm_codecs_registry=codecs) for sharder in (_BagSharder, _SequenceSharder)]


def _open_cache(
    plan: ShardingPlan, groups: CacheGroups, request: Request, world: World, tables: list[str], fused: FusedTables
) -> CachedTables | None:
    """Open the cache of a group of tables on this rank, if they are cached."""
    if tables[0] not in request.cached:
        return None
    (kind,) = {module[tables[0]].sharding_type for module in plan.plan.values() if tables[0] in module}
    group = groups[world.rank, kind, fused.dim]
    assert group.shards.keys() == set(tables), (tables, group.shards)  # as TorchRec groups tables
    layout = layout_of({table: group.shards[table] for table in tables}, request)
    stores = request.stores
    slab = fused.slots(group.plan.slots, layout.state_columns)
    cache: RowCache | MemoryRows
    if stores.in_files:
        cache = RowCache(
            layout,
            group.plan,
            stores.directory,
            lookahead=stores.lookahead or 0,
            disk_budget_bytes=stores.disk_budget_bytes,
            slab=slab,
        )
    else:
        cache = MemoryRows(layout, group.plan, slab)
    specs = {table.name: table for table in request.tables}
    dynamic = {
        table: KeyTable(group.keys[table], rules, stores.seed) for table in tables if (rules := specs[table].dynamic)
    }
    for table, keyed in dynamic.items():
        count = keyed.shard.shared_rows
        shared = layout.starts[tables.index(table)] + np.arange(count)
        cache.load(shared, *(np.zeros((count, columns), np.float32) for columns in (layout.dim, layout.state_columns)))
    looks_ahead = stores.lookahead != 0 and not dynamic
    return CachedTables(cache, fused, [specs[table] for table in tables], dynamic, looks_ahead)


def _plan_on_rank_0(
    network: nn.Module, sharders: list[Any], request: Request, world: World
) -> tuple[ShardingPlan, CacheGroups]:
    """Plan on rank 0, for the rank with the least memory. All ranks take part; if planning fails, all raise."""
    on_gpu = world.device.type == "cuda"
    share = torch.cuda.mem_get_info(world.device)[0] if on_gpu else memory_bytes() // world.local_size
    ranks = world.gather((share, world.device))
    result: tuple[ShardingPlan, CacheGroups] | UserError | None = None
    if ranks is not None:  # on rank 0
        least = min(share for share, _ in ranks)
        machines = Machines(world.size, world.local_size, world.device.type, least)
        try:
            plan = make_plan(network, sharders, request, machines)
            place_on(plan, [device for _, device in ranks])
            result = plan, plan_caches(plan, request, world.size)
        except UserError as error:
            result = error
    result = world.broadcast(result)
    if isinstance(result, UserError):
        raise result
    assert result is not None
    return result
