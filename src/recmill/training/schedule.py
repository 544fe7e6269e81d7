"""The number of steps of a run, and its schedule: shares of the run are resolved to steps, and steps to learning rates.

Both are functions of the config and the size of the dataset, so a checkpoint holds no state for them, but for
the number of cuts by 'plateau'.
"""

import math
from dataclasses import dataclass

from recmill.config.sections import TO_THE_END, Schedule, Settings, TrainSection, number_of_steps
from recmill.errors import ConfigError

_MIN_INTERVAL = 50  # otherwise a run of 200 steps would validate and save for most of its time


@dataclass(frozen=True)
class RunSteps:
    """The number of steps of a run, and the settings that may be given as shares of the run, resolved to steps."""

    total: int
    epoch: int
    warmup: int = 0
    decay_start: int = 0
    decay: int = 0
    step_size: int = 0
    validation: int = 0  # between two validations; 0: an epoch
    checkpoint: int = 0
    patience: int = 0  # validations without an improvement that end the run; 0: it is not ended

    @property
    def described(self) -> str:
        """Return the schedule as one line for the log."""
        phases = [f"warmup to step {self.warmup:,}"] if self.warmup else []
        if self.decay:
            phases.append(f"decay from step {self.decay_start:,} to {self.decay_start + self.decay:,}")
        if self.step_size:
            phases.append(f"another learning rate every {self.step_size:,} steps")
        for what, steps in ("validation", self.validation), ("checkpoint", self.checkpoint):
            steps = steps or self.epoch
            phases.append(f"{what} every step" if steps == 1 else f"{what} every {steps:,} steps")
        return f"schedule: {', '.join(phases)}"


def total_steps(train: TrainSection, batches_per_epoch: int) -> int:
    steps = train.num_epochs * batches_per_epoch
    return min(steps, train.max_steps) if train.max_steps else steps


def run_steps(settings: Settings, batches_per_epoch: int) -> RunSteps:
    """Resolve the shares of the run in `settings`. Raise ConfigError if the decay starts before the warmup ends."""
    total = total_steps(settings.train, batches_per_epoch)
    schedule = settings.optim.schedule
    if problem := schedule.overlap(total):
        raise ConfigError(f"In a run of {total:,} steps {problem}")
    start = number_of_steps(schedule.decay_start_step, total)
    validation, checkpoint = _intervals(settings, total)
    is_open = schedule.decay_steps == TO_THE_END
    return RunSteps(
        total=total,
        epoch=batches_per_epoch,
        warmup=number_of_steps(schedule.warmup_steps, total),
        decay_start=start,
        decay=max(total - start, 0) if is_open else number_of_steps(schedule.decay_steps, total),
        step_size=number_of_steps(schedule.step_size, total),
        validation=validation,
        checkpoint=checkpoint,
        patience=_patience(settings.eval.patience, total, validation or batches_per_epoch),
    )


def _patience(value: int | str, total: int, interval: int) -> int:
    """Return eval.patience as a number of validations: a share of the run is rounded up."""
    return math.ceil(number_of_steps(value, total) / interval) if isinstance(value, str) else value


def _intervals(settings: Settings, total: int) -> tuple[int, int]:
    """Return the steps between two validations and two saves.

    Of two shares, the save's is rounded to a multiple of the validation's: the best and the newest checkpoint are then
    often the same.
    """
    shares = settings.eval.every_steps, settings.checkpoint.every_steps
    validation, checkpoint = (_interval(share, total) for share in shares)
    if all(isinstance(share, str) for share in shares) and checkpoint > validation:
        checkpoint = validation * round(checkpoint / validation)
    return validation, checkpoint


def _interval(value: int | str, total: int) -> int:
    """Return the steps between two validations or saves: a share is at least 50 steps, or a fifth of a short run."""
    steps = number_of_steps(value, total)
    return max(steps, min(_MIN_INTERVAL, math.ceil(total / 5))) if isinstance(value, str) else steps


def plateau_patience(schedule: Schedule) -> int:
    """Return after how many validations without an improvement the rates are cut; 0: never."""
    return schedule.patience if schedule.name == "plateau" else 0


def learning_rate(schedule: Schedule, steps: RunSteps, base: float, step: int, cuts: int = 0) -> float:
    """Return the learning rate when `step` steps are finished; `base` is the optimizer's own rate.

    `cuts`: how often validation has lowered it (plateau).
    """
    if schedule.name == "plateau":
        return max(base * schedule.gamma**cuts, min(base, schedule.end_lr))
    if schedule.name == "constant":
        return base
    if schedule.name == "step":
        return base * schedule.gamma ** (step // steps.step_size)
    if schedule.name == "mlperf":
        return _mlperf(schedule, steps, base, step + 1)
    return _linear_or_oneflow(schedule, steps, base, step)


def _mlperf(schedule: Schedule, steps: RunSteps, base: float, count: int) -> float:
    """Follow the DLRM reference's LRPolicyScheduler: W warmup steps, S decay start, D decay steps; counts from 1.

    count < W:            base * (1 - (W - count) / W)
    S <= count < S + D:   max(1e-7, base * ((D - (count - S)) / D)^2)
    otherwise:            if D > 0 the previous value (between warmup and decay: base * (W - 1) / W), else base
    Without a previous value (W = 0) the reference crashes; here the rate is base.
    """
    warmup, start, decay = steps.warmup, steps.decay_start, steps.decay
    if count < warmup:
        return base * (1 - (warmup - count) / warmup)
    if not decay:
        return base
    if count < start:
        return base * (1 - 1 / warmup) if warmup > 1 else base
    decayed = min(count, start + decay - 1) - start
    return max(1e-7, schedule.end_lr, base * ((decay - decayed) / decay) ** 2)


def _linear_or_oneflow(schedule: Schedule, steps: RunSteps, base: float, step: int) -> float:
    """Rise to `base` in W steps, from step S on fall to end_lr in D steps. The first `step` is 0.

    linear:   base * (step + 1) / W;  the fall is a line
    oneflow:  base * step / W, so the first step changes nothing (LinearLR);  the fall is quadratic (PolynomialLR)
    """
    is_linear = schedule.name == "linear"
    if step < steps.warmup:
        return base * (step + is_linear) / steps.warmup
    if step < steps.decay_start or not steps.decay:
        return base
    decayed = min(step - steps.decay_start, steps.decay)
    if is_linear:
        return base + (schedule.end_lr - base) * decayed / steps.decay
    return (base - schedule.end_lr) * (1 - decayed / steps.decay) ** 2 + schedule.end_lr
