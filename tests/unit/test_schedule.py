"""Learning-rate schedules against values worked out by hand, and against torch."""

from typing import Any

import pytest
import torch

from recmill.config import load_config
from recmill.config.sections import Schedule, Settings
from recmill.errors import ConfigError
from recmill.training.schedule import RunSteps, learning_rate, run_steps


def settings(schedule: dict[str, Any], **sections: Any) -> Settings:
    optim = {"schedule": schedule} if schedule else {}
    run = {"data": {"path": "d"}, "model": {"name": "dlrm"}, "optim": optim, **sections}
    return load_config(run).settings


def rates(steps: int, base: float = 8.0, **schedule: Any) -> list[float]:
    """The rates of a run of this number of steps."""
    checked = Schedule(**schedule)
    unchecked = settings({}).model_copy(update={"optim": settings({}).optim.model_copy(update={"schedule": checked})})
    resolved = run_steps(unchecked, steps)
    return [learning_rate(checked, resolved, base, step) for step in range(steps)]


def test_shares_of_the_run_are_rounded_up_and_steps_are_as_they_are() -> None:
    """585 steps: 5 % are 29.25, 10 % are 58.5, 12.5 % are 73.125."""
    shares = {"name": "linear", "warmup_steps": "5%", "decay_start_step": 30, "decay_steps": "12.5%"}
    found = run_steps(settings(shares, eval={"every_steps": "10%"}, checkpoint={"every_steps": 100}), 585)
    assert found == RunSteps(585, 585, warmup=30, decay_start=30, decay=74, validation=59, checkpoint=100)
    assert found.described == (
        "schedule: warmup to step 30, decay from step 30 to 104, validation every 59 steps, checkpoint every 100 steps"
    )
    assert run_steps(settings({"name": "step", "step_size": "50%"}), 10).step_size == 5
    assert run_steps(settings({"name": "linear", "warmup_steps": "0.001%"}), 10).warmup == 1
    assert run_steps(settings({}, eval={"every_steps": "10%"}), 600).validation == 60, "no error of floats"


@pytest.mark.parametrize(
    ("steps", "share", "interval"), [(50, "5%", 10), (180, "5%", 36), (2000, "1%", 50), (13, "5%", 3), (13, "30%", 4)]
)
def test_a_short_run_validates_and_saves_at_most_every_50_steps_or_5_times(
    steps: int, share: str, interval: int
) -> None:
    found = run_steps(settings({}, eval={"every_steps": share}, checkpoint={"every_steps": share}), steps)
    assert (found.validation, found.checkpoint) == (interval, interval)
    assert run_steps(settings({}, eval={"every_steps": 3}), steps).validation == 3, "a number of steps is as it is"


def test_patience_as_a_share_of_the_run_is_a_number_of_validations_rounded_up() -> None:
    def patience(steps: int, **eval: Any) -> int:
        return run_steps(settings({}, eval=eval), steps).patience

    assert patience(282, every_steps="5%", patience="25%") == 2, "71 steps, a validation every 50"
    assert patience(2000, every_steps="5%", patience="25%") == 5
    assert patience(100, patience="25%") == 1, "25 steps of an epoch of 100"
    assert patience(2000, every_steps="5%", patience=7) == 7


@pytest.mark.parametrize(
    ("validation", "checkpoint", "expected"),
    [
        ("5%", "10%", (53, 106)),  # 10 % of 1,041 steps are 105
        ("10%", "14%", (105, 105)),
        ("10%", "5%", (105, 53)),
        ("5%", 100, (53, 100)),
        (40, "10%", (40, 105)),
    ],
)
def test_of_two_shares_a_checkpoint_is_due_at_every_nth_validation(
    validation: int | str, checkpoint: int | str, expected: tuple[int, int]
) -> None:
    found = run_steps(settings({}, eval={"every_steps": validation}, checkpoint={"every_steps": checkpoint}), 1041)
    assert (found.validation, found.checkpoint) == expected


def test_a_decay_to_the_end_reaches_its_end_at_the_last_step_whatever_the_number_of_steps() -> None:
    shares: dict[str, Any] = {
        "name": "linear",
        "warmup_steps": "20%",
        "decay_start_step": "20%",
        "decay_steps": "to the end",
    }
    assert rates(10, **shares) == [4, 8, 8, 7, 6, 5, 4, 3, 2, 1]
    assert rates(5, **shares) == [8, 8, 6, 4, 2]
    longer = settings(shares, train={"num_epochs": 3, "max_steps": 25})
    assert (run_steps(longer, 10).total, run_steps(longer, 10).decay) == (25, 20)
    assert rates(3, name="linear", decay_start_step=5, decay_steps="to the end") == [8, 8, 8], "it ends before"


def test_a_decay_that_the_data_would_start_within_the_warmup_is_an_error() -> None:
    mixed = settings({"name": "linear", "warmup_steps": "10%", "decay_start_step": 100, "decay_steps": 5})
    assert run_steps(mixed, 1000).warmup == 100
    with pytest.raises(ConfigError, match=r"In a run of 1,001 steps optim.schedule.decay_start_step = 100 is before"):
        run_steps(mixed, 1001)


def test_mlperf_stays_below_its_base_between_warmup_and_decay() -> None:
    """Counted from 1: 1/4, 2/4, 3/4 of 8; frozen there at 4 and 5; 8 x (4/4, 3/4, 2/4, 1/4)^2; frozen."""
    found = rates(12, name="mlperf", warmup_steps=4, decay_start_step=6, decay_steps=4)
    assert found == [2, 4, 6, 6, 6, 8, 4.5, 2, 0.5, 0.5, 0.5, 0.5]


def test_mlperf_with_the_published_numbers_of_the_first_dlrm() -> None:
    """Warmup 2750, decay of 27772 steps from 49315, rate 24: a line up, the square of a line down."""
    schedule = Schedule(name="mlperf", warmup_steps=2750, decay_start_step=49315, decay_steps=27772)
    steps = RunSteps(90_001, 90_001, warmup=2750, decay_start=49315, decay=27772)
    wanted = (0, 2748, 2749, 49313, 49314, 63200, 77085, 90000)
    at = {step: learning_rate(schedule, steps, 24.0, step) for step in wanted}
    assert at[0] == pytest.approx(24 / 2750)
    assert at[2748] == at[2749] == at[49313] == pytest.approx(24 * 2749 / 2750)
    assert at[49314] == 24
    assert at[63200] == pytest.approx(24 * 0.25)  # half-way: 13886 of 27772 steps
    assert at[77085] == at[90000] == 1e-7  # the formula alone would give 24 / 27772^2 = 3.1e-8


@pytest.mark.parametrize("warmup", [0, 1])
def test_mlperf_without_warmup_starts_at_its_base_where_the_reference_crashes(warmup: int) -> None:
    found = rates(7, name="mlperf", warmup_steps=warmup, decay_start_step=3, decay_steps=2)
    assert found == [8, 8, 8, 2, 2, 2, 2]


def test_mlperf_without_decay_ends_warmup_at_its_base() -> None:
    assert rates(5, name="mlperf", warmup_steps=2) == [4, 8, 8, 8, 8]


def test_mlperf_never_falls_below_its_lowest_rate() -> None:
    assert rates(5, base=1e-6, name="mlperf", decay_steps=4)[-1] == 1e-7
    assert rates(5, name="mlperf", decay_steps=4, end_lr=1.0) == [4.5, 2, 1, 1, 1]


def test_oneflow_starts_at_zero_and_ends_at_zero() -> None:
    """Counted from 0: 0, 1/4, 2/4, 3/4 of 8; 8 up to the milestone 6; 8 x (1, 3/4, 2/4, 1/4, 0)^2."""
    found = rates(12, name="oneflow", warmup_steps=4, decay_start_step=6, decay_steps=4)
    assert found == [0, 2, 4, 6, 8, 8, 8, 4.5, 2, 0.5, 0, 0]


def test_linear_goes_up_to_its_base_and_down_to_its_end() -> None:
    """1/4 to 4/4 of 8; as it is; from 8 to 4 in four equal steps; as it ends."""
    found = rates(13, name="linear", warmup_steps=4, decay_start_step=6, decay_steps=4, end_lr=4.0)
    assert found == [2, 4, 6, 8, 8, 8, 8, 7, 6, 5, 4, 4, 4]
    assert rates(3, name="linear", warmup_steps=1) == [8, 8, 8]


def test_oneflow_decays_to_its_end_value() -> None:
    """(8 - 4) x (1, 1/2, 0)^2 + 4."""
    assert rates(4, name="oneflow", decay_steps=2, end_lr=4.0) == [8, 5, 4, 4]


def test_oneflow_decay_equals_torch_s_polynomial() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=24.0)
    torch_s = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=7, power=2.0)
    found = rates(13, base=24.0, name="oneflow", decay_start_step=3, decay_steps=7)[3:]
    for rate in found:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        torch_s.step()


def test_step_equals_torch_s_step_lr() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=8.0)
    torch_s = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for rate in rates(10, name="step", step_size=3, gamma=0.5):
        assert rate == optimizer.param_groups[0]["lr"]
        optimizer.step()
        torch_s.step()


def test_plateau_never_raises_a_rate_to_an_end_that_is_above_it() -> None:
    schedule = Schedule(name="plateau", gamma=0.1, end_lr=0.05)
    steps = run_steps(settings({}), 10)
    assert [learning_rate(schedule, steps, 1.0, 5, cuts) for cuts in range(3)] == pytest.approx([1.0, 0.1, 0.05])
    assert [learning_rate(schedule, steps, 0.01, 5, cuts) for cuts in range(3)] == [0.01] * 3


def test_constant_is_constant() -> None:
    assert rates(3) == [8, 8, 8]


@pytest.mark.parametrize(("epochs", "limit", "expected"), [(2, 0, 26), (2, 20, 20), (1, 20, 13)])
def test_a_run_ends_after_its_epochs_or_its_limit(epochs: int, limit: int, expected: int) -> None:
    assert run_steps(settings({}, train={"num_epochs": epochs, "max_steps": limit}), 13).total == expected
