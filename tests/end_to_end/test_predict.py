"""`recmill predict` on Criteo's logs: any number of processes, streams, kills, and what it refuses."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recmill
from recmill.commands import scored_files
from recmill.errors import CheckpointError, ConfigError, DataError
from tests.criteo_raw import COLUMNS, random_rows, to_text, write_days, write_rows

NAMES = ["label", *(f"I{i + 1}" for i in range(13)), *COLUMNS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with raw logs, their dataset, and a run that was trained on it."""
    folder = tmp_path_factory.mktemp("criteo")
    days = write_days(folder / "raw", [2000, 2000], smallest=-1)
    recmill.prepare("criteo", folder / "data", input=str(folder / "raw"), dense="log-min", last_day="val-first")
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(folder / "data")
    config["train"]["num_epochs"] = 1
    recmill.train(config, folder / "run")
    write_rows(folder / "test.tsv", days[1][1000:])
    return folder


def predicted(trained: Path, output: Path, **options: Any) -> bytes:
    recmill.predict(trained / "run", trained / "test.tsv", output, **options)
    return output.read_bytes()


def test_scores_of_the_raw_test_rows_are_those_of_evaluate(trained: Path) -> None:
    found = recmill.predict(trained / "run", trained / "test.tsv", trained / "scores.parquet", keep=["label", "C1"])
    tested = json.loads((trained / "run" / "results.json").read_text())["test"]
    assert found["rows"] == found["metrics"]["rows"] == 1000
    for name in ("auroc", "logloss", "calibration"):
        assert found["metrics"][name] == pytest.approx(tested[name], abs=1e-6)
    rows = [line.split("\t") for line in (trained / "test.tsv").read_text().splitlines()]
    scores = pl.read_parquet(trained / "scores.parquet")
    assert scores["label"].to_list() == [row[0] for row in rows]
    assert [value or "" for value in scores["C1"].to_list()] == [row[14] for row in rows]
    missing = {row["feature"]: row["here"] for row in found["features"] if row["kind"] == "missing"}
    assert missing["C1"] == pytest.approx(np.mean([row[14] == "" for row in rows]))
    frame = pl.DataFrame(rows, schema=dict.fromkeys(NAMES, pl.String), orient="row")
    of_frame = recmill.open_run(trained / "run").predict(frame)
    assert isinstance(of_frame, pl.DataFrame)
    assert of_frame["score"].equals(scores["score"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_output_is_the_same_for_any_number_of_processes(
    suffix: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_files, "_PART_ROWS", 150)  # 7 parts
    alone = predicted(trained, tmp_path / f"1.{suffix}", logit=True)
    for procs in (2, 3) if suffix == "csv" else (2,):
        assert predicted(trained, tmp_path / f"{procs}.{suffix}", logit=True, procs=procs) == alone
    read: Any = {"csv": pl.read_csv, "jsonl": pl.read_ndjson, "parquet": pl.read_parquet}[suffix]
    assert read(io.BytesIO(alone)).shape == (1000, 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def command(trained: Path, output: object, **environment: str) -> "subprocess.Popen[bytes]":
    code = (
        "from recmill.commands import scored_files; scored_files._PART_ROWS = 150\nfrom recmill.cli import main; main()"
    )
    words = ["predict", trained / "run", "--input", trained / "test.tsv", "--output", output]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_nothing_and_resumes(
    number: signal.Signals, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scores.csv"
    stopped = command(trained, output, RECMILL_FAIL="predict.part@hit=3:hang")
    notes = tmp_path / ".scores.csv.unfinished"
    while len(list(notes.glob("done-*.json"))) < 3:
        assert stopped.poll() is None
    stopped.send_signal(number)
    assert stopped.wait(30) != 0
    assert [path.name for path in tmp_path.iterdir()] == [notes.name]
    done = {path.name: path.stat().st_mtime_ns for path in notes.glob("done-score-*.json")}
    scored: list[Path] = []
    score = scored_files._score_part

    def noted(predictor: Any, job: Any, rows: Any, file: Path) -> dict[str, Any]:
        scored.append(file)
        return score(predictor, job, rows, file)

    monkeypatch.setattr(scored_files, "_PART_ROWS", 150)
    monkeypatch.setattr(scored_files, "_score_part", noted)
    resumed = predicted(trained, output)
    assert len(scored) == 7 - len(done)
    assert resumed == predicted(trained, tmp_path / "unbroken.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.csv", "unbroken.csv"]


def test_rows_come_from_stdin_and_scores_go_to_stdout(trained: Path, tmp_path: Path) -> None:
    expected = predicted(trained, tmp_path / "scores.csv")
    words = [sys.executable, "-m", "recmill", "predict", str(trained / "run"), "--input", "-", "--output", "-"]
    text = (trained / "test.tsv").read_bytes()
    done = subprocess.run(words, input=text, capture_output=True, check=True)
    assert done.stdout == expected
    cut = subprocess.run(words, input=text[: len(text) // 2], capture_output=True, check=False)
    assert (cut.returncode, cut.stdout) == (3, b"")
    assert b"row 5" in cut.stderr or b"fields" in cut.stderr
    empty = subprocess.run(words, input=b"", capture_output=True, check=False)
    assert (empty.returncode, empty.stdout) == (3, b"")
    assert b"nothing came from stdin" in empty.stderr


def test_one_bad_row_is_named_and_nothing_is_left(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_files, "_PART_ROWS", 150)
    rows = random_rows(1000, 5, smallest=-1)
    rows[777][20] = "oops"
    write_rows(tmp_path / "bad.tsv", rows)
    for procs in (1, 2):
        with pytest.raises(DataError, match=r"bad.tsv: row 778, column C7: 'oops' is not a hexadecimal id"):
            recmill.predict(trained / "run", tmp_path / "bad.tsv", tmp_path / "s.csv", procs=procs)
        assert [path.name for path in tmp_path.iterdir()] == ["bad.tsv"]


def test_what_cannot_be_scored_is_refused(trained: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], text: str, **changes: Any) -> None:
        given = {"run": trained / "run", "input": trained / "test.tsv", "output": tmp_path / "out" / "s.csv"}
        with pytest.raises(kind, match=text):
            recmill.predict(**{**given, **changes})
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())

    (tmp_path / "empty.tsv").write_bytes(b"")
    refused(DataError, "empty.tsv: no rows. Get the file again", input=tmp_path / "empty.tsv")
    pl.DataFrame(schema=dict.fromkeys(NAMES, pl.String)).write_parquet(tmp_path / "header.parquet")
    refused(DataError, "header.parquet: no rows", input=tmp_path / "header.parquet")
    (tmp_path / "few.tsv").write_text("1\t2\t3\n")
    refused(DataError, "few.tsv.*expected 39 fields, got 3", input=tmp_path / "few.tsv")
    refused(ConfigError, "--format is for stdin and stdout", format="jsonl")
    (tmp_path / "there.csv").write_text("x")
    refused(DataError, "there.csv exists. Choose another --output", output=tmp_path / "there.csv")
    moved = tmp_path / "moved"
    shutil.copytree(trained / "run", moved)
    config = (moved / "config.toml").read_text().replace(str(trained / "data"), str(tmp_path / "gone"))
    (moved / "config.toml").write_text(config)
    refused(ConfigError, "without a recipe", run=moved)
    recmill.predict(moved, trained / "test.tsv", tmp_path / "moved.csv", data=trained / "data")
    recmill.prepare("criteo", tmp_path / "other", input=str(trained / "raw"), dense="log3")
    refused(CheckpointError, "was trained on other data", run=moved, data=tmp_path / "other")


def test_all_values_may_be_unseen_and_labels_absent(trained: Path, tmp_path: Path) -> None:
    rows = random_rows(50, 9, smallest=-1, missing=0)
    for row in rows:
        row[14:] = ["deadbeef"] * 26
    (tmp_path / "new.tsv").write_bytes(to_text([row[1:] for row in rows]))
    found = recmill.predict(trained / "run", tmp_path / "new.tsv", tmp_path / "s.jsonl")
    assert "metrics" not in found
    assert {row["here"] for row in found["features"] if row["kind"] == "unseen"} == {1.0}
    assert pl.read_ndjson(tmp_path / "s.jsonl")["score"].is_between(0, 1).all()
