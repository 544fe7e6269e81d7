"""fit(): the training loop, one function to be read from top to bottom."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer

from recmill.checkpoints.format import Position
from recmill.checkpoints.saver import Saver
from recmill.config.sections import CheckpointSection, EvalSection, ObserveSection, OptimSection, TrainSection
from recmill.failpoints import reach
from recmill.launch.signals import ReceivedSignal, StopRequest
from recmill.observe.counters import rss_bytes
from recmill.observe.printed import shown
from recmill.observe.progress import Progress, human_rate
from recmill.observe.recorder import INPUT, OTHER, SAVE, SYNC, VALIDATE, Recorder
from recmill.observe.run_dir import RunDirectory
from recmill.protocols import Batch, BatchSource
from recmill.training import store_meter
from recmill.training.exchange import timed_exchanges
from recmill.training.guards import check_replicas
from recmill.training.look_ahead import looking_ahead
from recmill.training.meter import Meter
from recmill.training.optim import set_learning_rates
from recmill.training.parts import Parts
from recmill.training.prefetch import pinned, prefetched
from recmill.training.profile import ProfiledSteps
from recmill.training.schedule import RunSteps
from recmill.training.step import OverlappedStep, Step, can_overlap
from recmill.training.store_meter import StoreMeter
from recmill.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sections:
    """The config sections that control the loop, and the steps of the run that they give."""

    train: TrainSection
    optim: OptimSection
    eval: EvalSection
    checkpoint: CheckpointSection
    observe: ObserveSection
    steps: RunSteps


def fit(
    parts: Parts,
    optimizer: CombinedOptimizer,
    sections: Sections,
    start: Position,
    run: RunDirectory,
    saver: Saver,
    stop: StopRequest,
    validate: Callable[[Position], Position],
) -> tuple[Position, ReceivedSignal | None]:
    """Train from `start` to the last step, or until `eval` ends it early or a stop is requested; validate and save.

    Return the last position and the signal that requested the stop, if one did. All ranks take part.
    """
    model, source, world, recorder = parts.model, parts.source, parts.world, parts.recorder
    train, checkpoint, steps = sections.train, sections.checkpoint, sections.steps
    position = start
    saved_step = start.step
    validated_step = -1
    num_steps = steps.total
    is_validation_due = partial(_is_validation_due, steps.validation, sections.eval.each_epoch)
    meter = Meter(model, world, start)
    stores = StoreMeter(model, world)
    timer = _SaveTimer(checkpoint.every_minutes)
    progress = Progress(
        "training", num_steps, "samples", world, done=start.step, per_item=train.global_batch_size, reports=True
    )
    model.train()
    started = time.monotonic()
    if checkpoint.at_start and not start.step:
        saver.save(start)
        saver.handle_failure()  # raise now if this run cannot be saved
    all_batches = pinned(_batches_from(source, start), world.device)
    all_batches = recorder.around_next(all_batches, "prepare batch", "prefetch" if parts.prefetch else "training")
    ahead_of_steps = looking_ahead(model, source, start, num_steps)
    exchanges = timed_exchanges(recorder, world)
    with progress, ahead_of_steps, exchanges, prefetched(all_batches, parts.prefetch) as batches:
        step = Step(parts, optimizer, train, sections.optim.dense, start)
        take_step: Callable[[Batch, float], Tensor] = step
        if can_overlap(model, world.device):
            batches, ahead = itertools.tee(batches)
            stretches = _stretches(ahead, start, source.batches_per_epoch, num_steps, is_validation_due)
            take_step = OverlappedStep(step, stretches)
        flags = (lambda: stop.is_set, lambda: saver.has_failed, lambda: world.is_main and timer.is_due())
        agreed = _agreed(batches, flags, world, _sums_ahead(world.device), recorder)
        profiled = ProfiledSteps(sections.observe.profile_steps, recorder.directory, world.rank, world.device)
        recorder.begin(start.step)
        while position.step < num_steps and not early_end(position, sections.eval, sections.steps.patience):
            parts.heartbeat.beat("training", position.step)
            reach("train.step", position.step)
            if profiled.before(position.step):
                recorder.lap(OTHER)
            batch, (weight, stops, failed, saves) = next(agreed)
            if failed:
                saver.handle_failure()
            if stops:
                break
            if saves and saved_step != position.step:
                with meter.paused():
                    saver.save(meter.recorded_in(position))
                saved_step = position.step
                recorder.lap(SAVE)
            rates = set_learning_rates(optimizer, sections.optim, steps, position.step, position.rate_cuts)
            recorder.lap(OTHER)
            # Gradients are averaged over ranks, so this factor makes them those of the global batch's mean loss.
            loss_sum = take_step(batch, world.size / weight)
            samples = min(train.global_batch_size, source.samples_per_epoch - position.batch * train.global_batch_size)
            position = step.recorded_in(_next(position, source.batches_per_epoch))
            reach("train.updated", position.step)
            meter.add(loss_sum, weight, samples)
            if train.check_replicas_every and position.step % train.check_replicas_every == 0:
                check_replicas(model, position.step, world)

            is_last = position.step == num_steps
            is_report_due = position.step % train.log_every_steps == 0
            if is_report_due or is_last:
                of_stores = stores.values(meter.steps, meter.seconds)
                (memory,) = world.sum([rss_bytes() / 1e9])
                speed = recorder.latency() | {"memory_gb": memory, "epochs_done": position.step / steps.epoch}
                _report(meter.values(position) | speed | rates | of_stores, position, world, run, progress)
            else:
                progress.advance(1)
            if is_report_due:
                meter.reset()
            recorder.lap(OTHER)
            if is_last:
                recorder.end_step()
                break  # validated and saved below
            with meter.paused():
                is_save_due = _is_due(steps.checkpoint, position)
                if is_validation_due(position):
                    position = validate(position)
                    validated_step = position.step
                    recorder.lap(VALIDATE)
                    is_save_due |= checkpoint.each_eval or (checkpoint.keep_best and position.is_best)
                if is_save_due:
                    saver.save(meter.recorded_in(position))
                    saved_step = position.step
                    recorder.lap(SAVE)
            recorder.end_step()
        progress.close()
        profiled.close()
        seconds = time.monotonic() - started
        (stops,) = world.sum([float(stop.is_set)])
        if (not stops or position.step == num_steps) and validated_step != position.step:
            validated = validate(position)
            if position.step != start.step:  # otherwise `start` already counts this validation
                position = validated
            recorder.lap(VALIDATE)
        saver.handle_failure()
        if position.step not in (start.step, saver.committed_step):
            saver.save(meter.recorded_in(position))
        saver.finish()
        if (summary := stores.summary(seconds)) and world.is_main:
            log.info("%s", summary)
        recorder.lap(SAVE)
        recorder.finish()
        (stops,) = world.sum([float(stop.is_set)])
        parts.heartbeat.beat("ending", position.step)
        signal = _first_signal(stop, world) if stops else None
        return position, signal


def early_end(position: Position, section: EvalSection, patience: int) -> str | None:
    """Return why training ends early, if it does. Only `position` decides, so a resumed run ends at the same step.

    `patience`: validations without an improvement that end the run.
    """
    if section.target_auroc and position.best is not None and position.best >= section.target_auroc:
        return f"validation reached auroc {position.best:.5f}, eval.target_auroc is {section.target_auroc}"
    if patience and position.worse_evals >= patience:
        share = f" ({section.patience} of the run)" if isinstance(section.patience, str) else ""
        return f"no better validation than at step {position.best_step:,} for eval.patience = {patience}{share}"
    return None


def _first_signal(stop: StopRequest, world: World) -> ReceivedSignal:
    """Return the earliest signal that any rank received. All ranks take part."""
    by_rank = world.gather(stop.received_by(world.rank))
    no_signal = ReceivedSignal(0.0, 0, "")  # ranks other than 0 know none, and get rank 0's
    return world.broadcast(min(signal for signal in by_rank if signal) if by_rank else no_signal)


def _batches_from(source: BatchSource, position: Position) -> Iterator[Batch]:
    """Yield the batches from `position` on, epoch after epoch, without end."""
    for epoch in itertools.count(position.epoch):
        yield from source.train_batches(epoch, position.batch if epoch == position.epoch else 0)


def _sums_ahead(device: torch.device) -> int:
    """Return how many steps ahead `_agreed` starts its sums: on GPUs one, so that they do not wait for the network."""
    return 1 if device.type == "cuda" else 0


def _agreed(
    batches: Iterator[Batch], flags: Iterable[Callable[[], bool]], world: World, ahead: int, recorder: Recorder
) -> Iterator[tuple[Batch, list[float]]]:
    """Yield each batch with the sums over ranks of its weight and of each flag. All ranks take part.

    The loss is a mean over the *global* batch, and all ranks stop, fail or save together. Each sum starts `ahead` steps
    before its batch is yielded, so flags take effect that many steps later.
    """
    started: deque[tuple[Batch, Callable[[], list[float]]]] = deque()
    for new in batches:
        recorder.lap(INPUT)
        started.append((new, world.start_sum([new.weight(), *(float(flag()) for flag in flags)])))
        if len(started) > ahead:
            batch, finish = started.popleft()
            sums = finish()
            recorder.lap(SYNC)
            yield batch, sums


def _stretches(
    batches: Iterator[Batch], position: Position, per_epoch: int, num_steps: int, is_pause: Callable[[Position], bool]
) -> Iterator[Iterator[Batch]]:
    """Yield one iterator of batches up to each validation, and one up to the end. At its end no batch is in flight."""

    def stretch() -> Iterator[Batch]:
        nonlocal position
        for batch in batches:
            yield batch
            position = _next(position, per_epoch)
            if position.step == num_steps or is_pause(position):
                return

    while True:
        yield stretch()


def _next(position: Position, batches_per_epoch: int) -> Position:
    finished_epochs, batch = divmod(position.batch + 1, batches_per_epoch)
    return replace(position, step=position.step + 1, epoch=position.epoch + finished_epochs, batch=batch)


def _is_due(every_steps: int, position: Position) -> bool:
    """Return whether a period of `every_steps` ends at `position`; 0 means after each epoch."""
    return position.step % every_steps == 0 if every_steps else position.batch == 0


def _is_validation_due(every_steps: int, each_epoch: bool, position: Position) -> bool:
    return _is_due(every_steps, position) or (each_epoch and position.batch == 0)


class _SaveTimer:
    """When to save by time. Rank 0 decides for all ranks."""

    def __init__(self, minutes: float) -> None:
        self._seconds = minutes * 60
        self._since = time.monotonic()

    def is_due(self) -> bool:
        if not self._seconds or time.monotonic() - self._since < self._seconds:
            return False
        self._since = time.monotonic()
        return True


def _report(values: dict[str, float], position: Position, world: World, run: RunDirectory, progress: Progress) -> None:
    speed = f"{values['step_ms_p50']:.3g}/{values['step_ms_p95']:.3g} ms  {values['memory_gb']:.2f} GB"
    progress.advance(1, note=f"loss {shown(values['loss'])}{store_meter.note(values)}  {speed}")
    if world.is_main:
        run.append_metrics({"step": position.step, "epoch": position.epoch, "split": "train", **values})
        rate = human_rate(values["samples_per_s"])
        start = f"step {position.step:,}  loss {shown(values['loss'])}  {rate} samples/s"
        end = f"{store_meter.note(values)}  {speed}  {progress.time_left()} left"
        text = f"{start}  lr {values['lr']:.3g}, tables {values['lr_tables']:.3g}{end}"
        # On a terminal the progress bar shows the same; elsewhere lines are to fit 80 columns.
        log.info("%s", text, extra={"console": "" if progress.is_shown else f"{start}{end}"})
