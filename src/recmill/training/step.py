"""One training step: forward, backward, update. GPUs receive the following batches meanwhile."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Position
from recmill.config.sections import DenseOptim, TrainSection
from recmill.observe.recorder import BACKWARD, FORWARD, UPDATE
from recmill.protocols import Batch
from recmill.training.exchange import BackwardEnd
from recmill.training.parts import Parts
from recmill.training.precision import LossScale, usable_dtype


class Step:
    """Trains the model on one batch at a time. All ranks take part, also in creating it."""

    def __init__(
        self, parts: Parts, optimizer: CombinedOptimizer, train: TrainSection, dense: DenseOptim, start: Position
    ) -> None:
        self.model = parts.model
        self.device = parts.world.device
        self._task = parts.task
        self._world = parts.world
        self._optimizer = optimizer
        self._dense_parameters = list(dict(optimizer.optimizers)["dense"].params.values())
        self._clip_norm = dense.clip_grad_norm
        self._dtype = usable_dtype(train, parts.world)
        self._scale = LossScale(parts.model, train.loss_scale, start) if self._dtype == torch.float16 else None
        self.factor = 1.0
        self._recorder = parts.recorder
        self._backward_end = BackwardEnd() if parts.world.size > 1 and self.device.type == "cpu" else None

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        """Return the sum of this rank's losses, detached; the gradients are those of `factor` times this sum."""
        self.factor = factor
        self.zero_grad()
        loss, loss_sum = self.forward(batch.to(self.device, non_blocking=True))
        loss.backward()
        self.step()
        return loss_sum

    def recorded_in(self, position: Position) -> Position:
        """Return `position` with the loss scale, so that a resumed run continues with it."""
        return self._scale.recorded_in(position) if self._scale else position

    # TorchRec's pipeline calls these three as its model's forward() and as its optimizer.

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate and this rank's sum of losses."""
        loss_sum = self._task.loss_sum(self._outputs, batch)
        scale = self._scale.value if self._scale else 1.0
        loss = loss_sum * (self.factor * scale)
        if self._backward_end:
            self._backward_end.watch(loss)
        self._recorder.lap(FORWARD)
        return loss, loss_sum.detach()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        if self._backward_end and self._backward_end.at:
            self._recorder.exchanged(self._backward_end.at, time.perf_counter_ns())
        self._recorder.lap(BACKWARD)
        self._update()
        self._recorder.lap(UPDATE)

    def _update(self) -> None:
        if self._scale and not self._scale.finish_backward(self._dense_parameters, self._world):
            self._optimizer.zero_grad()  # or `first_bad_tensor` would report the overflowed gradients
            return
        if self._clip_norm:  # gradients are averaged already, so all ranks do the same
            nn.utils.clip_grad_norm_(self._dense_parameters, self._clip_norm)
        self._optimizer.step()

    def _outputs(self, *inputs: object) -> Tensor:
        """Run the model in mixed precision and return its outputs in float32."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            outputs = self.model(*inputs)
        return outputs.float() if isinstance(outputs, Tensor) else outputs  # a task reports what is no tensor


def can_overlap(model: nn.Module, device: torch.device) -> bool:
    """Return whether ids can be sent ahead: on GPUs, except in sequence models, whose network makes the list of ids."""
    return device.type == "cuda" and any(isinstance(m, ShardedEmbeddingBagCollection) for m in model.modules())


class OverlappedStep:
    """Like `Step`, but meanwhile sends the next batch's ids to the ranks with their rows, and copies the one after.

    `stretches` yields the batches of the calls as several iterators: where one ends, no batch may be in flight.
    """

    def __init__(self, step: Step, stretches: Iterator[Iterator[Batch]]) -> None:
        self._step = step
        self._stretches = stretches
        self._ahead = next(stretches)
        self._pipeline: TrainPipelineSparseDist[Batch, Tensor] = TrainPipelineSparseDist(
            step.model, step, step.device, custom_model_fwd=step.forward
        )

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        self._step.factor = factor
        loss_sum = self._pipeline.progress(self._ahead)
        if not self._pipeline.batches:
            self._pipeline.detach()  # restores the forward() of the tables
            self._ahead = next(self._stretches)
        return loss_sum
