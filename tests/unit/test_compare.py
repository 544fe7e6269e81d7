import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recmill
from recmill.commands.compare import Measured
from recmill.observe.printed_runs import print_comparison
from recmill.observe.recorder import PARTS, STEP

from ..conftest import Config, RunCli
from ..reports import finish, write_run
from .test_timeline import write_rank

DONE = {"state": "done", "step": 120, "seconds": 75.0}


def record(run: Path, forward: list[float]) -> None:
    """Record 120 steps of one rank; `forward`: seconds of the steps of each of ten stretches."""
    write_rank(run / "trace/0", 0, world_size=1)
    steps = np.zeros(120, STEP)
    steps["step"], steps["steps"] = np.arange(1, 121), 1
    steps["start"] = 10**12 + 10**8 * np.arange(120)
    steps["parts"][:, PARTS.index("forward")] = np.repeat(forward, 12)
    steps["parts"][:, PARTS.index("update")] = 0.002
    steps.tofile(run / "trace/0/rank-0.steps")


def named(rows: list[Measured]) -> dict[str, Measured]:
    return {row.name: row for row in rows}


def append(run: Path, lines: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_two_runs_differ_in_config_environment_metrics_and_speed(tmp_path: Path, dlrm: Config) -> None:
    other = dlrm | {"optim": {"dense": {"lr": 0.5}}}
    a, b = write_run(tmp_path / "a", dlrm, DONE), write_run(tmp_path / "b", other, DONE, samples_per_s=9000.0)
    finish(a, 0.71)
    finish(b, 0.82)
    facts = json.loads((b / "env.json").read_text())
    variables = facts["variables"] | {"RECMILL_STORE_FD": "5"}  # an earlier version recorded it
    (b / "env.json").write_text(
        json.dumps(facts | {"packages": {"torch": "2.14.0"}, "started_at": "2026", "variables": variables})
    )
    found = recmill.compare(a, b)
    assert [(row.name, row.a, row.b) for row in found.config] == [("optim.dense.lr", None, 0.5)]
    assert [(row.name, row.a, row.b) for row in found.environment] == [("packages.torch", "2.13.0", "2.14.0")]
    assert found.metrics_of == "test"
    assert named(found.metrics)["auroc"] == Measured("auroc", 0.71, 0.82, is_same=False)
    assert named(found.metrics)["logloss"].is_same
    speed = named(found.speed)
    assert (speed["samples/s"].a, speed["samples/s"].b, speed["samples/s"].is_same) == (
        pytest.approx(1065),
        9000,
        False,
    )
    assert speed["memory GB"].is_same
    assert found.curves["auroc"][-1] == (120, pytest.approx(0.712), pytest.approx(0.712))
    assert (found.first_difference, found.last_common_step) == (None, 120)


def test_a_difference_of_metrics_within_the_noise_of_validations_is_the_same(tmp_path: Path, dlrm: Config) -> None:
    """Validations alternate by 0.01 around a line, which gives a spread of 0.0163 in each run."""
    runs = []
    for name, auroc in (("a", 0.700), ("b", 0.740), ("c", 0.750)):
        run = write_run(tmp_path / name, dlrm, DONE)
        finish(run, auroc)
        values = [0.6 + step / 1000 + (0.01 if step % 20 else -0.01) for step in range(10, 110, 10)]
        lines = [{"step": 10 * n, "split": "val", "headline": "auroc", "auroc": v} for n, v in enumerate(values, 1)]
        append(run, lines)
        runs.append(run)
    # Distances from the middle of neighbours are 0.02: sqrt(0.02**2 / 1.5) = 0.0163; twice sqrt(2) of it is 0.0462.
    assert named(recmill.compare(runs[0], runs[1]).metrics)["auroc"].is_same
    assert not named(recmill.compare(runs[0], runs[2]).metrics)["auroc"].is_same
    assert "twice the spread" in recmill.compare(*runs[:2]).noise_of_metrics


def test_intervals_decide_where_they_are_known(tmp_path: Path, dlrm: Config) -> None:
    runs = []
    for name, low, high in (("a", 0.70, 0.72), ("b", 0.715, 0.74), ("c", 0.725, 0.75)):
        runs.append(write_run(tmp_path / name, dlrm, DONE))
        finish(runs[-1], (low + high) / 2, **{"low/auroc": low, "high/auroc": high})
    assert named(recmill.compare(runs[0], runs[1]).metrics)["auroc"].is_same
    assert not named(recmill.compare(runs[0], runs[2]).metrics)["auroc"].is_same
    assert "intervals of both runs overlap" in recmill.compare(*runs[:2]).noise_of_metrics


def test_a_difference_that_few_users_may_cause_is_not_called_real(
    tmp_path: Path, dlrm: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 users, 20 % and 30 % hits: the difference has a standard error of 0.0606, as 0.2 x 0.8 + 0.3 x 0.7."""
    runs = []
    for name, users, hits in (("a", 100, 0.2), ("b", 100, 0.3), ("c", 10_000, 0.2), ("d", 10_000, 0.3)):
        runs.append(write_run(tmp_path / name, dlrm, DONE))
        finish(runs[-1], 0.7, **{"full/hr@10": hits, "users": users})
        lines = [{"step": step, "split": "val", "headline": "full/hr@10", "full/hr@10": hits} for step in range(8)]
        append(runs[-1], lines)
    few, many = (recmill.compare(*pair) for pair in (runs[:2], runs[2:]))
    assert (named(few.metrics)["full/hr@10"].is_same, named(many.metrics)["full/hr@10"].is_same) == (True, False)
    assert named(few.metrics)["full/hr@10"].error == pytest.approx(1.96 * 0.0606, rel=0.02)
    small = "the split is too small to tell the runs apart by full/hr@10"
    assert (small in few.noise_of_metrics, small in many.noise_of_metrics) == (True, False)
    assert "its 95 % interval with 100 users" in few.noise_of_metrics
    print_comparison(few)
    printed = capsys.readouterr().out
    assert re.search(r"^full/hr@10 +0.2000  0.3000  \+0.1000  0.11\d\d  within \+/-$", printed, re.M)
    assert small in printed


def test_parts_of_steps_are_the_same_within_the_spread_of_ten_stretches(tmp_path: Path, dlrm: Config) -> None:
    runs = [write_run(tmp_path / name, dlrm, {"state": "running"}) for name in "abc"]
    record(runs[0], [0.010, 0.012] * 5)
    record(runs[1], [0.012, 0.013] * 5)
    record(runs[2], [0.020, 0.021] * 5)
    near, far = (named(recmill.compare(runs[0], run).speed) for run in runs[1:])
    assert near["update ms"].a == pytest.approx(2)
    assert (near["forward ms"].is_same, far["forward ms"].is_same) == (True, False)
    assert (near["step ms"].is_same, far["step ms"].is_same) == (True, False)


def test_samples_per_second_are_judged_as_the_time_of_a_step_is(
    tmp_path: Path, dlrm: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few log lines of equal speed have no spread, but the steps do: in run a, 22 ms with a deviation of 10 ms."""
    runs = []
    for name, forward, rate in (("a", [0.01, 0.03] * 5, 1000), ("b", [0.012] * 10, 2000), ("c", [0.002] * 10, 5000)):
        runs.append(write_run(tmp_path / name, dlrm, {"state": "failed"}))
        record(runs[-1], forward)
        append(runs[-1], [{"step": step, "split": "train", "samples_per_s": rate} for step in (60, 120)])
    for run, is_noise in ((runs[1], True), (runs[2], False)):
        found = recmill.compare(runs[0], run)
        assert [named(found.speed)[name].is_same for name in ("step ms", "samples/s")] == [is_noise, is_noise]
        print_comparison(found)
        printed = capsys.readouterr().out
        assert bool(re.search(r"^samples/s +1,000  \d,000  .*  within noise$", printed, re.M)) is is_noise
        assert re.search(r"^update ms +2 +2 +1.00   same$", printed, re.M)


def test_curves_are_compared_at_common_steps_and_the_first_difference_is_found(tmp_path: Path, dlrm: Config) -> None:
    a, b = (write_run(tmp_path / name, dlrm, {"state": "failed"}) for name in "ab")
    append(a, [{"step": step, "split": "train", "loss": 1.0} for step in range(2, 1000, 2)])
    append(b, [{"step": step, "split": "train", "loss": 1.0 if step < 500 else 0.5} for step in range(3, 1000, 3)])
    found = recmill.compare(a, b)
    assert (found.first_difference, found.last_common_step) == (504, 996)
    assert [step for step, *_ in found.curves["loss"]] == [120, 246, 372, 498, 618, 744, 870, 996]
    assert found.curves["loss"][-1] == (996, 1.0, 0.5)
    assert found.metrics == []


@pytest.mark.parametrize(
    ("other", "warning"),
    [
        ({"data": {"path": "data/b"}}, "different datasets: metrics are not comparable"),
        (
            {"model": {"name": "two_tower", "item_id": "movie"}},
            "different tasks (ctr and retrieval): metrics and losses are not comparable",
        ),
    ],
)
def test_metrics_on_different_data_or_tasks_are_shown_without_a_verdict(
    tmp_path: Path, dlrm: Config, other: Config, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", dlrm, DONE), write_run(tmp_path / "b", dlrm | other, DONE)
    finish(a, 0.71)
    finish(b, 0.82)
    found = recmill.compare(a, b)
    assert (found.warning, found.curves, found.first_difference) == (warning, {}, None)
    assert named(found.metrics)["auroc"] == Measured("auroc", 0.71, 0.82, is_same=None)
    print_comparison(found)
    printed = capsys.readouterr().out
    assert f"warning: {warning}\n" in printed
    assert re.search(r"^auroc +0.7100  0.8200$", printed, re.M)
    assert "noise (test)" not in printed


def test_a_dataset_that_was_moved_is_the_same(tmp_path: Path, dlrm: Config) -> None:
    done = DONE | {"dataset": "ab12"}
    a, b = (write_run(tmp_path / name, dlrm | {"data": {"path": f"data/{name}"}}, done) for name in "ab")
    finish(a, 0.71)
    finish(b, 0.82)
    assert recmill.compare(a, b).warning == ""


def test_sequence_models_have_losses_of_their_own(tmp_path: Path, dlrm: Config) -> None:
    names = ("sasrec", "bert4rec")
    a, b = (write_run(tmp_path / name, dlrm | {"model": {"name": name}}, {"state": "failed"}) for name in names)
    found = recmill.compare(a, b)
    assert found.warning == "different models (sasrec and bert4rec): losses are not comparable"
    assert [*found.curves] == ["auroc"]


def test_a_comparison_fits_the_terminal_and_old_runs_leave_out_what_they_lack(
    tmp_path: Path, dlrm: Config, run_cli: RunCli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    other = dlrm | {"data": {"path": "/a/very/long/path" * 9}, "model": dlrm["model"] | {"x" * 90: [1] * 99}}
    a = write_run(Path("a"), dlrm, DONE)
    b = write_run(Path("b" * 70), other, {"state": "failed", "reason": "No memory.", "step": 3})
    finish(a)
    found = recmill.compare(a, b)
    found.runs[0] = replace(found.runs[0], verdict="words " * 30)
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        print_comparison(found)
        printed = capsys.readouterr().out
        assert width - 10 < max(map(len, printed.splitlines())) <= width
        assert "best validation" in printed
    for file in ("config.toml", "metrics.jsonl"):
        (b / file).unlink()
    print_comparison(recmill.compare(a, b))
    done = run_cli("compare", a, b, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == []
    monkeypatch.undo()
    assert run_cli("compare", tmp_path / a, tmp_path / b).stdout == f"{recmill.compare(tmp_path / a, tmp_path / b)}\n"
    monkeypatch.chdir(tmp_path)
    assert run_cli("compare", a, "nothing").returncode == 4
