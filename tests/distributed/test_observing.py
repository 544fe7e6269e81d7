"""Real runs that wait for something on purpose: the verdict names it, with the share that a stopwatch measured."""

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recmill
from recmill.checkpoints.saver import Saver
from recmill.commands.trace import trace
from recmill.data.clicks import ClickSource
from recmill.environment import process_environment
from recmill.errors import Preempted
from recmill.observe import recorder
from recmill.observe.recorder import PARTS, STEP, WARM_UP_STEPS, Recorder
from recmill.training import evaluate
from recmill.training.step import Step

from ..conftest import Config
from ..group import exit_code, in_group, train
from ..timelines import assert_valid, events_of
from .runs import losses

STEPS = 26
Laps = list[tuple[float, float]]


def timed(target: Any, name: str, extra_seconds: float = 0.0) -> Laps:
    """Let calls of a function take longer from now on; return a list to which they add when they began and ended."""
    function = getattr(target, name)
    laps: Laps = []

    def timed_function(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        time.sleep(extra_seconds)
        result = function(*arguments, **options)
        laps.append((began, time.perf_counter()))
        return result

    setattr(target, name, timed_function)
    return laps


def train_slowly(config: Config, run: Path, bottleneck: str) -> tuple[Laps, Laps, list[float], tuple[float, float]]:
    """Train with a bottleneck; return the laps in it and those in backward(), when each step ended, and when training
    began and ended."""
    laps: Laps = []
    backward = timed(torch.Tensor, "backward")
    if bottleneck == "input":
        laps = timed(ClickSource, "_batch", 0.02)
    elif bottleneck == "late":
        laps = timed(dist.Work, "wait")
        if process_environment().rank == 1:
            timed(Step, "forward", 0.04)
    elif bottleneck == "exchange":
        laps = timed(dist.Work, "wait", 0.01)
    elif bottleneck == "save":
        laps = timed(Saver, "save", 0.04)
    elif bottleneck == "validate":
        laps = timed(evaluate, "evaluate_split", 0.04)
    elif bottleneck == "compute":
        laps = timed(Step, "__call__")
        timed(Step, "forward", 0.06)
    steps, begin, finish = (timed(Recorder, name) for name in ("end_step", "begin", "finish"))
    recmill.train(config, run)
    return laps, backward, [end for _, end in steps], (begin[0][1], finish[0][0])


def measured(laps: Laps, start: float, end: float) -> float:
    """Return the share of the time from `start` to `end` that stopwatches ran; laps may lie within others."""
    spent, last = 0.0, start
    for begin, stop in sorted(laps):
        if stop <= end:
            spent += max(stop - max(begin, last), 0.0)
            last = max(last, stop)
    return spent / (end - start)


def assert_waited(rank: dict[str, Any], waits: Laps, backward: Laps, start: float, end: float) -> None:
    """Compare how long a rank waited for the others with the stopwatch around dist.Work.wait.

    DDP waits in C++, at the end of backward(): the stopwatch around backward() is the upper bound.
    """
    parts = {part: spent for part, spent in rank["parts"].items() if part not in ("save", "validate")}
    share = (parts["sync"] + parts["exchange"]) / sum(parts.values())
    assert measured(waits, start, end) - 0.05 < share < measured([*waits, *backward], start, end) + 0.05


@pytest.mark.parametrize("bottleneck", ["input", "late", "exchange", "save", "validate", "compute"])
def test_a_bottleneck_is_named_with_the_share_that_a_stopwatch_measures(
    bottleneck: str, dlrm: Config, tmp_path: Path
) -> None:
    dlrm["data"]["prefetch"] = 0
    dlrm["train"] |= {"num_epochs": 9, "max_steps": STEPS, "log_every_steps": 10, "kernels": "torch"}
    dlrm["eval"]["every_steps"] = 2 if bottleneck == "validate" else 1000
    dlrm["checkpoint"] = {"every_steps": 2 if bottleneck == "save" else 1000, "background": False}
    procs = 2 if bottleneck in ("late", "exchange") else 1
    laps, backward, step_ends, training = in_group(procs, train_slowly, dlrm, tmp_path / "run", bottleneck)
    steps = step_ends[WARM_UP_STEPS - 1], step_ends[-1]
    timing = json.loads((tmp_path / "run" / "results.json").read_text())["timing"]
    text, shares = timing["verdict"], timing["shares"]
    assert text in (tmp_path / "run" / "log.txt").read_text()
    assert timing["steps"] == STEPS - WARM_UP_STEPS
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    if bottleneck == "input":
        assert text.startswith("input-bound ")
        assert text.endswith("; try data.prefetch=2")
        assert shares["input"] == pytest.approx(measured(laps, *steps), abs=0.05)
    elif bottleneck == "late":
        assert "rank 1 on " in text
        assert " is late: the others wait " in text
        assert_waited(timing["ranks"][0], laps, backward, *steps)
    elif bottleneck == "exchange":
        assert text.startswith("exchange-bound ")
        assert_waited(timing["ranks"][0], laps, backward, *steps)
    elif bottleneck == "compute":
        assert "compute-bound" in text
        assert shares["compute"] == pytest.approx(measured(laps, *steps), abs=0.05)
    else:
        assert text.startswith({"save": "checkpoint-bound ", "validate": "validation-bound "}[bottleneck])
        share = timing["seconds"][bottleneck] / sum(timing["seconds"].values())
        assert share == pytest.approx(measured(laps, *training), abs=0.05)
    for rank in range(procs):
        records = np.fromfile(tmp_path / "run" / "trace" / "0" / f"rank-{rank}.steps", STEP)
        assert records["step"].tolist() == list(range(1, STEPS + 1))
        durations = np.diff(records["start"]) / 1e9
        assert records["parts"][:-1].sum(axis=1) == pytest.approx(durations, abs=1e-4)


def train_until_killed(config: Config, run: Path) -> None:
    """Train; in step 7, be killed as soon as something is recorded."""
    recorded = run / "trace" / "0" / "rank-0.counters.jsonl"
    forward, calls = Step.forward, itertools.count(1)

    def killing(step: Step, batch: Any) -> Any:
        if next(calls) == 7:
            while not (recorded.is_file() and recorded.read_text().endswith("\n")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(step, batch)

    Step.forward = killing  # type: ignore[method-assign,assignment]
    recmill.train(config, run)


def test_a_killed_run_keeps_its_recordings_and_a_resumed_one_adds_its_own(dlrm: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    dlrm["train"]["max_steps"] = 9
    dlrm["checkpoint"]["background"] = False
    dlrm["observe"] = {"tensorboard": True}
    assert exit_code(train_until_killed, dlrm, run) == -signal.SIGKILL
    train(dlrm, run)
    shown = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(1, 10))
    assert [event.value for event in shown.Scalars("train/loss")] == pytest.approx(losses(run))
    assert [event.step for event in shown.Scalars("val/auroc")] == [5, 9]
    assert sorted(path.name for path in (run / "trace").iterdir()) == ["0", "1"]
    assert np.fromfile(run / "trace" / "1" / "rank-0.steps", STEP)["step"].tolist() == [6, 7, 8, 9]
    assert json.loads((run / "trace" / "0" / "rank-0.json").read_text())["parts"] == list(PARTS)
    merged = trace(run)
    assert f"{run}/trace/0/rank-0.json: its process was killed; the last seconds are missing" in merged.notes
    assert merged.starts == 2
    assert_valid(events_of(run / "trace.json.gz"))


def test_runs_of_one_step_and_of_none_have_a_verdict_and_a_timeline(dlrm: Config, tmp_path: Path) -> None:
    dlrm["train"]["max_steps"] = 1
    dlrm["checkpoint"]["background"] = False
    assert exit_code(recmill.train, dlrm, tmp_path, fail="train.end:kill") != 0
    train(dlrm, tmp_path)  # from step 1, which was saved: nothing is left to train
    timing = json.loads((tmp_path / "results.json").read_text())["timing"]
    assert timing["verdict"] == "too few steps to say what limits them: 0 after the warm-up"
    train(dlrm, tmp_path / "one")
    for run, steps in (tmp_path, 0), (tmp_path / "one", 1):
        trace(run)
        events = events_of(run / "trace.json.gz")
        assert_valid(events)
        last_start = max(event["ts"] for event in events if event["name"] == "start-up")
        assert len([e for e in events if e["name"] == "step" and e["ts"] >= last_start]) == steps


def train_with_a_wrong_clock(config: Config, run: Path) -> None:
    """Train in two processes; the clock of rank 1 is 123 ms ahead."""
    if process_environment().rank == 1:
        recorder.unix_ns = lambda: time.time_ns() + 123_000_000
    recmill.train(config, run)


def test_the_timeline_of_two_ranks_is_aligned_and_holds_what_the_profiler_saw(dlrm: Config, tmp_path: Path) -> None:
    dlrm["train"] |= {"max_steps": 8, "kernels": "torch"}
    dlrm["observe"] = {"profile_steps": [4, 6]}  # with the validation after step 5
    in_group(2, train_with_a_wrong_clock, dlrm, tmp_path)
    facts = [json.loads((tmp_path / f"trace/0/rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(fact["offsets"]) for fact in facts] == [2, 2]
    for offset in facts[1]["offsets"]:
        assert abs(offset["offset_ns"] + 123_000_000) <= max(1_000_000, offset["error_ns"])
    merged = trace(tmp_path)
    assert merged.clocks_apart_us == pytest.approx(123_000, abs=max(1000, merged.clock_error_us or 0))
    events = events_of(tmp_path / "trace.json.gz")
    assert_valid(events)
    for step in range(1, 9):  # no rank leaves a collective before the last one has entered it
        spans = [e for e in events if e["name"] == "sync" and e["args"]["step"] == step]
        assert [e["pid"] for e in spans] == [0, 1]
        last_entry, first_exit = max(e["ts"] for e in spans), min(e["ts"] + e["dur"] for e in spans)
        assert last_entry <= first_exit + max(1000, 2 * (merged.clock_error_us or 0))
    # Of rank 0: the profiler of rank 1 does not know about the wrong clock.
    (window,) = [e for e in events if e["name"] == "step" and e["pid"] == 0 and e["args"]["step"] == 5]
    products = [e["ts"] for e in events if e["name"] == "aten::addmm" and e["pid"] == 0]
    assert window["ts"] <= min(products) <= window["ts"] + window["dur"]
    assert any(e["pid"] == 1 and e["name"] == "aten::addmm" for e in events)


def train_until_stopped(config: Config, run: Path) -> None:
    """Train; in step 5, receive the signal of a scheduler."""
    forward, calls = Step.forward, itertools.count(1)

    def signalling(step: Step, batch: Any) -> Any:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return forward(step, batch)

    Step.forward = signalling  # type: ignore[method-assign,assignment]
    with pytest.raises(Preempted):
        recmill.train(config, run)


def test_a_window_of_the_profiler_that_a_signal_ends_is_in_the_timeline(dlrm: Config, tmp_path: Path) -> None:
    dlrm["train"]["kernels"] = "torch"
    dlrm["observe"] = {"profile_steps": [3, 9]}
    assert exit_code(train_until_stopped, dlrm, tmp_path) == 0
    merged = trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    assert_valid(events)
    steps = {e["args"]["step"]: e for e in events if e["name"] == "step"}
    assert max(steps) == 5
    products = [e["ts"] for e in events if e["name"] == "aten::addmm"]
    assert steps[4]["ts"] <= min(products) < max(products) <= steps[5]["ts"] + steps[5]["dur"]
    assert merged.notes == []


def full_disk(config: Config, run: Path) -> None:
    assert exit_code(recmill.train, config, run, fail="observe.write:nospace") == 0


def read_only_directory(config: Config, run: Path) -> None:
    """In /sys nobody can create a directory, not even root."""
    assert exit_code(recmill.train, config, run, fail="train.end:kill") != 0
    (run / "trace").rename(run / "moved")
    (run / "trace").symlink_to("/sys/kernel")
    assert exit_code(recmill.train, config, run) == 0


def file_instead_of_directory(config: Config, run: Path) -> None:
    assert exit_code(recmill.train, config, run, fail="train.end:kill") != 0
    (run / "trace").rename(run / "moved")
    (run / "trace").touch()
    assert exit_code(recmill.train, config, run) == 0


@pytest.mark.parametrize("trouble", [full_disk, read_only_directory, file_instead_of_directory])
def test_a_run_that_cannot_be_recorded_learns_the_same_and_warns_once(
    trouble: Any, dlrm: Config, tmp_path: Path
) -> None:
    dlrm["train"]["max_steps"] = 6
    dlrm["observe"] = {"record": False}
    train(dlrm, tmp_path / "unrecorded")
    assert not (tmp_path / "unrecorded" / "trace").exists()
    dlrm["observe"] = {"record": True}
    trouble(dlrm, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "unrecorded")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert len([line for line in lines if "WARNING" in line and "not recorded" in line]) == 1, lines
