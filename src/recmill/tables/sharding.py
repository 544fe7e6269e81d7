"""Shard a network's tables over the ranks with TorchRec's DistributedModelParallel, as `placement` plans it."""

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recmill.config.sections import TablesOptim
from recmill.errors import UserError
from recmill.hardware.memory import memory_bytes
from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import Machines, Request, make_plan
from recmill.tables.table_lookup import install_lookups
from recmill.tables.torchrec_internals import BagCollection
from recmill.world import World


class _BagSharder(EmbeddingBagCollectionSharder):
    """Makes collections of ours, and offers all sharding types: TorchRec lists fewer for CPU than work over gloo."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> BagCollection:
        return BagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


class _SequenceSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def shard(
    network: nn.Module, request: Request, optimizer: TablesOptim, world: World, library: KernelLibrary | None = None
) -> DistributedModelParallel:
    """Shard the tables of `network`, which are on 'meta': a rank allocates only its own shards. All ranks take part.

    `library`: our kernels for CPU, for tables and layers; None: those of torch and FBGEMM.
    """
    sharders = make_sharders(optimizer)
    plan = _plan_on_rank_0(network, sharders, request, world)
    # One process has nobody to average gradients with.
    model = DistributedModelParallel(
        network, device=world.device, plan=plan, sharders=sharders, init_data_parallel=world.size > 1
    )
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
    # Each sharder changes its dictionary: one copy each.
    return [_BagSharder(fused_params=dict(fused)), _SequenceSharder(fused_params=dict(fused))]


def _plan_on_rank_0(network: nn.Module, sharders: list[Any], request: Request, world: World) -> ShardingPlan:
    """Plan on rank 0 for the rank with the least memory. All ranks take part, and all fail if planning fails."""
    on_gpu = world.device.type == "cuda"
    total = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else memory_bytes()
    shares = world.gather(total if on_gpu else total // world.local_size)
    result: ShardingPlan | UserError | None = None
    if shares is not None:  # on rank 0
        machines = Machines(world.size, world.local_size, world.device.type, min(shares))
        try:
            result = make_plan(network, sharders, request, machines)
        except UserError as error:
            result = error
    plan = world.broadcast(result)
    if isinstance(plan, UserError):
        raise plan
    assert plan is not None
    return plan
