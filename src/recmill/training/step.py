"""One training step: forward, backward, update. On GPUs the batches after it are on their way meanwhile."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Position
from recmill.config.sections import Settings
from recmill.training.optim import clip_dense_gradients, dense_parameters
from recmill.training.precision import LossScale, usable_dtype
from recmill.world import World


class Step:
    def __init__(
        self,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        task: ModuleType,
        settings: Settings,
        world: World,
        start: Position,
    ) -> None:
        self._model, self._optimizer, self._task = model, optimizer, task
        self._dense, self._world = settings.optim.dense, world
        self._dtype = usable_dtype(settings.train, world)
        is_scaled = self._dtype == torch.float16
        self._scale = LossScale(model, settings.train.loss_scale, start) if is_scaled else None
        self._factor = 1.0

    def __call__(self, batch: Any, factor: float) -> Tensor:
        """The sum of this rank's losses, detached; `factor` times it is what the gradients are of."""
        self._factor = factor
        self.zero_grad()
        loss, loss_sum = self.forward(batch.to(self._world.device, non_blocking=True))
        loss.backward()
        self.step()
        return loss_sum

    def noted(self, position: Position) -> Position:
        """With what a resumed run must know of this one's scaling."""
        return self._scale.noted(position) if self._scale else position

    # The pipeline below calls these three as its model's and its optimizer's.

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._world.device.type, self._dtype, enabled=self._dtype != torch.float32):
            outputs = self._model(*batch.inputs())
        loss_sum = self._task.loss_sum(outputs.float(), batch)
        scale = self._scale.value if self._scale else 1.0
        return loss_sum * (self._factor * scale), loss_sum.detach()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        if self._scale and not self._scale.finish_backward(dense_parameters(self._optimizer), self._world):
            self._optimizer.zero_grad()  # or they would pass for a model gone bad
            return
        clip_dense_gradients(self._optimizer, self._dense)
        self._optimizer.step()


def can_overlap(model: nn.Module, device: torch.device) -> bool:
    """Sequence models list their ids inside the network: there is nothing to exchange ahead."""
    bags = (module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection))
    return device.type == "cuda" and any(bags)


class OverlappedStep(Step):
    """While a batch computes, the next one's ids go to the ranks that hold their rows, and the one after to the device.

    `stretches`: the same batches as the calls bring, cut where the model is to be free of batches under way.
    """

    def __init__(self, *parts: Any, stretches: Iterator[Iterator[Any]]) -> None:
        super().__init__(*parts)
        self._stretches = stretches
        self._ahead = next(stretches)
        self._pipeline: TrainPipelineSparseDist[Any, Tensor] = TrainPipelineSparseDist(
            self._model, self, self._world.device, custom_model_fwd=self.forward
        )

    def __call__(self, batch: Any, factor: float) -> Tensor:
        self._factor = factor
        loss_sum = self._pipeline.progress(self._ahead)
        if not self._pipeline.batches:
            self._pipeline.detach()  # gives the tables their own forward() back
            self._ahead = next(self._stretches)
        return loss_sum
