"""Learning rate schedules: pure functions of config and step, so a resumed run needs no state."""

from recmill.config.sections import Schedule


def learning_rate(schedule: Schedule, base: float, step: int) -> float:
    """Return the learning rate when `step` steps are finished; `base` is the optimizer's own rate."""
    if schedule.name == "constant":
        return base
    if schedule.name == "step":
        return base * schedule.gamma ** (step // schedule.step_size)
    if schedule.name == "mlperf":
        return _mlperf(schedule, base, step + 1)
    return _linear_or_oneflow(schedule, base, step)


def _mlperf(schedule: Schedule, base: float, count: int) -> float:
    """Follow the DLRM reference's LRPolicyScheduler: W warmup steps, S decay start, D decay steps; counts from 1.

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
    return max(1e-7, schedule.end_lr, base * ((steps - decayed) / steps) ** 2)


def _linear_or_oneflow(schedule: Schedule, base: float, step: int) -> float:
    """Rise to `base` in W steps, from step S on fall to end_lr in D steps. The first `step` is 0.

    linear:   base * (step + 1) / W;  the fall is a line
    oneflow:  base * step / W, so the first step changes nothing (LinearLR);  the fall is quadratic (PolynomialLR)
    """
    is_linear = schedule.name == "linear"
    if step < schedule.warmup_steps:
        return base * (step + is_linear) / schedule.warmup_steps
    if step < schedule.decay_start_step or not schedule.decay_steps:
        return base
    decayed = min(step - schedule.decay_start_step, schedule.decay_steps)
    if is_linear:
        return base + (schedule.end_lr - base) * decayed / schedule.decay_steps
    return (base - schedule.end_lr) * (1 - decayed / schedule.decay_steps) ** 2 + schedule.end_lr
