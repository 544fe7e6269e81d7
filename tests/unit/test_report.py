"""Reports as text. What a browser makes of them: tests/end_to_end/test_report_in_browser.py."""

import html
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recmill
from recmill.commands.report import MAX_BYTES
from recmill.errors import CheckpointError, ConfigError
from recmill.observe.recorder import PARTS, STEP
from recmill.observe.recordings import read_recordings

from ..conftest import Config, RunCli
from ..reports import VERDICT, finish, write_run
from .test_timeline import write_rank

DONE = {"state": "done", "step": 120, "seconds": 75.0}


def text_of(page: Path) -> str:
    """Return the words of a page, with single spaces."""
    source = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", source)).split())


def test_a_report_has_verdict_metrics_parts_ranks_tables_environment_and_commands(tmp_path: Path, dlrm: Config) -> None:
    run = write_run(tmp_path / "a", dlrm, DONE, store_hit=0.9876)
    finish(run)
    path = recmill.report(run)
    assert path == run / "report.html"
    words = text_of(path)
    for fact in (
        f"done · dlrm · {dlrm['data']['path']}",
        VERDICT,
        "n0: threads waited for a core 60 % of the time",
        "best validation auroc 0.7120 at step 120",
        "training time 1 min 15 s 0.167 core-hours",
        "auroc 0.7100 0.",  # beside the best reachable value, because the data is synthetic
        "a dashed vertical line marks where the run was resumed",
        " 1 n1 ",
        "2 starts; the time between them is left out",
        "2 tables, 3,000 rows, 8.0 MB",
        "98.8% were in the cache",
        "table_2 2,000 8 cached_ssd row_wise 4.000 2 ranks 1.000 to 3.000",
        "a checkpoint of step 120 was saved, but there is none",
        "Fast <1>",
        "torch 2.13.0",
        'name = "dlrm"',
        f"recmill launch {run}/config.toml --run {run}-again",
        "--nodes 2 --procs 1",
        "0123abcd",
    ):
        assert fact in words, fact


def test_a_report_of_several_runs_shows_popularity_beside_the_runs_that_have_it(tmp_path: Path, dlrm: Config) -> None:
    runs = [write_run(tmp_path / name, dlrm, DONE) for name in "ab"]
    finish(runs[0])
    finish(runs[1], **{"popularity/auroc": 0.625})
    words = text_of(recmill.report(runs, output=tmp_path / "report.html"))
    header = f"test {runs[0]} {runs[1]} popularity, {runs[1]} auroc 0.7100 0.7100 0.6250"
    assert header in words or header.replace(f"{tmp_path}/", "") in words


def test_the_command_that_a_report_shows_makes_the_same_dataset(
    tmp_path: Path, dlrm: Config, clicks: Path, run_cli: RunCli
) -> None:
    words = text_of(recmill.report(write_run(tmp_path / "a", dlrm, {"state": "failed", "reason": "No memory."})))
    shown = re.search(r"(recmill prepare .*?) recmill train", words)
    assert shown
    command = shlex.split(shown[1].replace(str(clicks), "again"))
    done = run_cli(*command[1:])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again/dataset.json").read_bytes() == (clicks / "dataset.json").read_bytes()


@pytest.mark.parametrize("state", ["running", "failed", "preempted", "interrupted"])
def test_runs_that_are_not_done_and_old_ones_say_what_is_missing(state: str, tmp_path: Path, dlrm: Config) -> None:
    run = write_run(
        tmp_path / "a", dlrm, {"state": state, "step": 120, "reason": "SIGTERM" if state != "running" else ""}
    )
    words = text_of(recmill.report(run))
    assert f"{state} at step 120" in words
    assert ("SIGTERM" if state != "running" else "comes when it is done") in words
    for sentence in (
        "This run did not record where its time went.",
        "No counters were recorded",
        "The placement of tables is unknown",
        "The environment is unknown",
    ):
        assert sentence in words
    for file in ("config.toml", "metrics.jsonl", "report.html"):
        (run / file).unlink()
    words = text_of(recmill.report(run))
    assert "No curves: nothing was reported yet" in words
    assert "The run has no readable config.toml" in words


def test_names_and_values_stay_text_whatever_they_are(tmp_path: Path, dlrm: Config) -> None:
    evil = "<script>alert(1)</script>"
    config = dlrm | {"data": {"path": f"{evil}\"'&"}}
    run = write_run(
        tmp_path / "<script>alert(1)<" / "b", config, {"state": "failed", "reason": f"{evil}\u202e"}, auroc=0.5
    )
    finish(run)
    facts = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps(facts | {evil: {evil: evil}, "hosts": [{"name": evil, "gpus": [evil]}]}))
    (run / "sharding.json").write_text(json.dumps([{"table": evil, "rows": evil, "bytes_by_rank": {evil: 3}}]))
    line = {"step": 130, "split": "val", "headline": evil, evil: 0.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(line)}\n")
    source = recmill.report(run, run, output=tmp_path / "out.html").read_text()
    assert "<script" not in source
    assert source.count("&lt;script&gt;") > 10
    assert "\u202e" not in source


def test_a_run_of_ten_million_steps_on_many_ranks_gives_a_small_file(tmp_path: Path, dlrm: Config) -> None:
    """The recording of 10 million steps is thinned; here a record is of 2,500 steps."""
    run = write_run(tmp_path / "a", dlrm, {"state": "running", "step": 10**7})
    steps = np.zeros(4_000, STEP)
    steps["steps"] = 2500
    steps["step"] = 2500 * np.arange(1, 4_001)
    steps["start"] = 10**12 + 10**9 * np.arange(4_000)
    steps["parts"][:, PARTS.index("forward")] = 0.5
    steps["parts"][:, PARTS.index("sync")] = 0.25
    for rank in range(40):
        write_rank(run / "trace/0", rank, world_size=40)
        target = run / f"trace/0/rank-{rank}.steps"
        if rank == 0:
            steps.tofile(target)
        else:
            target.unlink()
            target.symlink_to(run / "trace/0/rank-0.steps")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
        for step in range(200, 20_000):
            file.write(f'{{"step": {500 * step}, "split": "train", "loss": {0.5 + step % 7 / 100}, "lr": 0.1}}\n')
    path = recmill.report(*[run] * 8, output=tmp_path / "out.html")
    assert path.stat().st_size < MAX_BYTES
    words = text_of(path)
    assert "ranks are shown: those that wait least and most" in words
    assert "33 %" in words  # 0.25 of 0.75 s


def test_recordings_are_summed_up_with_their_gaps_and_errors(tmp_path: Path) -> None:
    for start in (0, 1):
        write_rank(tmp_path / f"trace/{start}", 0, world_size=1)
    steps = np.zeros(32, STEP)
    steps["step"], steps["steps"] = np.arange(1, 33), 1
    steps["start"] = 10**12 + 10**8 * np.arange(32)
    steps["parts"][:, PARTS.index("forward")] = 0.04
    steps["parts"][20, PARTS.index("input")] = 0.5
    steps["parts"][30, PARTS.index("save")] = 7.0
    steps["parts"][31] = np.nan  # corrupt
    steps.tofile(tmp_path / "trace/1/rank-0.steps")
    found = read_recordings(tmp_path / "trace", 32)
    assert found is not None
    assert [start.first_step for start in found.starts] == [0, 0]
    own = found.ranks[0]
    assert own.steps.sum() == 21, "without 10 steps of warm-up of each start, and the corrupt one"
    assert own.seconds_by_part["forward"] == pytest.approx(21 * 0.04)
    assert own.seconds_by_part["save"] == pytest.approx(7.0)
    assert found.saves == {31: pytest.approx(7.0)}
    assert found.slowest[0] == (pytest.approx(0.54), 21, "input")
    assert found.step_seconds(0.5) == pytest.approx(0.04, rel=0.05)
    assert found.seconds == pytest.approx(1.0 + 3.0 + 0.04 + 7.0, rel=0.05)
    assert found.run["training"][0][0] == pytest.approx(0.1 / found.seconds, abs=0.002)
    assert read_recordings(tmp_path / "nothing", 32) is None


def test_reports_are_complete_or_absent_and_errors_name_what_is_wrong(
    tmp_path: Path, dlrm: Config, run_cli: RunCli
) -> None:
    run = write_run(tmp_path / "a", dlrm, {"state": "running"})
    before = sorted(path.name for path in run.iterdir())
    (tmp_path / "file").write_text("")
    done = run_cli("report", run, "--output", "file/out.html")
    assert (done.returncode, "perhaps a file" in done.stderr) == (5, True)
    assert sorted(path.name for path in run.iterdir()) == before
    done = run_cli("report", "a")
    assert (done.returncode, done.stdout) == (0, "a/report.html\n")
    arguments: list[tuple[Any, type[Exception], str]] = [
        (((), {}), ConfigError, "name at least one run"),
        (((run,) * 9, {}), ConfigError, "more than 8 cannot be told apart"),
        (((run,), {"output": tmp_path}), ConfigError, "is a directory"),
        (((tmp_path / "no",), {}), CheckpointError, "no such directory"),
    ]
    for (runs, options), kind, words in arguments:
        with pytest.raises(kind, match=words):
            recmill.report(*runs, **options)
    shutil.rmtree(run)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("status.json", '"step": 120', f'"step": {10**30}'),
        ("trace/0/rank-0.json", '"offset_ns": 0', '"offset_ns": "x"'),
        ("trace/0/rank-1.json", '"rank": 1', '"rank": null'),
        ("metrics.jsonl", '"samples_per_s": 1010.0', '"samples_per_s": 1e400'),
        ("env.json", '"cores": 4', '"cores": []'),
        ("sharding.json", "1000000", '"many"'),
    ],
)
def test_corrupt_values_do_not_end_a_report_or_a_comparison(
    file: str, old: str, new: str, tmp_path: Path, dlrm: Config
) -> None:
    run = write_run(tmp_path / "a", dlrm, DONE)
    finish(run)
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new))
    assert recmill.report(run).stat().st_size > 10_000
    assert recmill.compare(run, run).metrics[0].is_same
