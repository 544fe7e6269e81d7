"""Shard a network's tables over the ranks with TorchRec, following the plan of `placement`."""

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from recmill.config.sections import TablesOptim
from recmill.errors import UserError
from recmill.hardware.memory import memory_bytes
from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import Machines, Request, make_plan
from recmill.tables.table_lookup import install_lookups
from recmill.tables.torchrec_internals import place_on
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
    sharders = make_sharders(optimizer)
    plan = _plan_on_rank_0(network, sharders, request, world)
    # DDP averages the gradients of replicas; one process needs none.
    model = DistributedModelParallel(
        network, device=world.device, plan=plan, sharders=sharders, init_data_parallel=world.size > 1
    )
    if world.size == 1:  # with several, DDP moves the dense layers to the device
        model.module.to(world.device)
    install_lookups(model, library, world.device, world.size)
    if library is not None:
        use_kernels(model, library)
    return model


def make_sharders(optimizer: TablesOptim) -> list[Any]:
    """Return TorchRec's sharders for bags and for sequences; FBGEMM applies `optimizer` in backward."""
    fused: dict[str, Any] = {
        "optimizer": OPTIMIZERS[optimizer.name].fbgemm_type,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        # Ids are checked when they are loaded: a bad one is a defect, and must not train a wrong row.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    # Each sharder changes its own copy.
    return [_BagSharder(fused_params=dict(fused)), _SequenceSharder(fused_params=dict(fused))]


def _plan_on_rank_0(network: nn.Module, sharders: list[Any], request: Request, world: World) -> ShardingPlan:
    """Plan on rank 0, for the rank with the least memory. All ranks take part; if planning fails, all raise."""
    on_gpu = world.device.type == "cuda"
    share = torch.cuda.mem_get_info(world.device)[0] if on_gpu else memory_bytes() // world.local_size
    ranks = world.gather((share, world.device))
    result: ShardingPlan | UserError | None = None
    if ranks is not None:  # on rank 0
        least = min(share for share, _ in ranks)
        machines = Machines(world.size, world.local_size, world.device.type, least)
        try:
            result = make_plan(network, sharders, request, machines)
            place_on(result, [device for _, device in ranks])
        except UserError as error:
            result = error
    plan = world.broadcast(result)
    if isinstance(plan, UserError):
        raise plan
    assert plan is not None
    return plan
