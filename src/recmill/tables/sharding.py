"""The one place that cuts tables over processes: TorchRec's DistributedModelParallel, after the plan of plan.py."""

import ctypes
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill.config.sections import TablesOptim
from recmill.errors import UserError
from recmill.hardware.memory import memory_bytes
from recmill.tables.native_lookup import replace_lookup
from recmill.tables.placement import Machines, Request, make_plan
from recmill.world import World

_FUSED_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
}


class _BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec lists fewer ways to cut a table for CPU than its gloo path can do."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


class _SequenceSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def shard(
    network: nn.Module, request: Request, optimizer: TablesOptim, world: World, kernels: ctypes.CDLL | None = None
) -> DistributedModelParallel:
    """`network` has its tables on 'meta'; each rank gets memory for its own shards only. All ranks take part.

    `kernels`: our own, for CPU.
    """
    sharders = make_sharders(optimizer)
    plan = _plan_for_all(network, sharders, request, world)
    # One process has nobody to average gradients with.
    model = DistributedModelParallel(
        network, device=world.device, plan=plan, sharders=sharders, init_data_parallel=world.size > 1
    )
    if world.device.type == "cpu":
        _mend_replicated_sequences(model)
        if kernels is not None:
            _use_native(model, kernels, is_alone=world.size == 1)
    return model


def _mend_replicated_sequences(model: nn.Module) -> None:
    """FBGEMM's dense kernel on CPU sums the rows of a sequence even when it is asked for each of them."""
    for module in model.modules():
        for lookup in module._lookups if isinstance(module, ShardedEmbeddingCollection) else []:
            for kernel in lookup.modules():
                if isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen):
                    kernel.forward = partial(_rows_of_sequences, kernel)


def _use_native(model: nn.Module, kernels: ctypes.CDLL, is_alone: bool) -> None:
    """In every layer and table that has a kernel of ours."""
    for module in model.modules():
        if hasattr(type(module), "native"):
            module.native = kernels  # type: ignore[assignment]
        if isinstance(module, ShardedEmbeddingBagCollection):
            parts = [part for lookup in module._lookups for part in lookup.modules()]
            groups = [part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)]
            for group in groups:
                replace_lookup(group, kernels)
            if is_alone and len(module._lookups) == len(groups) == 1:
                module.forward = partial(_without_exchange, module, module.forward, groups[0])


def _without_exchange(
    tables: ShardedEmbeddingBagCollection, otherwise: Any, group: nn.Module, ids: KeyedJaggedTensor
) -> Any:
    """All ids and all rows are here: TorchRec's ways to the right rank and back would cost a millisecond a step."""
    if tables._embedding_names != ids.keys():
        return otherwise(ids)
    sums = group.forward(ids.values(), ids.offsets())
    return KeyedTensor(tables._embedding_names, tables._embedding_dims, sums)


def _rows_of_sequences(kernel: DenseTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor) -> Tensor:
    """The kernel's tables are one after the other in memory, all of one width."""
    first_rows = kernel.hash_size_cumsum[:-1]  # by feature
    batch_size = (len(offsets) - 1) // len(first_rows)
    shifts = first_rows.repeat_interleave(offsets[::batch_size].diff())
    return F.embedding(indices + shifts, kernel.weights.view(-1, kernel.max_D))


def make_sharders(optimizer: TablesOptim) -> list[Any]:
    fused: dict[str, Any] = {
        "optimizer": _FUSED_OPTIMIZERS[optimizer.name],
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        # Loading has checked every id; if one slips through, stop instead of training a wrong row.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    # Each sharder changes its dictionary: one copy each.
    return [_BagSharder(fused_params=dict(fused)), _SequenceSharder(fused_params=dict(fused))]


def _plan_for_all(network: nn.Module, sharders: list[Any], request: Request, world: World) -> ShardingPlan:
    """Made on rank 0, for the smallest of all shares of memory. All ranks take part, and all fail if it does."""
    on_gpu = world.device.type == "cuda"
    total = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else memory_bytes()
    shares = world.gather(total if on_gpu else total // world.local_size)
    found: ShardingPlan | UserError | None = None
    if shares is not None:  # on rank 0
        machines = Machines(world.size, world.local_size, world.device.type, min(shares))
        try:
            found = make_plan(network, sharders, request, machines)
        except UserError as error:
            found = error
    plan = world.broadcast(found)
    if isinstance(plan, UserError):
        raise plan
    assert plan is not None
    return plan
