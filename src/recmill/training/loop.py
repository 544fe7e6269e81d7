"""fit(): the training loop. One function, read from top to bottom."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Position
from recmill.checkpoints.saver import Saver
from recmill.config.sections import EvalSection, Settings, TrainSection
from recmill.errors import UserError
from recmill.failpoints import reach
from recmill.launch.signals import Heard, StopRequest, listening
from recmill.launch.watchdog import beat
from recmill.observe.progress import Progress, human_rate
from recmill.observe.run_dir import RunDirectory
from recmill.training.guards import check_replicas, first_bad_tensor
from recmill.training.optim import set_learning_rates
from recmill.training.prefetch import pinned, prefetched
from recmill.training.step import OverlappedStep, Step, can_overlap
from recmill.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    position: Position
    stopped_by: Heard | None  # the same on all ranks


def fit(
    model: nn.Module,
    optimizer: CombinedOptimizer,
    task: ModuleType,
    source: Any,
    settings: Settings,
    world: World,
    run: RunDirectory,
    start: Position,
    validate: Callable[[Position], Position],
    saver: Saver,
) -> Fitted:
    """Train from `start` to the last step, or to what `eval` says is enough, or until asked to stop; then validate."""
    train, checkpoint, position = settings.train, settings.checkpoint, start
    num_steps = steps_in_all(train, source.batches_per_epoch)
    saved_step = start.step
    validated_step = -1
    meter = _Meter(start)
    model.train()
    progress = Progress(
        "training", num_steps, unit="samples", world=world, done=start.step, per_item=train.global_batch_size
    )
    endless = pinned(_endless_batches(source, start), world.device)
    parts = (model, optimizer, task, settings, world, start)
    clock = _Minutes(checkpoint.every_minutes)
    if checkpoint.at_start and not start.step:
        saver.save(start)
        saver.handle_failure()  # can it be done at all?
    with listening(train.stop_signals) as stop, progress, prefetched(endless, settings.data.prefetch) as batches:
        if can_overlap(model, world.device):
            batches, ahead = itertools.tee(batches)
            is_pause = partial(_is_validation_due, settings.eval)
            stretches = _between_pauses(ahead, start, source.batches_per_epoch, num_steps, is_pause)
            step: Step = OverlappedStep(*parts, stretches=stretches)
        else:
            step = Step(*parts)
        while position.step < num_steps and not early_end(position, settings.eval):
            beat("training", position.step)
            reach("train.step", position.step)
            batch = next(batches)
            # One small reduction: the loss is a mean over the *global* batch, and all stop, fail or save together.
            is_due = world.is_main and clock.is_due()
            flags = [float(stop.is_set), float(saver.has_failed), float(is_due)]
            weight, stops, failed, is_time = world.sum([batch.weight(), *flags])
            if failed:
                saver.handle_failure()
            if stops:
                break
            if is_time and saved_step != position.step:
                with meter.paused():
                    saver.save(meter.at(position, model, world))
                saved_step = position.step
            rates = set_learning_rates(optimizer, settings.optim, position.step)
            # Ranks' gradients are averaged, so times their number over the global weight: a global mean.
            loss_sum = step(batch, world.size / weight)
            samples = min(train.global_batch_size, source.samples_per_epoch - position.batch * train.global_batch_size)
            position = step.noted(_next(position, source.batches_per_epoch))
            reach("train.updated", position.step)
            meter.add(loss_sum, weight, samples)
            if train.check_replicas_every and position.step % train.check_replicas_every == 0:
                check_replicas(model, position.step, world)

            is_last = position.step == num_steps
            is_report_due = position.step % train.log_every_steps == 0
            if is_report_due or is_last:
                _report(meter.values(position, model, world) | rates, position, world, run, progress)
            else:
                progress.advance(1)
            if is_report_due:
                meter.reset()
            if is_last:
                break  # validated and saved below
            with meter.paused():
                is_save_due = _is_due(checkpoint.every_steps, position)
                if _is_validation_due(settings.eval, position):
                    position, validated_step = validate(position), position.step
                    is_save_due |= checkpoint.each_eval or (checkpoint.keep_best and position.is_best)
                if is_save_due:
                    saver.save(meter.at(position, model, world))
                    saved_step = position.step
        progress.close()
        (stops,) = world.sum([float(stop.is_set)])
        if (not stops or position.step == num_steps) and validated_step != position.step:
            validated = validate(position)
            position = validated if position.step != start.step else position  # counted before it was saved
        saver.handle_failure()
        if position.step not in (start.step, saver.committed_step):
            saver.save(meter.at(position, model, world))
        saver.finish()
        (stops,) = world.sum([float(stop.is_set)])
        beat("ending", position.step)
        return Fitted(position, stopped_by=_first_heard(stop, world) if stops else None)


def _first_heard(stop: StopRequest, world: World) -> Heard:
    """Of the ranks that received a signal. All ranks take part."""
    everyone = world.gather(stop.heard_by(world.rank))
    return world.broadcast(min(heard for heard in everyone if heard) if everyone else Heard(0.0, 0, ""))


def steps_in_all(train: TrainSection, batches_per_epoch: int) -> int:
    steps = train.num_epochs * batches_per_epoch
    return min(steps, train.max_steps) if train.max_steps else steps


def early_end(position: Position, section: EvalSection) -> str | None:
    """Why training has gone far enough; from the position alone, so a resumed run ends where an unbroken one does."""
    if section.target_auroc and position.best is not None and position.best >= section.target_auroc:
        return f"validation reached auroc {position.best:.5f}, eval.target_auroc is {section.target_auroc}"
    if section.patience and position.worse_evals >= section.patience:
        return f"no better validation than at step {position.best_step:,} for eval.patience = {section.patience}"
    return None


def _endless_batches(source: Any, position: Position) -> Iterator[Any]:
    """From `position` on, epoch after epoch."""
    epoch, first = position.epoch, position.batch
    while True:
        yield from source.train_batches(epoch, first)
        epoch, first = epoch + 1, 0


def _between_pauses(
    batches: Iterator[Any], position: Position, per_epoch: int, num_steps: int, is_pause: Callable[[Position], bool]
) -> Iterator[Iterator[Any]]:
    """One iterator for each stretch up to a validation or the end: there the model must have no batches in it."""

    def stretch() -> Iterator[Any]:
        nonlocal position
        for batch in batches:
            yield batch
            position = _next(position, per_epoch)
            if position.step == num_steps or is_pause(position):
                return

    while True:
        yield stretch()


def _next(position: Position, batches_per_epoch: int) -> Position:
    is_within = position.batch + 1 < batches_per_epoch
    epoch, batch = (position.epoch, position.batch + 1) if is_within else (position.epoch + 1, 0)
    return replace(position, step=position.step + 1, epoch=epoch, batch=batch)


def _is_due(every_steps: int, position: Position) -> bool:
    """0 means after each epoch."""
    return position.step % every_steps == 0 if every_steps else position.batch == 0


def _is_validation_due(section: EvalSection, position: Position) -> bool:
    return _is_due(section.every_steps, position) or (section.each_epoch and position.batch == 0)


class _Minutes:
    """Rank 0's clock: what it says, all do."""

    def __init__(self, minutes: float) -> None:
        self._seconds, self._since = minutes * 60, time.monotonic()

    def is_due(self) -> bool:
        if not self._seconds or time.monotonic() - self._since < self._seconds:
            return False
        self._since = time.monotonic()
        return True


class _Meter:
    """Mean loss and speed since the last report. The loss stays on its device, unsummed over ranks, until then."""

    def __init__(self, start: Position) -> None:
        self.reset()
        self._earlier_loss, self._weight = start.loss_sum, start.loss_weight  # of all ranks

    def reset(self) -> None:
        self._loss: Tensor | float = 0.0
        self._finite_steps: Tensor | int = 0
        self._earlier_loss, self._weight, self._steps, self._samples = 0.0, 0.0, 0, 0
        self._since = time.monotonic()

    def add(self, loss_sum: Tensor, global_weight: float, samples: int) -> None:
        """`samples`: the rows of the global batch, without fillers."""
        self._loss = self._loss + loss_sum
        self._finite_steps = self._finite_steps + torch.isfinite(self._loss)
        self._weight, self._steps, self._samples = (
            self._weight + global_weight,
            self._steps + 1,
            self._samples + samples,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here is not training."""
        started = time.monotonic()
        yield
        self._since += time.monotonic() - started

    def at(self, position: Position, model: nn.Module, world: World) -> Position:
        """`position` with the loss so far, to be saved; an error if it is not finite. All ranks take part."""
        loss = self._finite_loss(position, model, world)
        return replace(position, loss_sum=loss, loss_weight=self._weight)

    def _finite_loss(self, position: Position, model: nn.Module, world: World) -> float:
        (loss,) = world.sum([float(self._loss)])
        if not math.isfinite(loss):
            raise self._not_finite(position, model, world)
        return self._earlier_loss + loss

    def _not_finite(self, position: Position, model: nn.Module, world: World) -> UserError:
        """Who was first. All ranks take part."""
        step = position.step - self._steps + int(self._finite_steps) + 1
        name = first_bad_tensor(model)
        everyone = world.gather((step, name is None, world.rank, name or "the loss itself"))
        step, _, rank, name = world.broadcast(min(everyone) if everyone else (step, True, 0, ""))
        return UserError(
            f"The loss is no longer a finite number from step {step:,} on, first on rank {rank}. The first tensor "
            f"there that is not finite after step {position.step:,}: {name}. The checkpoints on disk are from before. "
            "Train again with lower optim.dense.lr and optim.tables.lr, into another --run."
        )

    def values(self, position: Position, model: nn.Module, world: World) -> dict[str, float]:
        loss = self._finite_loss(position, model, world)
        seconds = time.monotonic() - self._since
        return {"loss": loss / self._weight, "samples_per_s": self._samples / seconds}


def _report(values: dict[str, float], position: Position, world: World, run: RunDirectory, progress: Progress) -> None:
    if world.is_main:
        run.append_metrics({"step": position.step, "epoch": position.epoch, "split": "train", **values})
        rate = human_rate(values["samples_per_s"])
        extra = {"file_only": progress.is_shown}  # the bar shows the same on a terminal
        text = f"step {position.step:,}  loss {values['loss']:.4f}  {rate} samples/s  lr {values['lr']:.3g}"
        log.info("%s, tables %.3g", text, values["lr_tables"], extra=extra)
    progress.advance(1, note=f"loss {values['loss']:.4f}")
