"""Results, histories and curves of run directories as training leaves them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w

import recmill
from recmill.commands.results import RunReport, deltas, next_command, run_report
from recmill.errors import CheckpointError
from recmill.files.locks import exclusive_lock
from recmill.metrics.binary import Values
from recmill.observe.printed_runs import print_results, print_summary

from ..conftest import Config, RunCli

NewRun = Callable[..., Path]
AUROC = [0.61, 0.72, 0.70]  # of validations at steps 10, 20 and 30


@pytest.fixture
def new_run(tmp_path: Path, dlrm: Config) -> NewRun:
    """Make a run directory with a validation every 10 steps, and what else is given."""

    def make(name: str, status: dict[str, Any], test: dict[str, Any] | None = None, data: str | None = None) -> Path:
        path = tmp_path / name
        path.mkdir()
        config = dlrm | ({"data": {"path": data}} if data else {})
        (path / "config.toml").write_text(tomli_w.dumps(config))
        (path / "status.json").write_text(json.dumps(status))
        lines: list[dict[str, Any]] = []
        for step, auroc in zip((10, 20, 30), AUROC, strict=True):
            rates = {"loss": 1 / step, "samples_per_s": 1000.0 * step, "lr": 0.1, "lr_tables": 0.2}
            lines.append({"step": step, "epoch": 0, "split": "train", **rates, "time": 100.0 + step})
            values = {"headline": "auroc", "auroc": auroc, "calibration": "undefined", "rows": 250}
            lines.append({"step": step, "epoch": 0, "split": "val", **values, "time": 101.0 + step})
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (path / "metrics.jsonl").write_text(f'{text}{{"step": 40, "spl')  # as a kill leaves it
        if test is not None:
            (path / "results.json").write_text(json.dumps({"val": {}, "test": test}))
        return path

    return make


DONE = {"state": "done", "step": 30, "seconds": 75.0}
TESTED = {"step": 20, "checkpoint": "checkpoints/step-00000020"}


def test_a_run_that_is_done_is_reported_with_its_best_step_speed_and_what_was_tested(new_run: NewRun) -> None:
    values = {"auroc": 0.75, "popularity/auroc": 0.5, "rows": 251}
    report = run_report(new_run("a", DONE, values | TESTED))
    assert (report.state, report.model, report.step) == ("done", "dlrm", 30)
    assert (report.metric, report.best_step, report.best_value) == ("auroc", 20, 0.72)
    assert (report.tested_step, report.checkpoint) == (20, "checkpoints/step-00000020")
    assert report.samples_per_s == pytest.approx(3 / (1 / 10_000 + 1 / 20_000 + 1 / 30_000))
    assert (report.values, report.popularity) == ({"auroc": 0.75, "rows": 251}, {"auroc": 0.5})
    assert report.reachable["auroc"] > 0.5  # the data is synthetic


def test_runs_that_are_not_done_are_shown_as_such(new_run: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    statuses = {
        "done": DONE,
        "failed": {"state": "failed", "reason": "The loss is no longer a finite number."},
        "preempted": {"state": "preempted", "reason": "SIGTERM", "step": 37},  # saved after the last report
        "lost": {"state": "running"},
        "running": {"state": "running"},
    }
    paths = [new_run(name, status, {"auroc": 0.75} if name == "done" else None) for name, status in statuses.items()]
    lost, running = (path / ".lock" for path in paths[3:])
    take_it = (
        "import sys, pathlib, recmill.files.locks as l; l.exclusive_lock(pathlib.Path(sys.argv[1]), '').__enter__()"
    )
    subprocess.run([sys.executable, "-c", take_it, str(lost)], check=True)
    with exclusive_lock(running, ""):
        reports = [run_report(path) for path in paths]
    assert [report.state for report in reports] == list(statuses)
    print_results(reports, deltas(reports))
    text = capsys.readouterr().out
    assert f"{reports[1].run}: failed at step 30: The loss is no longer a finite number." in text
    assert f"{reports[2].run}: preempted at step 37: SIGTERM" in text
    assert text.count("running at step 30") == 1


def test_a_run_that_failed_before_it_had_a_config_is_shown(new_run: NewRun) -> None:
    path = new_run("a", {"state": "failed", "reason": "No memory."})
    (path / "config.toml").unlink()
    report = run_report(path)
    assert (report.state, report.model, report.reason) == ("failed", "", "No memory.")


def test_a_run_without_its_results_is_an_error_that_names_the_file(new_run: NewRun) -> None:
    with pytest.raises(CheckpointError, match=r"results\.json: missing, though the run is done"):
        run_report(new_run("a", DONE))


def test_differences_are_to_the_first_run_and_only_between_runs_on_the_same_data(
    new_run: NewRun, run_cli: RunCli, histories: Path
) -> None:
    paths = [
        new_run("first", DONE, {"auroc": 0.75, "rows": 250}),
        new_run("second", DONE, {"auroc": 0.7625, "logloss": 0.5, "rows": 250}),
        new_run("elsewhere", DONE, {"auroc": 0.5}, data=str(histories)),
    ]
    printed = run_cli("results", *paths, "--json")
    first, second, elsewhere = json.loads(printed.stdout)
    assert first["delta"] == elsewhere["delta"] == {}
    assert second["delta"] == {"auroc": pytest.approx(0.0125)}
    text = run_cli("results", "first", "second", env=os.environ | {"COLUMNS": "200"}).stdout
    rows = {line.split("  ")[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["test"][:2] == ["first", "second"]
    assert rows["auroc"][:3] == ["0.7500", "0.7625", "+0.0125"]
    assert "+, -: difference to first" in text
    assert rows["best step"][1:] == ["20", "20"]
    assert rows["logloss"][0] == "0.5000"


def test_popularity_and_best_reachable_stand_beside_the_runs_on_their_dataset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = RunReport("a", "done", dataset="/x/made", values={"hr@10": 0.5}, reachable={"hr@10": 0.875})
    real = RunReport("b", "done", dataset="/x/ml", values={"hr@10": 0.25}, popularity={"hr@10": 0.125, "hr@5": 0.1})
    print_results([made, real, replace(made, run="c")], [{}, {}, {}])
    first, second = capsys.readouterr().out.split("\n\n")
    first_lines, second_lines = ([re.split("  +", line) for line in text.splitlines()] for text in (first, second))
    assert first_lines[0] == ["test", "a", "c", "best reachable"]
    assert first_lines[2] == ["dataset", ".../made", ".../made"]
    assert first_lines[-1] == ["hr@10", "0.5000", "0.5000", "0.8750"]
    assert (second_lines[0], second_lines[-1]) == (["test", "b", "popularity"], ["hr@10", "0.2500", "0.1250"])
    other_task = replace(real, values={"auroc": 0.75}, popularity={"auroc": 0.5})
    print_results([made, other_task], [{}, {}])
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["test", "a", "b", "popularity", "best reachable"]
    assert lines[-2:] == [["hr@10", "0.5000", "0.8750"], ["auroc", "0.7500", "0.5000"]]
    print_results([made, made], [{}, {}])
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith("  best reachable")
    assert "dataset" not in text


def test_a_dataset_that_was_prepared_anew_is_another_one_and_one_that_was_moved_is_not(
    new_run: NewRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # all runs on a dataset are side by side
    same = [{**DONE, "dataset": name} for name in ("12345678ab", "12345678ab", "87654321ba")]
    paths = [new_run(name, status, {"auroc": 0.75}) for name, status in zip("abc", same, strict=True)]
    reports = [run_report(path) for path in paths]
    assert reports[0].reachable == {}, "the data of its path is not what it was trained on"
    reports[1] = replace(reports[1], dataset="/moved")
    assert deltas(reports) == [{}, {"auroc": 0.0}, {}]
    assert deltas([reports[2], *reports[:2]]) == [{}, {}, {"auroc": 0.0}], "the first of its dataset, not of all"
    print_results(reports, [{}, {}, {}])
    first, second = capsys.readouterr().out.split("\n\n")
    assert reports[1].run in first
    assert re.search(r"^dataset .* 12345678 ", first, re.M)
    assert re.search(r"^dataset .* 87654321$", second, re.M)


@pytest.mark.parametrize("tested, is_warned", [(0.0114, True), (0.02, False)])
def test_a_test_result_below_popularity_is_a_warning_under_the_table(
    tested: float, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values: Values = {"full/ndcg@10": tested}
    print_summary(RunReport("a", "done", metric="full/ndcg@10", values=values, popularity={"full/ndcg@10": 0.0194}), "")
    text = capsys.readouterr().out
    warning = "warning: full/ndcg@10 0.0114 is less than ranking by popularity reaches, 0.0194. Train longer"
    assert (warning in text) == is_warned == ("warning" in text)


def test_results_fit_the_terminal_and_repeat_the_names(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reports = [RunReport(f"runs/number-{n}-with-a-long-name", "done", values={"full/hr@10": 0.5}) for n in range(5)]
    print_results(reports, [{}] * 5)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if "0.5000" in line] == ["full/hr@10"] * 3
    assert sum(line.count("runs/number") for line in lines) == 5


@pytest.mark.parametrize("width, first_block", [(50, 1), (65, 2), (30, 1)])
def test_popularity_stands_beside_the_first_runs_and_no_row_of_a_block_is_empty(
    width: int, first_block: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 30 columns there is no room for popularity beside a run."""
    monkeypatch.setenv("COLUMNS", str(width))
    done: Values = {"full/hr@10": 0.5, "full/ndcg@10": 0.25}
    first = [RunReport(f"run-{n}-with-a-name", "done", values=done, popularity={"full/hr@10": 0.1}) for n in range(2)]
    print_results([*first, RunReport("runs/other", "failed", step=7, values={"auroc": 0.75})], [{}] * 3)
    blocks = capsys.readouterr().out.split("\n\n")
    assert blocks[0].splitlines()[0].count("run-") == first_block
    assert ("popularity" in blocks[0]) is (width > 30)
    assert sum(block.count("popularity") for block in blocks) == 1
    assert all(len(re.split("  +", line)) > 1 for block in blocks for line in block.splitlines())


def test_results_of_several_runs_are_a_frame_with_a_row_each(new_run: NewRun) -> None:
    done = new_run("done", DONE, {"auroc": 0.75, "calibration": "undefined", "popularity/auroc": 0.5})
    failed = new_run("failed", {"state": "failed"})
    frame = recmill.results(done, failed)
    assert frame["state"].to_list() == ["done", "failed"]
    assert frame["auroc"].to_list() == [0.75, None]
    assert frame["popularity/auroc"].to_list() == [0.5, None]
    assert frame["best_step"].to_list() == [20, 20]
    assert frame["calibration"].null_count() == 2
    assert recmill.results([done, failed]).equals(frame)
    assert recmill.results(done, iter([str(failed)])).equals(frame)


def test_a_history_has_a_row_per_report_without_incomplete_lines(new_run: NewRun, tmp_path: Path) -> None:
    frame = recmill.history(new_run("a", {"state": "running"}))
    assert frame.columns[:4] == ["step", "epoch", "split", "time"]
    assert frame.filter(pl.col("split") == "val")["auroc"].to_list() == AUROC
    assert frame.filter(pl.col("split") == "train")["loss"].to_list() == [1 / 10, 1 / 20, 1 / 30]
    assert frame["calibration"].null_count() == frame.height == 6
    assert frame.schema["step"] == pl.Int64
    with pytest.raises(CheckpointError, match="no metrics yet"):
        recmill.history(tmp_path)


def test_the_summary_names_best_step_speed_files_and_a_next_command(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run("a", DONE, {"auroc": 0.75, "logloss": 0.4, "rows": 250} | TESTED)
    print_summary(run_report(run), next_command(run))
    text = capsys.readouterr().out
    assert text.startswith("dlrm is trained: 30 steps in 1 min 15 s, 16.4k samples/s\n")
    assert "best validation: auroc 0.7200 at step 20\n" in text
    assert "step 20: checkpoints/step-00000020\n" in text
    assert f"{run}/: results.json metrics.jsonl log.txt" in text
    assert text.endswith(f"next: recmill report {run}\n"), "which needs no extra"
    assert "popularity" not in text  # a column would be empty


def test_after_a_sequence_model_the_next_command_recommends_to_a_user(
    new_run: NewRun, bert4rec: Config, histories: Path
) -> None:
    run = new_run("a", DONE)
    (run / "config.toml").write_text(tomli_w.dumps(bert4rec))
    first = pl.read_parquet(histories / "users.parquet").sort("id")["original_id"][0]
    assert next_command(run) == f"recmill recommend {run} --users {first}"
