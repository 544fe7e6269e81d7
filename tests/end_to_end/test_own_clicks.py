"""From an own click log to scores of new rows."""

import json
import logging
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

import recmill
from recmill.cli import commands
from recmill.commands import predict
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.errors import CheckpointError, ConfigError, DataError

from ..conftest import RunCli
from ..object_store import needs_object_store, s3_server
from .test_command_line import assert_one_clear_error

SCHEMA = """
[label]
column = "click"

[split]
by = "files"
val = ["2.csv"]
test = ["3.csv"]

[[feature]]
column = "site"
type = "categorical"

[[feature]]
column = "tags"
type = "categorical"
separator = "|"
"""


def write_log(path: Path, rows: int, seed: int) -> None:
    """Write a log without any number, where 'a' among the tags makes a click likely."""
    draw = random.Random(seed)
    lines = ["site,tags,click"]
    for _ in range(rows):
        tags = draw.sample("abcd", draw.randint(0, 3))
        clicks = draw.random() < (0.8 if "a" in tags else 0.2)
        lines.append(f"s{draw.randint(1, 9)},{'|'.join(tags)},{int(clicks)}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with logs 1.csv to 3.csv and a run that was trained on them; the dataset is moved away."""
    folder = tmp_path_factory.mktemp("own")
    for number in (1, 2, 3):
        write_log(folder / f"{number}.csv", 600, number)
    (folder / "clicks.toml").write_text(SCHEMA)
    recmill.prepare("clicks", folder / "data", input=f"{folder}/?.csv", schema=str(folder / "clicks.toml"))
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(folder / "data")
    config["train"]["num_epochs"] = 6
    recmill.train(config, folder / "run")
    shutil.move(folder / "data", folder / "away")
    return folder


def test_scores_are_calibrated_although_most_unclicked_rows_were_left_out_of_training(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_log(tmp_path / f"{number}.csv", 4000, number)
    (tmp_path / "clicks.toml").write_text(f"{SCHEMA}\n[sample]\nnegatives = 0.2\n")
    data, run = tmp_path / "data", tmp_path / "run"
    recmill.prepare("clicks", data, input=f"{tmp_path}/?.csv", schema=str(tmp_path / "clicks.toml"))
    train, val = (np.load(data / f"{split}_labels.npy") for split in ("train", "val"))
    log = pl.read_csv(tmp_path / "1.csv")["click"]
    assert (train == 1).sum() == log.sum(), "every click is kept"
    assert (train == 0).sum() == pytest.approx(0.2 * (len(log) - int(log.sum())), rel=0.1)
    assert len(val) == 4000, "metrics are on all rows"
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(data)
    config["train"]["num_epochs"] = 16
    recmill.train(config, run)
    tested = json.loads((run / "results.json").read_text())["test"]
    assert tested["calibration"] == pytest.approx(1, abs=0.08), "predicted clicks per click"
    result = recmill.predict(run, tmp_path / "3.csv", tmp_path / "scores.parquet")
    assert result["metrics"]["calibration"] == pytest.approx(tested["calibration"], abs=1e-6)
    scores, clicks = pl.read_parquet(tmp_path / "scores.parquet")["score"], pl.read_csv(tmp_path / "3.csv")["click"]
    assert scores.to_numpy().sum() / clicks.to_numpy().sum() == pytest.approx(tested["calibration"], abs=1e-4)


def test_scores_of_the_test_rows_give_the_metrics_of_the_run_without_the_dataset(trained: Path) -> None:
    result = CliRunner().invoke(
        commands,
        f"predict {trained}/run --input {trained}/3.csv --output {trained}/new/scores.csv --keep click,site --logit "
        "--json",
        catch_exceptions=False,
    )
    printed = json.loads(result.stdout)
    tested = json.loads((trained / "run" / "results.json").read_text())
    assert printed["rows"] == 600
    for name in ("auroc", "logloss", "calibration"):
        assert printed["metrics"][name] == pytest.approx(tested["test"][name], abs=1e-6)
    assert printed["metrics"]["auroc"] > 0.75, "it has learned what 'a' means"
    scores = pl.read_csv(trained / "new" / "scores.csv", schema_overrides={"click": pl.String})
    log = pl.read_csv(trained / "3.csv", infer_schema=False)
    assert scores.select("click", "site").equals(log.select("click", "site")), "all rows, in their order"
    assert np.allclose(scores["score"], 1 / (1 + np.exp(-scores["logit"].to_numpy())), atol=1e-6)


def test_names_with_brackets_and_asterisks_are_no_patterns(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own [1]*"
    folder.mkdir()
    for name in ("1.csv", "2.csv", "3.csv", "clicks.toml"):
        shutil.copy(trained / name, folder / name)
    logs = ",".join(f"{folder}/{number}.csv" for number in (1, 2, 3))
    recmill.prepare("clicks", folder / "data", input=logs, schema=folder / "clicks.toml")
    recmill.train("own/dlrm", folder / "run", overrides=[f"data.path={folder / 'data'}", "train.max_steps=2"])
    rows = pl.read_csv(trained / "3.csv", infer_schema=False)
    rows.write_parquet(folder / "new.parquet")
    recmill.predict(folder / "run", folder / "new.parquet", folder / "scores.parquet", keep=["site"])
    found = pl.read_parquet(folder / "scores.parquet", glob=False)
    assert found["site"].equals(rows["site"])
    assert recmill.open_run(folder / "run").predict(rows)["score"].equals(found["score"])


def test_a_run_that_is_open_scores_frames(trained: Path) -> None:
    log = pl.read_csv(trained / "3.csv", infer_schema=False)
    run = recmill.open_run(trained / "run")
    recmill.predict(trained / "run", trained / "3.csv", trained / "all.parquet", logit=True)
    found = run.predict(log.drop("click"))
    assert isinstance(found, pl.DataFrame)
    assert found.equals(pl.read_parquet(trained / "all.parquet"))
    some = log.to_pandas()[lambda rows: rows["site"] == "s3"]
    scores: Any = run.predict(some, frame="pandas")
    assert scores.index.tolist() == some.index.tolist(), "so that it can be a column of the frame"
    assert scores["score"].tolist() == found.filter(log["site"] == "s3")["score"].to_list()
    assert run.predict(log.clear()).equals(found.clear())
    with pytest.raises(DataError, match="the model needs site, tags: the frame has no column 'tags'; it has site"):
        run.predict(log.select("site"))
    with pytest.raises(DataError, match=r"no columns 'site', 'tags'; it has sites\. For 'site': Did you mean 'sites'"):
        run.predict(log.select(sites="site"))


def test_a_level_of_the_log_holds_for_the_processes_that_train_too(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"], config["train"]["max_steps"] = str(trained / "away"), 2
    logger = logging.getLogger("recmill")
    level = logger.level
    try:
        logger.setLevel(logging.WARNING)
        recmill.train(config, trained / "quiet")
        lines = capfd.readouterr().err.splitlines()
        assert not [line for line in lines if not line.startswith("warning: ")]
        logger.setLevel(logging.NOTSET)
        recmill.train(config, trained / "said")
        assert "step 2" in capfd.readouterr().err
    finally:
        logger.setLevel(level)
    for run in ("quiet", "said"):
        assert "INFO" in (trained / run / "log.txt").read_text(), "the file has every line"


def test_opening_a_run_loads_its_model(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recmill.open_run(trained / "run")
    monkeypatch.setattr(recmill.commands.assemble, "unsharded_network", None)
    assert len(run.predict(pl.read_csv(trained / "3.csv", infer_schema=False))) == 600
    copy = trained / "broken"
    shutil.copytree(trained / "run", copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError):
        recmill.open_run(copy)


def test_scores_that_are_no_numbers_are_an_error(trained: Path) -> None:
    predictor = predict.Predictor(trained / "run")
    predictor.network.state_dict()["logit.bias"].fill_(float("nan"))
    with pytest.raises(CheckpointError, match="its model gives scores that are not finite numbers"):
        predictor.of_frame(pl.DataFrame({"site": ["s1"], "tags": ["a"]}), [], NewRowsFlags())


def test_new_rows_may_be_written_in_another_way_than_the_training_log(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text('site,tags\ns1,a|b\ns2,\ns3,"a|"""\n')
    (tmp_path / "same.csv").write_bytes('# a note\n"s1";a|b\n"s2";\ns3;"a|\\""\n'.encode("utf-16"))
    flags = ["--separator", ";", "--encoding", "utf-16", "--skip-lines", "1", "--columns", "site,tags"]
    flags += ["--quotes", "--escape"]
    words = ["predict", str(trained / "run"), "--input"]
    scores = []
    for name, given in (("new.csv", []), ("same.csv", flags)):
        output = tmp_path / f"{name}.parquet"
        done = CliRunner().invoke(commands, [*words, str(tmp_path / name), "--output", str(output), *given])
        assert done.exit_code == 0, done.exception
        scores.append(pl.read_parquet(output)["score"].to_list())
    assert scores[0] == scores[1]


def test_what_stdin_lacks_is_an_error_about_stdin(trained: Path) -> None:
    words = [sys.executable, "-m", "recmill", "predict", str(trained / "run"), "--input", "-", "--output", "-"]
    done = subprocess.run(words, input="site\ns1\n", capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "\n  stdin: no column 'tags'; it has site\n" in done.stderr


def test_scores_and_schemas_are_replaced_if_that_is_asked_for(trained: Path, tmp_path: Path) -> None:
    output, schema = tmp_path / "s.csv", tmp_path / "clicks.toml"
    calls = {
        output: ["predict", str(trained / "run"), "--input", str(trained / "1.csv"), "--output", str(output)],
        schema: ["schema", "--input", str(trained / "1.csv"), "--label", "click", "--output", str(schema)],
    }
    for path, words in calls.items():
        path.write_text("old")
        error = CliRunner().invoke(commands, words).exception
        assert str(error) == f"{path} exists. Choose another --output, or replace it with --overwrite."
        assert path.read_text() == "old"
        assert CliRunner().invoke(commands, [*words, "--overwrite"]).exit_code == 0
        assert path.read_text() != "old"


def test_the_error_of_another_separator_names_a_flag_that_predict_has(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("site;tags\ns1;a\n")
    with pytest.raises(DataError) as caught:
        recmill.predict(trained / "run", tmp_path / "new.csv", tmp_path / "s.csv")
    assert str(caught.value).endswith("which has 1 field; with ';' it would be 2 (--separator ';').")
    with pytest.raises(ConfigError, match="--encoding is 'utf-9': no such codec"):
        recmill.predict(trained / "run", tmp_path / "new.csv", tmp_path / "s.csv", encoding="utf-9")


@pytest.fixture(scope="module")
def with_numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was trained on a log with times and numbers, none of them missing."""
    folder = tmp_path_factory.mktemp("numbers")
    rows = [f"2026-03-{1 + n % 28:02d} 0{n % 9}:30,{n % 7}.5,{n % 5},{n % 3 // 2}\n" for n in range(400)]
    (folder / "log.csv").write_text("when,price,age,click\n" + "".join(rows))
    (folder / "clicks.toml").write_text(
        """
        label.column = "click"
        time.column = "when"
        feature = [{column = "price", type = "numeric"}, {column = "age", type = "bucket", boundaries = [1, 3]},
                   {name = "hour", type = "time", part = "hour"}]
        """
    )
    recmill.prepare("clicks", folder / "data", input=f"{folder}/log.csv", schema=str(folder / "clicks.toml"))
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(folder / "data")
    config["train"]["num_epochs"] = 1
    recmill.train(config, folder / "run")
    return folder / "run"


def test_bad_values_are_errors_or_missing_and_counted(with_numbers: Path, tmp_path: Path) -> None:
    good = ["2026-04-01,1.5,3", "2026-04-01,,", "2026-04-01,2.5,4"]
    bad = ["2026-04-01,1.5,3", "2026-04-01,expensive,old", "2026-04-01,2.5,4", "soon,1.5,3", ",1e39,3"]
    for name, rows in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["when,price,age", *rows, ""]))
    recmill.predict(with_numbers, tmp_path / "good.csv", tmp_path / "good.parquet")
    with pytest.raises(DataError, match=r"row 2, .* is not a number.* To take such .*: --on-bad-value missing\."):
        recmill.predict(with_numbers, tmp_path / "bad.csv", tmp_path / "bad.parquet")
    words = ["predict", str(with_numbers), "--input", f"{tmp_path}/bad.csv", "--on-bad-value", "missing"]
    done = CliRunner().invoke(commands, [*words, "--output", f"{tmp_path}/bad.parquet"])
    assert done.exit_code == 0, done.exception
    assert "bad values, taken as missing: price 2, age 1, hour 2" in done.output.splitlines()
    scores = [pl.read_parquet(tmp_path / f"{name}.parquet")["score"].to_list() for name in ("good", "bad")]
    assert scores[0] == scores[1][:3], "a bad value is what a missing one is"
    found = recmill.predict(
        with_numbers, tmp_path / "bad.csv", tmp_path / "two.parquet", on_bad_value="missing", procs=2
    )
    assert found["bad_values"] == {"price": 2, "age": 1, "hour": 2}
    assert (tmp_path / "two.parquet").read_bytes() == (tmp_path / "bad.parquet").read_bytes()


def test_numbers_and_times_of_new_rows_may_be_written_in_another_way(with_numbers: Path, tmp_path: Path) -> None:
    (tmp_path / "same.csv").write_text("when,price,age\n2026-04-01T02:00:00,1234.5,3\n")
    (tmp_path / "other.csv").write_text('when,price,age\n01.04.2026 02h,"1.234,5",3\n')
    recmill.predict(with_numbers, tmp_path / "same.csv", tmp_path / "same.parquet")
    other: dict[str, Any] = {}
    for fact, remedy, given in (
        (r"'1\.234,5' is not a number", "use --thousands '.' and --decimal ','.", {"decimal": ",", "thousands": "."}),
        ("does not have the format 'iso'", "or name the format: --time-format", {"time_format": "%d.%m.%Y %Hh"}),
    ):
        with pytest.raises(DataError, match=f"{fact}.*{re.escape(remedy)}.* --on-bad-value missing"):
            recmill.predict(with_numbers, tmp_path / "other.csv", tmp_path / "other.parquet", **other)
        other |= given
    for procs in (1, 2):
        found = tmp_path / f"{procs}.parquet"
        recmill.predict(with_numbers, tmp_path / "other.csv", found, procs=procs, **other)
        assert found.read_bytes() == (tmp_path / "same.parquet").read_bytes()
    with pytest.raises(ConfigError, match=r"--time-format is 'sometimes'\. Give 'iso'"):
        recmill.predict(with_numbers, tmp_path / "other.csv", tmp_path / "s.csv", time_format="sometimes")


def test_scores_of_frames_take_bad_values_as_missing_and_warn(
    with_numbers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = recmill.open_run(with_numbers)
    frame = pl.DataFrame({"when": ["2026-04-01T02:00:00"] * 2, "price": ["1.5", "dear"], "age": [3, 3]})
    with pytest.raises(DataError, match=r"the frame: row 2, column price: 'dear' .*Convert .* --on-bad-value missing"):
        run.predict(frame)
    missing = run.predict(frame.with_columns(price=pl.Series([1.5, None])))
    caplog.clear()
    assert run.predict(frame, on_bad_value="missing").equals(missing)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    fact = "price: 50.0 % of the values are missing, compared with 0.0 % in training. Check how this column is filled."
    assert warnings == [fact]
    with pytest.raises(DataError):
        run.predict(frame)  # the call before changed nothing


def test_a_run_starts_only_from_one_whose_ids_stand_for_the_same_values(trained: Path, tmp_path: Path) -> None:
    for name in ("1.csv", "2.csv", "3.csv"):
        shutil.copy(trained / name, tmp_path)
    options: dict[str, Any] = {"input": f"{tmp_path}/?.csv", "schema": str(trained / "clicks.toml")}
    header, *rows = (trained / "1.csv").read_text().splitlines(keepends=True)
    (tmp_path / "1.csv").write_text("".join([header, *rows, *rows]))  # the same ids with other counts
    recmill.prepare("clicks", tmp_path / "same", **options)
    (tmp_path / "1.csv").write_text("".join([header, *rows]).replace("s1,", "new,"))
    recmill.prepare("clicks", tmp_path / "other", **options)
    start: dict[str, Any] = {"init_from": trained / "run", "overrides": ["train.max_steps=1"]}
    config = recmill.config.load_config(trained / "run" / "config.toml").as_dict()
    config["data"]["path"] = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"the ids of site stand for other values in \S+other than in that run"):
        recmill.train(config, tmp_path / "run", **start)
    assert not (tmp_path / "run").exists()
    config["data"]["path"] = str(tmp_path / "same")
    recmill.train(config, tmp_path / "run", **start)


def test_new_values_get_scores_and_are_reported(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = pl.DataFrame({"tags": [["a", "x"], [], None], "extra": [1, 2, 3], "site": ["s1", "s77", None]})
    labelled = new.with_columns(click=pl.Series([1.0, None, 0.0]))
    labelled.write_parquet(trained / "some.parquet")
    some = recmill.predict(trained / "run", trained / "some.parquet", trained / "some_scores.parquet")
    assert (some["rows"], some["metrics"]["rows"]) == (3, 2), "rows without a label have a score, too"
    new.write_parquet(trained / "new.parquet")
    found = recmill.predict(trained / "run", trained / "new.parquet", trained / "scores.parquet", keep=["extra"])
    assert "metrics" not in found, "there are no labels"
    scores = pl.read_parquet(trained / "scores.parquet")
    assert scores["extra"].to_list() == [1, 2, 3]
    assert scores["score"].is_between(0, 1).all()
    shares = {(row["feature"], row["kind"]): row["here"] for row in found["features"]}
    assert shares["site", "unseen"] == shares["site", "missing"] == shares["tags", "unseen"] == pytest.approx(1 / 3)
    assert shares["tags", "missing"] == pytest.approx(2 / 3)
    fact = "site: 33.3 % of the values are unseen, compared with 0.0 % in training. Check that they are written as in "
    assert any(message.startswith(fact) for message in caplog.messages)
    caplog.clear()
    recmill.open_run(trained / "run").predict(new)
    assert sum(message.startswith(fact) for message in caplog.messages) == 1


def test_what_cannot_be_scored_is_one_error_and_leaves_no_file(trained: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], text: str, **changes: object) -> None:
        with pytest.raises(kind, match=text):
            recmill.predict(**{"run": trained / "run", "input": source, "output": tmp_path / "s.csv", **changes})  # type: ignore[arg-type]
        assert not list(tmp_path.glob("*s.csv*")), "nothing is left"

    source = tmp_path / "new.csv"
    source.write_text("site,tags\ns1,a\ns2\n")
    refused(DataError, "row 2: expected 2 fields, got 1")
    source.write_text("site\ns1\n")
    refused(DataError, "no column 'tags'; it has site\nRename or add what is missing")
    source.write_text("site,tags,click\ns1,a,maybe\n")
    refused(DataError, "row 1, column click: label 'maybe' is neither 0 nor 1")
    source.write_text("site,tags\n")
    refused(DataError, "no rows")
    source.write_text("")
    refused(DataError, "new.csv: no rows. Get the file again")
    pl.DataFrame({"site": ["s1"], "tags": ["a"], "several": [[1, 2]]}).write_parquet(tmp_path / "n.parquet")
    refused(ConfigError, "--keep several: its values are List", input=tmp_path / "n.parquet", keep=["several"])
    pl.DataFrame({"site": [["s1"]], "tags": ["a"]}).write_parquet(tmp_path / "n.parquet")
    refused(DataError, "column site holds lists, and in training it held single values", input=tmp_path / "n.parquet")
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, kept in (("1", 1), ("2", "x")):
        pl.DataFrame({"site": ["s1"], "tags": ["a"], "k": [kept]}).write_parquet(parts / f"{name}.parquet")
    mixed = {"input": parts, "keep": ["k"], "output": tmp_path / "s.csv.parquet"}
    refused(DataError, "2.parquet: column k holds String, but Int64 in", **mixed)
    source.write_text("site,tags\ns1,a\n")
    refused(ConfigError, "end it with .parquet, .csv or .jsonl", output=tmp_path / "s.txt")
    refused(DataError, "--keep does not fit the files:\n.*no column 'nobody'", keep=["nobody"])
    refused(ConfigError, "--keep site,site: 'site' occurs twice. Name it once.", keep=["site", "site"])
    refused(ConfigError, "`input` is a path, not a frame", input=pl.DataFrame({"site": ["s1"]}))
    refused(DataError, "no such file", input=tmp_path / "absent.csv")
    copy = tmp_path / "run"
    shutil.copytree(trained / "run", copy)
    (copy / "recipe" / "recipe.json").write_text('{"log": 3}')
    refused(DataError, "recipe.json: missing, corrupt or changed since training", run=copy)
    (copy / "recipe" / "recipe.json").unlink()
    refused(DataError, "recipe.json: missing, corrupt or changed since training", run=copy)
    shutil.rmtree(copy / "recipe")
    refused(ConfigError, "trained on a dataset without a recipe", run=copy)
    opened = recmill.open_run(copy)
    assert opened.results().height == 1, "what needs no recipe works without one"
    with pytest.raises(ConfigError, match="without a recipe"):
        opened.predict(pl.DataFrame({"site": ["s1"], "tags": ["a"]}))


@pytest.mark.parametrize(("name", "limit"), [("s.parquet", 20_000), ("s.csv", 40_000), ("s.jsonl", 40_000)])
def test_scores_that_find_no_room_are_one_error(
    trained: Path, tmp_path: Path, run_cli: RunCli, name: str, limit: int
) -> None:
    """The smaller limit stops the first part of the scores, the larger one the file of all."""

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    (tmp_path / "new.csv").write_text("site,tags\n" + "s1,a\n" * 4000)
    words = ["predict", trained / "run", "--input", "new.csv", "--output", name]
    done = run_cli(*words, preexec_fn=small_files_only)
    assert_one_clear_error(done, 5, f"{name}: File too large", "ulimit -f")
    assert not (tmp_path / name).exists()


def test_scores_are_corrected_for_the_rows_that_were_left_out(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_log(tmp_path / f"{number}.csv", 3000 if number == 1 else 600, number)
    (tmp_path / "clicks.toml").write_text(f"[sample]\nnegatives = 0.3\n{SCHEMA}")
    recmill.prepare("clicks", tmp_path / "data", input=f"{tmp_path}/?.csv", schema=str(tmp_path / "clicks.toml"))
    config = recmill.config.load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(tmp_path / "data")
    tested = recmill.train(config, tmp_path / "run", overrides=["train.num_epochs=12"])["test"]
    found = recmill.predict(tmp_path / "run", tmp_path / "3.csv", tmp_path / "scores.csv")["metrics"]
    assert found["logloss"] == pytest.approx(tested["logloss"], abs=1e-6)
    assert found["calibration"] == pytest.approx(1, abs=0.25), "about 1.5 without the correction"


def test_memory_does_not_grow_with_the_rows(trained: Path, tmp_path: Path) -> None:
    code = (
        "import sys, recmill; from recmill.commands import scored_files; scored_files._PART_ROWS = 8192\n"
        "from recmill.datasets.inputs import parquet; parquet._BLOCK_ROWS = 8192\n"
        "recmill.predict(*sys.argv[1:], keep=['text'])\n"
        # ru_maxrss would begin with pytest's.
        "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024)"
    )
    peaks = []
    for rows in (100_000, 300_000):
        numbers = pl.DataFrame({"number": np.arange(rows)}).with_columns(
            text=pl.col("number").cast(str).str.zfill(1000)
        )
        frame = numbers.with_columns(site=pl.lit("s1"), tags=pl.lit("a|b")).drop("number")
        frame.write_parquet(tmp_path / f"{rows}.parquet", row_group_size=10_000)
        words = [sys.executable, "-c", code, trained / "run", tmp_path / f"{rows}.parquet", tmp_path / f"{rows}.csv"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 100, peaks  # MB; 200,000 texts are 200


@needs_object_store
def test_rows_in_object_storage_and_json_lines_get_the_scores_of_a_local_file(trained: Path, tmp_path: Path) -> None:
    rows = pl.read_csv(trained / "3.csv", infer_schema=False).head(50)
    rows.write_csv(tmp_path / "new.csv")
    rows.write_ndjson(tmp_path / "new.jsonl")
    recmill.predict(trained / "run", tmp_path / "new.csv", tmp_path / "local.parquet")
    expected = pl.read_parquet(tmp_path / "local.parquet")
    with s3_server() as upload:
        for name in ("new.csv", "new.jsonl"):
            recmill.predict(trained / "run", upload(tmp_path / name, name), tmp_path / f"{name}.parquet")
            assert pl.read_parquet(tmp_path / f"{name}.parquet").equals(expected)
