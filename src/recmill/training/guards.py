"""Checks of a model in training: all numbers are finite, and replicas are equal on every rank."""

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from recmill.checkpoints.saver import is_finite
from recmill.errors import UserError
from recmill.tables.torchrec_internals import is_sharded
from recmill.world import World


def first_bad_tensor(model: nn.Module) -> str | None:
    """Return the name of the first parameter or gradient on this rank that is not finite, if there is one."""
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.detach()):
            return f"parameter {name}"
        if parameter.grad is not None and not is_finite(parameter.grad):
            return f"the gradient of {name}"
    return None


def check_replicas(model: nn.Module, step: int, world: World) -> None:
    """Raise if a parameter that is replicated on every rank differs between ranks in any bit. All ranks take part."""
    if world.size == 1:
        return
    digests = {key: _digest(value) for key, value in model.state_dict().items() if not is_sharded(value)}
    by_rank: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(by_rank, digests)
    for key in digests:
        others = [f"rank {rank}" for rank, theirs in enumerate(by_rank) if theirs[key] != by_rank[0][key]]
        if others:
            raise UserError(
                f"After step {step:,} {key} is not the same on all ranks: rank 0 differs from {', '.join(others)}. "
                "A machine computes wrongly, or something else changed the model. The checkpoints on disk are older "
                "than this check: resume from them on other hardware."
            )


def _digest(values: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)
