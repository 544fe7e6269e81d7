"""Warnings about settings and results that suggest a mistake: one line each, with the value and the remedy."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace

from recmill.checkpoints.format import Position
from recmill.config.sections import OptimSection, Settings
from recmill.training.schedule import RunSteps, learning_rate

_NEXT_TO_NOTHING = 1e-6  # of the base learning rate
_LONG_WARMUP = 1 / 5  # of the run
_EARLY = 1 / 4  # of the run, in which a model need not beat popularity yet
_IGNORED = 1 / 100  # share of the run for which the learning rate may be 0 without a warning
_OWN = "configs/own has configs for any data."


def before_training(settings: Settings, steps: RunSteps) -> Iterator[str]:
    """Yield warnings about schedules and intervals that do not suit the number of steps."""
    schedule = settings.optim.schedule
    stops_at = _first_step_without_rate(settings.optim, steps)
    if (rest := steps.total - stops_at) > _IGNORED * steps.total:
        key = "step_size" if schedule.name == "step" else "decay_steps"
        remedy = "Raise it." if schedule.name == "step" else "Set it to 'to the end'."
        yield (
            f"the learning rate is 0 from step {stops_at:,} on, for {rest / steps.total:.0%} of the {steps.total:,} "
            f"steps: optim.schedule.{key} = {getattr(schedule, key)}. {remedy} {_OWN}"
        )
    if steps.epoch == 1:
        yield (
            "each epoch is a single step, because all training samples fit into one batch: train.global_batch_size = "
            f"{settings.train.global_batch_size:,}. Lower it."
        )
    if steps.warmup > max(_LONG_WARMUP * steps.total, 1):
        yield (
            f"the learning rate rises for {steps.warmup / steps.total:.0%} of the {steps.total:,} steps: "
            f"optim.schedule.warmup_steps = {schedule.warmup_steps}. Set it to a share of the run, like '5%'. {_OWN}"
        )
    section = settings.eval
    first = min(steps.validation or steps.epoch, steps.epoch if section.each_epoch else steps.total)
    if first >= steps.total > 1:
        yield (
            f"no validation before the end: one is due every {steps.validation or steps.epoch:,} steps, and the run "
            f"has {steps.total:,}. Set eval.every_steps to a share of the run, like '10%'."
        )


def _first_step_without_rate(optim: OptimSection, steps: RunSteps) -> int:
    """Return the first step after the warmup whose learning rate is practically 0; rates do not rise after warmup."""

    def is_over(step: int) -> bool:
        return learning_rate(optim.schedule, steps, optim.dense.lr, step) <= _NEXT_TO_NOTHING * optim.dense.lr

    after_warmup = range(min(steps.warmup, steps.total), steps.total)
    return after_warmup.start + bisect_left(after_warmup, True, key=is_over)


def on_resume(optim: OptimSection, before: RunSteps, now: RunSteps, step: int) -> Iterator[str]:
    """Yield a warning if a changed number of steps changes the learning rate of the next step."""
    then, next_rate = (learning_rate(optim.schedule, steps, optim.dense.lr, step) for steps in (before, now))
    unrelated = {name: getattr(now, name) for name in ("total", "validation", "checkpoint", "patience")}
    if replace(before, **unrelated) != now:
        yield (
            f"the run had {before.total:,} steps and now has {now.total:,}, and optim.schedule has shares of the run: "
            f"the learning rate of step {step + 1:,} is {next_rate:.3g} instead of {then:.3g}. To keep it, leave "
            "train.num_epochs and train.max_steps as they were."
        )


class ValidationAdvice:
    """Warnings about validation results, each at most once per run. `earlier`: results by step, before a resume."""

    def __init__(self, steps: RunSteps, earlier: Mapping[int, float] | None = None, keeps_best: bool = False) -> None:
        self._steps = steps
        self._keeps_best = keeps_best
        self._earlier = earlier or {}
        self._given: set[str] = set()
        self._entropy = math.inf  # of the validation before

    def after(
        self, at: Position, value: float | None, popularity: float | None, entropy: float | None = None
    ) -> Iterator[str]:
        """Yield warnings after the validation at `at`, which reached `value`.

        `popularity`: the baseline of rankings; `entropy`: the normalised entropy of click models.
        """

        def is_below(step: int, value: float | None) -> bool:
            is_early = step < _EARLY * self._steps.total
            return value is not None and popularity is not None and value < popularity and not is_early

        if is_below(at.step, value) and not any(is_below(*before) for before in self._earlier.items()):
            yield from self._once(
                "popularity",
                f"validation at step {at.step:,} reached {value:.4f}, less than ranking by popularity, which reaches "
                f"{popularity:.4f}. Train longer (train.num_epochs), or change optim.dense.lr and optim.tables.lr.",
            )
        is_falling = entropy is not None and entropy < self._entropy < math.inf and at.step < self._steps.total
        self._entropy = math.inf if entropy is None else entropy
        if entropy is not None and entropy >= 1 and at.step >= _EARLY * self._steps.total and not is_falling:
            yield from self._once(
                "entropy",
                f"validation at step {at.step:,} has a normalised entropy of {entropy:.4g}: predicting the mean click "
                "rate for every row has 1. Lower optim.dense.lr and optim.tables.lr, or train longer.",
            )
        since_best = at.step - at.best_step
        was_long = 2 * (max(self._earlier, default=0) - at.best_step) >= self._steps.total
        if at.best is not None and 2 * since_best >= self._steps.total and not was_long:
            remedies = [] if self._keeps_best else ["checkpoint.keep_best=true to test the best step"]
            remedies += [] if self._steps.patience else ["eval.patience='25%' to end such runs early"]
            if remedies:
                yield from self._once(
                    "best",
                    f"validation has not improved since step {at.best_step:,} ({at.best:.4f}), for "
                    f"{since_best / self._steps.total:.0%} of the run. Set {' and '.join(remedies)}; both may change "
                    "when a run is resumed.",
                )

    def _once(self, name: str, text: str) -> Iterator[str]:
        if name not in self._given:
            self._given.add(name)
            yield text
