"""One optimizer for all parameters: those of fused and of replicated tables, and torch's for the dense layers."""

from typing import Any

from torch import optim
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recmill.config.sections import OptimSection
from recmill.tables.fused_adam import FusedAdam
from recmill.tables.replicated import ReplicatedTables
from recmill.tables.table_lookup import fused_lookups
from recmill.tables.torchrec_internals import replicated_tables, table_of
from recmill.training.schedule import RunSteps, learning_rate

_DENSE: dict[str, Any] = {"adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad, "sgd": optim.SGD}
DENSE_STATE = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}  # values of state for each value of a parameter


def build_optimizer(model: DistributedModelParallel, settings: OptimSection) -> CombinedOptimizer:
    """Combine all optimizers. Fused table updates happen during backward; `step()` does the others."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    # TorchRec lists data_parallel tables as ordinary parameters, which the dense optimizer must not update.
    tables = replicated_tables(model.plan)
    replicated = {key: parameters.pop(key) for key in list(parameters) if table_of(key) in tables}
    dense = settings.dense
    # Fused: one pass over all parameters, on CPU 3.5 (SGD) to 9 (Adam) times faster. torch fuses Adagrad only there.
    is_fused = dense.name != "adagrad" or next(iter(parameters.values())).device.type == "cpu"
    options: dict[str, Any] = {"lr": dense.lr, "weight_decay": dense.weight_decay, "fused": is_fused}
    if dense.eps:
        options["eps"] = dense.eps
    dense_optimizer = KeyedOptimizerWrapper(parameters, lambda params: _DENSE[dense.name](params, **options))
    of_replicated = [("tables", ReplicatedTables(replicated, settings.tables))] if replicated else []
    fused: KeyedOptimizer = model.fused_optimizer
    if settings.tables.name == "adam":
        fused = FusedAdam(fused, fused_lookups(model))
    return CombinedOptimizer([("tables", fused), *of_replicated, ("dense", dense_optimizer)])


def set_learning_rates(
    optimizer: CombinedOptimizer, settings: OptimSection, steps: RunSteps, step: int, cuts: int = 0
) -> dict[str, float]:
    """Set and return the rates of step `step` + 1. FBGEMM reads its rate in `zero_grad()`, before backward."""
    rates = {
        "tables": learning_rate(settings.schedule, steps, settings.tables.lr, step, cuts),
        "dense": learning_rate(settings.schedule, steps, settings.dense.lr, step, cuts),
    }
    for name, part in optimizer.optimizers:
        for group in part.param_groups:
            group["lr"] = rates[name]
    return {"lr": rates["dense"], "lr_tables": rates["tables"]}
