"""fit(): the training loop. One function, read from top to bottom."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.config.sections import RunSections, TrainSection
from recmill.errors import UserError
from recmill.observe.progress import Progress, human_rate
from recmill.observe.run_dir import RunDirectory
from recmill.training.checkpoint import Position
from recmill.training.optim import set_learning_rates
from recmill.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    position: Position
    was_stopped: bool


class StopRequest:
    """SIGINT or SIGTERM asks once for a clean stop after the current step; a second SIGINT ends the process.

    A checkpoint that is being saved is finished first: torch would take the interrupt for a broken file.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._is_held = self._was_repeated = False

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        yield
        self._is_held = False
        if self._was_repeated:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python gives signals to that one alone
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            self._was_repeated = True
            if not self._is_held:
                raise KeyboardInterrupt
        self.is_set = True


def fit(
    model: nn.Module,
    optimizer: CombinedOptimizer,
    task: ModuleType,
    source: Any,
    settings: RunSections,
    world: World,
    run: RunDirectory,
    start: Position,
    validate: Callable[[Position], None],
    save: Callable[[Position], None],
) -> Fitted:
    """Train from `start` to the end of the last epoch, or to max_steps, or until asked to stop."""
    train, position = settings.train, start
    stop = StopRequest()
    num_steps = steps_in_all(train, source.batches_per_epoch)
    saved_step = start.step
    meter = _Meter(train.global_batch_size, start)
    model.train()
    progress = Progress(
        "training", num_steps, unit="samples", world=world, done=start.step, per_item=train.global_batch_size
    )
    with stop.listening(), progress:
        while position.step < num_steps:
            for batch in source.train_batches(position.epoch, first=position.batch):
                # One small reduction: the loss is a mean over the *global* batch, and all ranks stop together.
                weight, stops = world.sum([batch.weight(), float(stop.is_set)])
                if stops:
                    break
                batch = batch.to(world.device)
                rates = set_learning_rates(optimizer, settings.optim, position.step)
                optimizer.zero_grad()
                loss_sum = task.loss_sum(model(*batch.inputs()), batch)
                # Ranks' gradients are averaged, so times their number over the global weight: a global mean.
                (loss_sum * (world.size / weight)).backward()
                optimizer.step()
                position = _next(position, source.batches_per_epoch)
                meter.add(loss_sum.detach(), weight)

                is_last = position.step == num_steps
                is_report_due = position.step % train.log_every_steps == 0
                if is_report_due or is_last:
                    _report(meter.values(position, world) | rates, position, world, run, progress)
                else:
                    progress.advance(1)
                if is_report_due:
                    meter.reset()
                with meter.paused():
                    # The end of training is validated and saved by what follows it.
                    if not is_last and _is_due(settings.eval.every_steps, position):
                        validate(position)
                    if not is_last and _is_due(settings.checkpoint.every_steps, position):
                        with stop.held():
                            save(meter.at(position, world))
                        saved_step = position.step
                if is_last:
                    break
            else:
                continue
            break
        progress.close()
        if saved_step != position.step:
            with stop.held():
                save(meter.at(position, world))
    return Fitted(position, was_stopped=position.step < num_steps)


def steps_in_all(train: TrainSection, batches_per_epoch: int) -> int:
    steps = train.num_epochs * batches_per_epoch
    return min(steps, train.max_steps) if train.max_steps else steps


def _next(position: Position, batches_per_epoch: int) -> Position:
    if position.batch + 1 < batches_per_epoch:
        return Position(position.step + 1, position.epoch, position.batch + 1)
    return Position(position.step + 1, position.epoch + 1, 0)


def _is_due(every_steps: int, position: Position) -> bool:
    """0 means after each epoch."""
    return position.step % every_steps == 0 if every_steps else position.batch == 0


class _Meter:
    """Mean loss and speed since the last report. The loss stays on its device, unsummed over ranks, until then."""

    def __init__(self, global_batch_size: int, start: Position) -> None:
        self._global_batch_size = global_batch_size
        self.reset()
        self._earlier_loss, self._weight = start.loss_sum, start.loss_weight  # of all ranks

    def reset(self) -> None:
        self._loss: Tensor | float = 0.0
        self._earlier_loss, self._weight, self._steps, self._since = 0.0, 0.0, 0, time.monotonic()

    def add(self, loss_sum: Tensor, global_weight: float) -> None:
        self._loss, self._weight, self._steps = self._loss + loss_sum, self._weight + global_weight, self._steps + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here is not training."""
        started = time.monotonic()
        yield
        self._since += time.monotonic() - started

    def at(self, position: Position, world: World) -> Position:
        """`position` with the loss so far, to be saved; an error if it is not finite. All ranks take part."""
        return replace(position, loss_sum=self._finite_loss(position, world), loss_weight=self._weight)

    def _finite_loss(self, position: Position, world: World) -> float:
        (loss,) = world.sum([float(self._loss)])
        if not math.isfinite(loss):
            raise UserError(
                f"The loss became {loss} by step {position.step:,}. The checkpoints on disk are from before. "
                "Train again with lower optim.dense.lr and optim.tables.lr, into another --run."
            )
        return self._earlier_loss + loss

    def values(self, position: Position, world: World) -> dict[str, float]:
        loss = self._finite_loss(position, world)
        seconds = time.monotonic() - self._since
        return {"loss": loss / self._weight, "samples_per_s": self._steps * self._global_batch_size / seconds}


def _report(values: dict[str, float], position: Position, world: World, run: RunDirectory, progress: Progress) -> None:
    if world.is_main:
        run.append_metrics({"step": position.step, "epoch": position.epoch, "split": "train", **values})
        rate = human_rate(values["samples_per_s"])
        extra = {"file_only": progress.is_shown}  # the bar shows the same on a terminal
        text = f"step {position.step:,}  loss {values['loss']:.4f}  {rate} samples/s  lr {values['lr']:.3g}"
        log.info("%s, tables %.3g", text, values["lr_tables"], extra=extra)
    progress.advance(1, note=f"loss {values['loss']:.4f}")
