"""What the loop decides from the position alone. Whole runs: tests/distributed/test_ending.py."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recmill.checkpoints.format import Position
from recmill.config.sections import EvalSection
from recmill.observe.recorder import Recorder
from recmill.training import loop
from recmill.world import World


def test_the_position_after_the_last_batch_of_an_epoch_is_the_first_of_the_next() -> None:
    position = Position(step=12, epoch=0, batch=12, best=0.5)
    assert loop._next(position, 13) == Position(step=13, epoch=1, batch=0, best=0.5)
    assert loop._next(position, 14) == Position(step=13, epoch=0, batch=13, best=0.5)


def test_validation_is_due_every_n_steps_or_after_each_epoch_or_both() -> None:
    positions = [Position(step=step, epoch=step // 4, batch=step % 4) for step in range(1, 9)]

    def due(every_steps: int, each_epoch: bool = False) -> list[int]:
        return [p.step for p in positions if loop._is_validation_due(every_steps, each_epoch, p)]

    assert due(0) == [4, 8]
    assert due(3) == [3, 6]
    assert due(3, each_epoch=True) == [3, 4, 6, 8]


def test_a_target_or_patience_ends_training_early() -> None:
    at = Position(step=30, best=0.75, best_step=10, worse_evals=2)
    assert loop.early_end(at, EvalSection(), 0) is None
    assert loop.early_end(at, EvalSection(target_auroc=0.76, patience=3), 3) is None
    assert loop.early_end(at, EvalSection(target_auroc=0.75), 0) == (
        "validation reached auroc 0.75000, eval.target_auroc is 0.75"
    )
    reached = "no better validation than at step 10 for eval.patience = 2"
    assert loop.early_end(at, EvalSection(patience=2), 2) == reached
    assert loop.early_end(at, EvalSection(patience="25%"), 2) == f"{reached} (25% of the run)"
    assert loop.early_end(Position(), EvalSection(target_auroc=0.5), 0) is None, "nothing was validated yet"


def test_batches_are_taken_in_stretches_that_end_at_validations_and_at_the_end() -> None:
    """Steps 3 to 8 of 8, 5 batches an epoch, a validation after step 4."""
    start = Position(step=2, epoch=0, batch=2)
    stretches = loop._stretches(iter("cdefghij"), start, 5, 8, lambda position: position.step == 4)  # type: ignore[arg-type]
    assert ["".join(stretch) for stretch in islice(stretches, 2)] == ["cd", "efgh"]  # type: ignore[arg-type]


def test_the_save_timer_is_due_once_for_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 129.0, 131.0, 131.0, 160.0, 162.0, 162.0])  # two readings when it is due
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(now))
    timer = loop._SaveTimer(minutes=0.5)
    assert [timer.is_due() for _ in range(4)] == [False, True, False, True]


def test_a_save_timer_of_0_minutes_is_never_due() -> None:
    assert not loop._SaveTimer(minutes=0).is_due()


@pytest.mark.parametrize(("device", "seen_by"), [("cpu", [0, 0, 1]), ("cuda", [0, 0, 0, 1])])
def test_gpus_sum_weights_and_flags_during_the_step_before_and_see_flags_one_step_later(
    device: str, seen_by: list[int]
) -> None:
    """The flag is set in the second step."""
    world = World(0, 1, 0, 1, torch.device(device))
    batches: list[Any] = [SimpleNamespace(weight=lambda number=number: number) for number in range(10, 16)]
    steps: list[list[float]] = []
    agreed = loop._agreed(iter(batches), [lambda: len(steps) >= 2], world, loop._sums_ahead(world.device), Recorder())
    for batch, sums in agreed:
        assert batch is batches[len(steps)]
        steps.append(sums)
        if sums[1]:
            break
    assert steps == [[10 + step, flag] for step, flag in enumerate(seen_by)]
