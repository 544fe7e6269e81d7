"""Mean loss and speed since the last report."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from recmill.checkpoints.format import Position
from recmill.errors import UserError
from recmill.training.guards import first_bad_tensor
from recmill.world import World


class Meter:
    """Sums losses and samples. Each rank keeps its own loss, on its device, until the sum over ranks is needed."""

    def __init__(self, model: nn.Module, world: World, start: Position) -> None:
        self._model = model
        self._world = world
        self.reset()
        # A resumed run continues the mean of the interrupted one; these are sums over all ranks.
        self._earlier_loss = start.loss_sum
        self._weight = start.loss_weight

    def reset(self) -> None:
        self._loss: Tensor | float = 0.0
        self._finite_steps: Tensor | int = 0
        self._earlier_loss = 0.0
        self._weight = 0.0
        self._steps = 0
        self._samples = 0
        self._since = time.monotonic()

    def add(self, loss_sum: Tensor, global_weight: float, samples: int) -> None:
        """Add one step; `samples` are the rows of the global batch, without fillers."""
        self._loss = self._loss + loss_sum
        self._finite_steps = self._finite_steps + torch.isfinite(self._loss)
        self._weight += global_weight
        self._steps += 1
        self._samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time within the block as training."""
        started = time.monotonic()
        yield
        self._since += time.monotonic() - started

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def values(self, position: Position) -> dict[str, float]:
        """Return loss and speed; raise if the loss is not finite. All ranks take part."""
        loss = self._finite_loss(position)
        return {"loss": loss / self._weight, "samples_per_s": self._samples / self.seconds}

    def recorded_in(self, position: Position) -> Position:
        """Return `position` with the loss so far, for a checkpoint; raise if it is not finite. All ranks take part."""
        return replace(position, loss_sum=self._finite_loss(position), loss_weight=self._weight)

    def _finite_loss(self, position: Position) -> float:
        """Return the loss of all ranks; if it is not finite, raise and name the first such step, rank and tensor."""
        world = self._world
        (loss,) = world.sum([float(self._loss)])
        if math.isfinite(loss):
            return self._earlier_loss + loss
        step = position.step - self._steps + int(self._finite_steps) + 1
        name = first_bad_tensor(self._model)
        by_rank = world.gather((step, name is None, world.rank, name or "the loss itself"))
        step, _, rank, name = world.broadcast(min(by_rank) if by_rank else (step, True, 0, ""))
        raise UserError(
            f"The loss is no longer a finite number from step {step:,} on, first on rank {rank}. The first tensor "
            f"there that is not finite after step {position.step:,}: {name}. The checkpoints on disk are older. "
            "Train again with lower optim.dense.lr and optim.tables.lr, into another --run."
        )
