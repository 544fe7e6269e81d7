"""Warnings about runs: which numbers cause them, and that none comes twice."""

from typing import Any

from recmill.checkpoints.format import Position
from recmill.config import load_config
from recmill.config.sections import Settings
from recmill.training.advice import ValidationAdvice, before_training, on_resume
from recmill.training.schedule import RunSteps, run_steps

LINEAR = {"name": "linear", "warmup_steps": 200, "decay_start_step": 200, "decay_steps": 5900}


def settings(schedule: dict[str, Any], **sections: Any) -> Settings:
    run = {"data": {"path": "d"}, "model": {"name": "sasrec"}, "optim": {"schedule": schedule}, **sections}
    return load_config(run).settings


def warnings(batches: int, schedule: dict[str, Any], **sections: Any) -> list[str]:
    checked = settings(schedule, **sections)
    return [*before_training(checked, run_steps(checked, batches))]


def test_steps_that_suit_other_data_are_named_before_training() -> None:
    """585 steps, and 24,300 steps, with the steps of a config for 6,075."""
    found = warnings(585, LINEAR, eval={"every_steps": 675})
    assert found == [
        "the learning rate rises for 34% of the 585 steps: optim.schedule.warmup_steps = 200. Set it to a share of the "
        "run, like '5%'. configs/own has configs for any data.",
        "no validation before the end: one is due every 675 steps, and the run has 585. Set eval.every_steps to a "
        "share of the run, like '10%'.",
    ]
    assert warnings(24_300, LINEAR, eval={"every_steps": 675}) == [
        "the learning rate is 0 from step 6,100 on, for 75% of the 24,300 steps: optim.schedule.decay_steps = 5900. "
        "Set it to 'to the end'. configs/own has configs for any data."
    ]
    assert warnings(6075, LINEAR, eval={"every_steps": 675}) == []


def test_the_limits_are_a_fifth_of_warmup_and_a_hundredth_without_a_learning_rate() -> None:
    eval = {"every_steps": "10%"}
    assert warnings(1000, LINEAR, eval=eval) == []
    assert len(warnings(999, LINEAR, eval=eval)) == 1
    assert warnings(6160, LINEAR, eval=eval) == []  # 60 of them without
    assert len(warnings(6170, LINEAR, eval=eval)) == 1
    assert warnings(24_300, LINEAR | {"end_lr": 1e-5}, eval=eval) == []
    (text,) = warnings(1000, {"name": "step", "step_size": 10}, eval=eval)
    assert text.startswith("the learning rate is 0 from step 70 on, for 93%")  # 0.1 ** 7
    assert "optim.schedule.step_size = 10. Raise it." in text


def test_an_epoch_is_the_interval_of_validation_unless_the_config_has_one() -> None:
    assert "one is due every 50 steps, and the run has 50." in warnings(50, {})[0]
    assert warnings(50, {}, train={"num_epochs": 2}) == []
    both = {"every_steps": 1000, "each_epoch": True}
    assert warnings(50, {}, train={"num_epochs": 2}, eval=both) == []
    assert not any("validation" in text for text in warnings(1, {}))


def test_a_batch_that_holds_all_samples_is_named_instead_of_its_warmup() -> None:
    schedule = LINEAR | {"warmup_steps": "5%", "decay_start_step": "5%", "decay_steps": "to the end"}
    train = {"num_epochs": 4, "global_batch_size": 100_000}
    assert warnings(1, schedule, train=train) == [
        "each epoch is a single step, because all training samples fit into one batch: train.global_batch_size = "
        "100,000. Lower it."
    ]
    assert warnings(2, schedule, train=train) == []


def test_another_number_of_steps_on_resume_is_reported_with_both_rates() -> None:
    """Linear from 0.001 at step 0: step 50 of 100, and step 50 of 200."""
    optim = settings({"name": "linear", "decay_steps": "to the end"}).optim
    half, all_steps = (RunSteps(total, 50, decay=total) for total in (100, 200))
    assert [*on_resume(optim, half, all_steps, 50)] == [
        "the run had 100 steps and now has 200, and optim.schedule has shares of the run: the learning rate of step 51 "
        "is 0.00075 instead of 0.0005. To keep it, leave train.num_epochs and train.max_steps as they were."
    ]
    assert [*on_resume(optim, half, half, 50)] == []
    fixed = settings({"name": "linear", "warmup_steps": 5}).optim
    half, all_steps = (RunSteps(total, 50, warmup=5, validation=total // 10) for total in (100, 200))
    assert [*on_resume(fixed, half, all_steps, 50)] == []


def test_validation_below_popularity_is_reported_once_after_a_quarter_of_the_run() -> None:
    advice = ValidationAdvice(RunSteps(100, 10))
    found = [[*advice.after(Position(step=step), 0.01, 0.02)] for step in (24, 25, 26)]
    assert [len(lines) for lines in found] == [0, 1, 0]
    assert found[1][0].startswith(
        "validation at step 25 reached 0.0100, less than ranking by popularity, which reaches"
    )
    advice = ValidationAdvice(RunSteps(100, 10))
    for value, popularity in ((0.02, 0.02), (None, 0.02), (0.01, None)):
        assert [*advice.after(Position(step=50), value, popularity)] == []


def test_a_run_that_is_resumed_does_not_repeat_what_it_reported_before() -> None:
    """At step 60 validation was below popularity, at step 80 it had not improved for half the run."""
    at = Position(step=90, best=0.025, best_step=30)
    for earlier, count in ({30: 0.025}, 2), ({30: 0.025, 60: 0.01}, 1), ({30: 0.025, 60: 0.01, 80: 0.01}, 0):
        advice = ValidationAdvice(RunSteps(100, 10), earlier)
        assert len([*advice.after(at, 0.01, 0.02)]) == count


def test_validation_that_has_not_improved_for_half_the_run_is_reported_once() -> None:
    advice = ValidationAdvice(RunSteps(100, 10))
    found = [[*advice.after(Position(step=step, best=0.7, best_step=20), 0.6, None)] for step in (69, 70, 90)]
    assert [len(lines) for lines in found] == [0, 1, 0]
    assert found[1][0].startswith("validation has not improved since step 20 (0.7000), for 50% of the run.")


def test_a_normalised_entropy_above_1_is_reported_unless_it_falls_before_the_end() -> None:
    def found(*entropies: float) -> list[int]:
        advice, steps = ValidationAdvice(RunSteps(100, 10)), (20, 60, 100)
        given = [[*advice.after(Position(step=s), 0.5, None, e)] for s, e in zip(steps, entropies, strict=True)]
        assert all("has a normalised entropy of" in line for lines in given for line in lines)
        return [step for step, lines in zip(steps, given, strict=True) if lines]

    assert found(1.2, 1.1, 0.97) == []
    assert found(1.2, 1.1, 1.05) == [100]
    assert found(1.1, 1.2, 1.05) == [60]
    assert found(0.99, 1.0, 0.97) == [60]


def test_only_keys_that_are_not_set_are_suggested() -> None:
    def found(patience: int, keeps_best: bool) -> list[str]:
        advice = ValidationAdvice(RunSteps(100, 10, patience=patience), keeps_best=keeps_best)
        return [*advice.after(Position(step=60, best=0.5, best_step=10), 0.4, None)]

    assert ". Set checkpoint.keep_best=true to test the best step and eval.patience='25%' to end" in found(0, False)[0]
    assert ". Set eval.patience='25%' to end such runs early; both" in found(0, True)[0]
    assert ". Set checkpoint.keep_best=true to test the best step; both" in found(9, False)[0]
    assert found(9, True) == []
