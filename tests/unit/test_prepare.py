import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recmill
from recmill import prepare
from recmill.data.opening import open_dataset
from recmill.datasets import writing
from recmill.datasets.synthetic import random_clicks
from recmill.errors import ConfigError, DataError
from recmill.failpoints import VARIABLE

from ..conftest import Config, RunCli


def test_preparing_the_same_again_does_nothing(tmp_path: Path) -> None:
    first = prepare("random-histories", tmp_path / "d", seed=3)
    before = (tmp_path / "d" / "items.npy").stat().st_mtime_ns
    assert prepare("random-histories", tmp_path / "d", seed=3) == first
    assert (tmp_path / "d" / "items.npy").stat().st_mtime_ns == before


def test_another_recipe_is_refused_without_overwrite(tmp_path: Path) -> None:
    prepare("random-histories", tmp_path / "d", seed=3)
    with pytest.raises(DataError) as caught:
        prepare("random-histories", tmp_path / "d", seed=4)
    assert str(caught.value) == (
        f"{tmp_path / 'd'} holds another dataset:\n  seed: was 3, is 4\n"
        "Choose another --output, or replace it with --overwrite."
    )
    assert prepare("random-histories", tmp_path / "d", seed=4, overwrite=True)["recipe"]["seed"] == 4


def test_a_directory_of_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not a prepared dataset"):
        prepare("random-histories", tmp_path / "d")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["thesis.tex"]


def test_overwrite_does_not_replace_a_directory_that_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not a prepared dataset"):
        prepare("random-histories", tmp_path / "d", overwrite=True)
    assert (tmp_path / "d" / "thesis.tex").is_file()


@pytest.mark.parametrize(
    "description", ['{"name": "Task001", "labels": {}}', "not json", '{"files": [], "made_by": 3}']
)
def test_overwrite_spares_other_tools_datasets(tmp_path: Path, description: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset.json").write_text(description)
    with pytest.raises(DataError, match="holds files that recmill did not write"):
        prepare("random-histories", tmp_path / "d", overwrite=True)


def test_overwrite_spares_foreign_files_in_a_dataset(tmp_path: Path) -> None:
    prepare("random-histories", tmp_path / "d")
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds thesis\.tex"):
        prepare("random-histories", tmp_path / "d", seed=2, overwrite=True)


def test_a_dataset_that_a_kill_left_renamed_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill came between the two renames of --overwrite; the next run fails."""
    prepare("random-clicks", tmp_path / "d", rows=30)
    (tmp_path / "d").rename(tmp_path / ".d.old-999999999")
    monkeypatch.setattr(random_clicks, "seal_clicks", None)
    with pytest.raises(TypeError):
        prepare("random-clicks", tmp_path / "d", rows=40, overwrite=True)
    assert open_dataset(tmp_path / "d", "digests").description.recipe["rows"] == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_leftovers_of_a_killed_prepare_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".d.partial-999999999").mkdir()
    prepare("random-histories", tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_killed_run_without_a_completed_part_starts_over_with_any_recipe(tmp_path: Path) -> None:
    unfinished = tmp_path / ".d.unfinished"
    (unfinished / "data").mkdir(parents=True)
    (unfinished / "data" / "day_7_dense.npy").write_bytes(b"incomplete")
    (unfinished / "recipe.json").write_text('{"made_by": "recmill", "recipe": {"rows": 30}, "inputs": {}}')
    prepare("random-clicks", tmp_path / "d", rows=40)
    assert open_dataset(tmp_path / "d", "digests").description.recipe["rows"] == 40
    assert not (tmp_path / "d" / "day_7_dense.npy").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("rows_before", [None, 30])
def test_what_a_kill_after_the_last_rename_leaves_is_removed_by_the_next_call(
    rows_before: int | None, tmp_path: Path, run_cli: RunCli
) -> None:
    if rows_before:
        prepare("random-clicks", tmp_path / "d", rows=rows_before)
    command = ["prepare", "random-clicks", "--rows", "40", "--output", tmp_path / "d", "--overwrite"]
    killed = run_cli(*command, env={**os.environ, VARIABLE: "prepare.renamed:kill"})
    assert killed.returncode == -signal.SIGKILL
    left = sorted(path.name.rstrip("0123456789") for path in tmp_path.iterdir())
    assert left == [*([".d.old-"] if rows_before else []), ".d.unfinished", "d"]
    before = (tmp_path / "d" / "dataset.json").stat().st_mtime_ns
    prepare("random-clicks", tmp_path / "d", rows=40)  # nothing else to do
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert (tmp_path / "d" / "dataset.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("reason", ["resumable", "in use"])
def test_unfinished_work_that_is_resumable_or_in_use_is_kept_by_a_call_with_nothing_to_do(
    reason: str, tmp_path: Path
) -> None:
    prepare("random-clicks", tmp_path / "d", rows=40)
    unfinished = tmp_path / ".d.unfinished"
    unfinished.mkdir()
    with (unfinished / "lock").open("a") as lock:
        if reason == "in use":
            fcntl.flock(lock, fcntl.LOCK_EX)  # another open file counts like another process
        else:
            (unfinished / "data").mkdir()
            (unfinished / "recipe.json").write_text('{"made_by": "recmill", "recipe": {"rows": 30}, "inputs": {}}')
            (unfinished / "done-rows.json").write_text("{}")
        before = sorted(unfinished.iterdir())
        prepare("random-clicks", tmp_path / "d", rows=40)
        assert sorted(unfinished.iterdir()) == before


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    assert prepare("random-histories", tmp_path / "d", seed=np.int64(5))["recipe"]["seed"] == 5  # type: ignore[arg-type]


def test_a_failure_leaves_nothing_behind_and_names_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(random_clicks, "seal_clicks", full_disk)
    with pytest.raises(OSError, match="No space") as caught:
        prepare("random-clicks", tmp_path / "d", rows=100)
    assert caught.value.filename == str(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_unknown_datasets_and_options_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'random-clicks'"):
        prepare("random-click", tmp_path / "d")
    with pytest.raises(ConfigError, match="Did you mean 'rows'"):
        prepare("random-clicks", tmp_path / "d", row=100)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="--rows: should be a valid integer, got 'many'"):
        prepare("random-clicks", tmp_path / "d", rows="many")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^--input is missing\.$"):
        prepare("histories", tmp_path / "d")
    with pytest.raises(ConfigError, match=r"^--only: give a list, like \['a=b'\]\.$"):
        prepare("histories", tmp_path / "d", input="x.csv", only="a=b")  # type: ignore[arg-type]


def test_one_number_for_tables_is_no_size_of_a_million_rows(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--tables 1000000: a single number is the number of tables.*like 1000000,500"
    ):
        prepare("random-clicks", tmp_path / "d", tables=[1_000_000])


def test_one_number_of_tables_is_a_count(tmp_path: Path) -> None:
    description = prepare("random-clicks", tmp_path / "d", rows=100, tables=[3])
    assert [feature["rows"] for feature in description["sparse"]] == [4, 283, 20000]


@pytest.mark.parametrize("name", ["random-clicks", "synthetic-clicks"])
def test_too_few_rows_for_the_days_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--rows 9: 5 days need 10 rows or more"):
        prepare(name, tmp_path / "d", rows=9)
    description = prepare(name, tmp_path / "d", rows=10)
    assert {split: sum(r["stop"] - r["start"] for r in ranges) for split, ranges in description["splits"].items()} == {
        "train": 8,
        "val": 1,
        "test": 1,
    }


def test_an_overwhelming_signal_still_has_a_finite_best(tmp_path: Path) -> None:
    truth = prepare("synthetic-clicks", tmp_path / "d", rows=1000, signal=100.0)["truth"]["val"]
    assert truth["auroc"] > 0.99
    assert 0 <= truth["logloss"] < 0.1


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda config: recmill.train(config, ""), "--run"),
        (lambda config: recmill.train(config, "run", init_from=""), "RUN"),
        (lambda config: recmill.evaluate(""), "RUN"),
        (lambda config: recmill.recommend_all("run", ""), "--output"),
        (lambda config: prepare("random-clicks", ""), "--output"),
        (lambda config: prepare("criteo", "d", input=""), "--input"),
        (lambda config: recmill.split("", "d"), "--input"),
        (lambda config: recmill.split("log", ""), "--output"),
        (lambda config: recmill.download("movielens", ""), "--output"),
        (lambda config: recmill.adopt(""), "DIRECTORY"),
        (lambda config: recmill.audit(""), "DATASET"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    call: Callable[[Config], Any], what: str, dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{what} is empty"):
        call(dlrm)
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_says_how_fast_it_was_prepared_and_is_the_same_whatever_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second = (prepare("synthetic-clicks", tmp_path / name, rows=500) for name in ("a", "b"))
    facts = json.loads((tmp_path / "a" / "preparation.json").read_text())
    assert facts["rows"] == 500
    assert facts["rows_per_s"] == pytest.approx(500 / facts["seconds"], rel=0.1)
    assert facts["peak_memory_bytes"] > 10e6
    assert re.search(r"\d s, \S+ rows/s, peak memory \d+\.\d\d GB", caplog.text)
    assert first == second
    assert open_dataset(tmp_path / "a").fingerprint == open_dataset(tmp_path / "b").fingerprint
    prepare("synthetic-clicks", tmp_path / "a", rows=501, overwrite=True)
    assert json.loads((tmp_path / "a" / "preparation.json").read_text())["rows"] == 501


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_the_command(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "held = bytearray(900_000_000); held[::4096] = b'1' * len(held[::4096])\n"
        "subprocess.run([sys.executable, '-m', 'recmill', *sys.argv[1:]], check=True)"
    )
    words = ["prepare", "synthetic-clicks", "--rows", "500", "--output", tmp_path / "d"]
    subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True, capture_output=True)
    assert json.loads((tmp_path / "d" / "preparation.json").read_text())["peak_memory_bytes"] < 800e6


def test_the_parts_of_a_phase_are_one_time_and_resumed_ones_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 12.0, 12.5, 15.0, 15.0, 15.5])
    monkeypatch.setattr(writing.time, "monotonic", lambda: next(now))
    work = writing.Work(tmp_path)
    for name in ("read-day_0", "read-day_1", "write"):
        work.part(name, dict)
    assert work.seconds == {"read": 5.0, "write": 0.5}
    again = writing.Work(tmp_path)
    again.part("read-day_0", dict)
    assert again.seconds == {}


def test_bytes_of_parquet_do_not_depend_on_the_pieces_of_a_frame(tmp_path: Path) -> None:
    values = pl.DataFrame({"value": [str(number) for number in range(100)]})
    writing.write_parquet(tmp_path / "one", values)
    writing.write_parquet(tmp_path / "two", pl.concat([values[:10], values[10:]], rechunk=False))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
