"""What a verdict says about times that were worked out by hand. Real runs: tests/distributed/test_observing.py."""

from typing import Any

import pytest

from recmill.observe.recorder import PARTS
from recmill.observe.verdict import Hints, RankTimes, Verdict, verdict

HINTS = Hints(prefetch=2, saves_in_background=True)


def times(rank: int = 0, steps: int = 100, **parts: float) -> RankTimes:
    return RankTimes(rank, f"node{rank}", steps, dict.fromkeys(PARTS, 0.0) | parts, {"seconds": sum(parts.values())})


def of(*ranks: RankTimes, **hints: Any) -> Verdict:
    return verdict(ranks, Hints(**(vars(HINTS) | hints)))


def test_time_spent_waiting_for_input_is_reported_with_what_it_costs_and_what_to_try() -> None:
    found = of(times(input=31, forward=30, backward=30, update=8, other=1))
    assert found.text == "input-bound 31 %: without waiting 1.45x; try data.prefetch=8"
    assert found.shares == pytest.approx({"input": 0.31, "sync": 0, "exchange": 0, "compute": 0.68, "other": 0.01})
    assert of(times(input=60, forward=40), prefetch=0).text.endswith("try data.prefetch=2")
    assert of(times(input=60, forward=40), prefetch=8).text.endswith("copy the dataset to a local disk")


def test_a_rank_for_whose_computation_the_others_wait_is_named() -> None:
    found = of(times(0, exchange=45, forward=55), times(1, exchange=5, forward=95))
    assert found.kind == "late"
    assert found.text.startswith(
        "rank 1 on node1 is late: the others wait 40 % of a step for its computation; without waiting 1.67x;"
    )
    assert found.shares == pytest.approx({"input": 0, "sync": 0.2, "exchange": 0.05, "compute": 0.75, "other": 0})


def test_a_rank_for_whose_input_the_others_wait_is_late_and_the_run_not_input_bound() -> None:
    found = of(*(times(rank, sync=60, forward=40) for rank in (0, 1)), times(2, input=60, forward=40))
    assert "rank 2 on node2 is late: the others wait 60 % of a step for its input" in found.text


def test_a_network_that_all_ranks_wait_for_is_exchange_and_ranks_that_are_late_in_turns_are_synchronization() -> None:
    assert of(times(0, exchange=50, forward=50), times(1, exchange=45, forward=55)).text.startswith(
        "exchange-bound 45 %: without it 1.82x;"
    )
    assert of(times(0, sync=30, forward=70), times(1, sync=29, forward=71)).kind == "sync"
    assert of(times(0, sync=30, forward=70)).kind == "compute", "one rank waits for nobody"


def test_checkpoints_and_validation_are_shares_of_the_run() -> None:
    found = of(times(forward=60, save=40), saves_in_background=False)
    assert found.text == "checkpoint-bound 40 % of the run: without waiting 1.67x; try checkpoint.background=true"
    assert of(times(forward=75, validate=25)).text.startswith("validation-bound 25 % of the run: without it 1.33x;")
    assert of(times(forward=12, save=8)).text == "checkpoint-bound 40 % of the run", "20 s are too short for advice"
    assert found.seconds == {"steps": 60, "save": 40, "validate": 0}


def test_small_waits_are_partly_and_none_are_compute() -> None:
    assert of(times(input=10, forward=90)).text.startswith("mostly compute-bound, partly input-bound 10 %:")
    assert of(times(input=3, forward=97)).text == "compute-bound, 97 % of the step"


def test_steps_of_little_but_fixed_costs_are_bound_by_overhead() -> None:
    found = of(times(forward=16, other=84))
    assert found.text == "overhead-bound 84 %: try a larger train.global_batch_size"


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_few_steps_give_no_verdict(steps: int) -> None:
    found = of(times(steps=steps, input=1.0 * steps))
    assert (found.kind, found.shares) == ("unknown", {})
    assert found.text == f"too few steps to say what limits them: {steps} after the warm-up"


def test_throttling_and_a_busy_machine_are_noted_once_for_each_host() -> None:
    busy = {"seconds": 10.0, "throttled_s": 1.0, "cpu_pressure_s": 8.0}
    ranks = [RankTimes(rank, "n", 100, dict.fromkeys(PARTS, 1.0), busy) for rank in (0, 1)]
    assert verdict(ranks, HINTS).notes == [
        "n: the control group was throttled 10 % of the time: ask for more CPUs",
        "n: threads waited for a core 80 % of the time: it has too few for all",
    ]
