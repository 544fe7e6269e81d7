"""Learning rate schedules: pure functions of config and step, so a resumed run needs no state."""

from recmill.config.sections import Schedule

_MLPERF_LOWEST = 1e-7


def learning_rate(schedule: Schedule, base: float, step: int) -> float:
    """Return the rate of the step after `step` finished ones; `base` is the optimizer's own rate."""
    if schedule.name == "mlperf":
        return _mlperf(schedule, base, step + 1)
    if schedule.name == "oneflow":
        return _oneflow(schedule, base, step)
    if schedule.name == "linear":
        return _linear(schedule, base, step)
    if schedule.name == "step":
        return base * schedule.gamma ** (step // schedule.step_size)
    return base


def _mlperf(schedule: Schedule, base: float, count: int) -> float:
    """Follow the DLRM reference's LRPolicyScheduler. W warmup steps, S decay start, D decay steps; first `count` is 1.

    count < W:            base * (1 - (W - count) / W)
    S <= count < S + D:   max(1e-7, base * ((D - (count - S)) / D)^2)
    otherwise:            if D > 0 the previous value (between warmup and decay: base * (W - 1) / W), else base
    Without a previous value (W = 0) the reference crashes; here the rate is base.
    """
    warmup, start, steps = schedule.warmup_steps, schedule.decay_start_step, schedule.decay_steps
    if count < warmup:
        return base * (1 - (warmup - count) / warmup)
    if not steps:
        return base
    if count < start:
        return base * (1 - 1 / warmup) if warmup > 1 else base
    decayed = min(count, start + steps - 1) - start
    return max(_MLPERF_LOWEST, schedule.end_lr, base * ((steps - decayed) / steps) ** 2)


def _oneflow(schedule: Schedule, base: float, step: int) -> float:
    """Follow OneFlow: LinearLR from 0, then PolynomialLR of power 2 from milestone S on. The first `step` is 0.

    step < W:   base * step / W          (the first step changes nothing)
    step < S:   base
    then:       (base - end_lr) * (1 - min(step - S, D) / D)^2 + end_lr
    """
    if step < schedule.warmup_steps:
        return base * step / schedule.warmup_steps
    if step < schedule.decay_start_step or not schedule.decay_steps:
        return base
    decayed = min(step - schedule.decay_start_step, schedule.decay_steps)
    return (base - schedule.end_lr) * (1 - decayed / schedule.decay_steps) ** 2 + schedule.end_lr


def _linear(schedule: Schedule, base: float, step: int) -> float:
    """Rise to `base` in W steps, beginning with base / W; from milestone S on fall to end_lr in D steps."""
    if step < schedule.warmup_steps:
        return base * (step + 1) / schedule.warmup_steps
    if step < schedule.decay_start_step or not schedule.decay_steps:
        return base
    decayed = min(step - schedule.decay_start_step, schedule.decay_steps)
    return base + (schedule.end_lr - base) * decayed / schedule.decay_steps
