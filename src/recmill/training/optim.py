"""One optimizer over everything: the tables' own, fused or replicated, and an ordinary one for the dense layers."""

from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recmill.config.sections import OptimSection
from recmill.training.replicated import ReplicatedTables

_DENSE: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def build_optimizer(model: DistributedModelParallel, settings: OptimSection) -> CombinedOptimizer:
    """The fused part already ran when backward ends; `step()` does the rest."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {key: parameters.pop(key) for key in _replicated_keys(model) if key in parameters}
    dense = settings.dense
    make = _DENSE[dense.name]
    wrapped = KeyedOptimizerWrapper(
        parameters, lambda params: make(params, lr=dense.lr, weight_decay=dense.weight_decay)
    )
    tables = [("tables", ReplicatedTables(replicated, settings.tables))] if replicated else []
    return CombinedOptimizer([("tables", model.fused_optimizer), *tables, ("dense", wrapped)])


def _replicated_keys(model: DistributedModelParallel) -> list[str]:
    """data_parallel tables are ordinary parameters to TorchRec: without care the dense optimizer would take them."""
    return [
        f"{path}.{collection}.{table}.weight"
        for path, module_plan in model.plan.plan.items()
        for table, placed in module_plan.items()
        for collection in ("embedding_bags", "embeddings")
        if placed.sharding_type == "data_parallel"
    ]
