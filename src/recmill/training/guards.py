"""Is what we have still a model: finite numbers, and the same on every rank."""

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from recmill.errors import UserError
from recmill.tables.torchrec_internals import is_sharded
from recmill.world import World


def first_bad_tensor(model: nn.Module) -> str | None:
    """In the order of the model's parameters, each with its gradient; of tables this rank's pieces."""
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.detach()):
            return f"parameter {name}"
        if parameter.grad is not None and not is_finite(parameter.grad):
            return f"the gradient of {name}"
    return None


def is_finite(values: Tensor) -> bool:
    """By the sum first: it needs no memory, and only if it overflows does it take more."""
    if not values.is_floating_point():
        return True
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def check_replicas(model: nn.Module, step: int, world: World) -> None:
    """An error if a parameter that every rank holds whole is not the same, to the bit, on all. All ranks take part."""
    if world.size == 1:
        return
    replicas = {key: value for key, value in model.state_dict().items() if not is_sharded(value)}
    mine = {key: _digest(value) for key, value in replicas.items()}
    everyone: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(everyone, mine)
    for key in mine:
        others = [rank for rank, digests in enumerate(everyone) if digests[key] != everyone[0][key]]
        if others:
            raise UserError(
                f"After step {step:,} {key} is not the same on all ranks: rank 0 differs from "
                f"{', '.join(f'rank {rank}' for rank in others)}. A machine computes wrongly, or something else "
                "changed the model. The checkpoints on disk are from before: go on from them on other hardware."
            )


def _digest(values: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)
