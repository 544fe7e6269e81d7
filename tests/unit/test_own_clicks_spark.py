"""`prepare clicks --engine spark`: the files are those of the other engine, byte for byte."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w

from recmill import prepare
from recmill.datasets.own_clicks import learning, steps
from recmill.datasets.own_clicks import spark as clicks_spark
from recmill.datasets.own_clicks.schema import checked_schema
from recmill.datasets.own_clicks.values import RawRows
from recmill.datasets.writing import MADE_BY, PREPARATION_FILE
from recmill.errors import ConfigError, DataError, ResourceError

from ..conftest import RunCli
from ..spark_session import needs_spark, spark, stop_spark_at_the_end

needs_spark()
__all__ = ["spark", "stop_spark_at_the_end"]  # fixtures

FEATURES: list[dict[str, Any]] = [
    {"column": "site", "type": "categorical", "min_frequency": 2},
    {"name": "few sites", "column": "site", "type": "categorical", "min_frequency": 1, "table_size": 9},
    {"name": "hashed", "column": "site", "type": "categorical", "ids": "hash", "table_size": 50},
    {"column": "tags", "type": "categorical", "separator": "|", "max_values": 3, "min_frequency": 3},
    {"column": "last", "type": "categorical", "share_table": "tags"},
    {"name": "any case", "column": "site", "type": "categorical", "normalize": ["strip", "lower"]},
    {"name": "flag", "column": "fold", "type": "categorical", "missing_values": ["v"]},
    {"name": "price bucket", "column": "price", "type": "bucket"},
    {"name": "squared", "column": "price", "type": "bucket", "boundaries": "log2-squared"},
    *({"name": f"price {t}", "column": "price", "type": "numeric", "transform": t, "flag_missing": t == "rank"}
      for t in ("none", "standard", "minmax", "log1p", "sqrt", "rank", "power")),
    {"name": "clipped", "column": "count", "type": "numeric", "clip": [0.05, 0.95], "missing": "mean"},
    *({"name": part, "type": "time", "part": part} for part in ("hour", "weekday", "is_weekend", "day", "month")),
    {"name": "cross", "type": "cross", "columns": ["site", "fold"], "table_size": 100},
]  # fmt: skip
SCHEMA: dict[str, Any] = {
    "label": {"column": "click", "positive": ["1"], "drop": "== 2"},
    "time": {"column": "at"},
    "keep": {"columns": ["user", "at"], "weight": "weight"},
    "sample": {"negatives": 0.6},
    "feature": FEATURES,
}
SPLITS: dict[str, dict[str, Any]] = {
    "time": {"by": "time", "val": 0.2, "test": 0.2},
    "dates": {"by": "time", "val_from": "2026-03-05", "test_from": "2026-03-08"},
    "rows": {"by": "rows", "val": 0.2, "test": 0.2},
    "random": {"by": "random", "val": 0.2, "test": 0.2, "seed": 3},
    "groups": {"by": "random", "val": 0.2, "test": 0.2, "group": "user"},
    "column": {"by": "column", "column": "fold", "val": ["v"], "test": ["t"]},
    "files": {"by": "files", "val": ["log-1.csv"], "test": ["log-2.parquet"]},
}
IN_TRAINING = {"at": "2026-03-01 00:00:00", "click": "1"}
ROWS = [150, 90, 120, 60]  # of each file


def random_log(rows: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    seconds = np.sort(random.integers(0, 10 * 86_400, rows))
    price = np.round(random.lognormal(1, 1.5, rows) - 1, 2).astype(str)
    tags = ["|".join(f"t{t}" for t in random.integers(0, 12, random.integers(0, 6))) for _ in range(rows)]
    return pl.DataFrame(
        {
            "click": random.choice(["0", "1", "2"], rows, p=[0.55, 0.4, 0.05]),
            "at": pl.from_epoch(pl.Series(seconds + 1_772_323_200)).dt.strftime("%F %T"),
            "user": random.integers(0, 40, rows).astype(str),
            "fold": random.choice(["", "v", "t"], rows, p=[0.6, 0.2, 0.2]),
            "site": [
                random.choice(["s\u00e9", " S\u00c9"]) + str(n) for n in np.minimum(random.geometric(0.12, rows), 30)
            ],
            "tags": tags,
            "last": [f"t{n}" for n in random.integers(0, 15, rows)],
            "price": np.where(random.random(rows) < 0.1, "", price),
            "count": random.integers(0, 1000, rows).astype(str),
            "weight": np.round(random.random(rows), 3).astype(str),
        },
        schema_overrides={"tags": pl.String},
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory of text and Parquet files."""
    directory = tmp_path_factory.mktemp("logs")
    for index, rows in enumerate(ROWS):
        frame = random_log(rows, seed=index)
        if index % 2:
            frame.write_csv(directory / f"log-{index}.csv")
        else:
            whole_numbers = pl.col("count", "click").cast(pl.Int64)
            frame.with_columns(whole_numbers).write_parquet(directory / f"log-{index}.parquet", row_group_size=40)
    return str(directory)


def schema_file(directory: Path, **changes: Any) -> str:
    path = directory / "clicks.toml"
    path.write_bytes(tomli_w.dumps(SCHEMA | changes).encode())
    return str(path)


def prepared(log: str, output: Path, schema: str, engine: str) -> dict[str, bytes]:
    """Return the files of the dataset but the one that says how long it took."""
    prepare("clicks", output, input=log, schema=schema, engine=engine)  # type: ignore[arg-type]
    assert not list(output.parent.glob(".*.unfinished"))
    return {file.name: file.read_bytes() for file in output.iterdir() if file.name != PREPARATION_FILE}


def assert_same(log: str, directory: Path, schema: str) -> dict[str, bytes]:
    expected = prepared(log, directory / "polars", schema, "polars")
    ours = prepared(log, directory / "spark", schema, "spark")
    assert sorted(ours) == sorted(expected)
    assert [name for name in expected if ours[name] != expected[name]] == []
    return expected


def test_every_kind_of_feature_has_the_bytes_of_one_machine(log: str, tmp_path: Path) -> None:
    files = assert_same(log, tmp_path, schema_file(tmp_path, split=SPLITS["time"]))
    assert {"train_sparse_multi_hot.npz", "val_keep.parquet", "test_weights.npy", "recipe.json"} <= set(files)
    assert pl.read_parquet(tmp_path / "spark" / "vocabulary_few sites.parquet").height == 9
    assert json.loads(files["dataset.json"])["splits"]["train"][0]["stop"] > 100


@pytest.mark.parametrize("split", [name for name in SPLITS if name != "time"])
def test_each_kind_of_split_has_the_bytes_of_one_machine(split: str, log: str, tmp_path: Path) -> None:
    features = [FEATURES[1], {"column": "price", "type": "numeric"}]
    assert_same(log, tmp_path, schema_file(tmp_path, split=SPLITS[split], feature=features))


def with_row(log: Path, **changes: str) -> None:
    """Append another row to a text: its last one with other values, or one that has only the value of `line`."""
    last = pl.read_csv(log, infer_schema=False).tail(1)
    row = last.with_columns(pl.lit(value).alias(column) for column, value in changes.items())
    with log.open("a") as file:
        file.write(changes["line"] + "\n" if "line" in changes else row.write_csv(include_header=False))


@pytest.mark.parametrize(
    ("step", "changes", "fact"),
    [
        ("read", {"line": "1,2"}, "expected 10 fields, got 2"),
        ("times", {"at": "today"}, "column at: 'today' does not have the format 'iso'"),
        ("count", {"click": "maybe"}, "column click: 'maybe' is not a number"),
        ("learn", {"price": "cheap", **IN_TRAINING}, "column price: 'cheap' is not a number"),
        ("encode", {"weight": "-1", **IN_TRAINING}, "column weight: '-1' is not a weight"),
    ],
)
def test_the_first_bad_row_is_reported_as_on_one_machine(
    step: str, changes: dict[str, str], fact: str, log: str, tmp_path: Path
) -> None:
    bad = shutil.copytree(log, tmp_path / "log")
    for file in ("log-1.csv", "log-3.csv"):
        with_row(bad / file, **changes)
    schema = schema_file(tmp_path, split=SPLITS["time"])
    messages = []
    for engine in ("polars", "spark"):
        with pytest.raises(DataError) as caught:
            prepared(str(bad), tmp_path / "out", schema, engine)
        messages.append(str(caught.value))
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    assert messages[0] == messages[1]
    assert "log-1.csv: row 91" in messages[1] and fact in messages[1]
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("split", ["time", "rows"])
def test_bad_rows_are_skipped_and_the_rest_is_what_a_log_without_them_gives(
    split: str, log: str, tmp_path: Path
) -> None:
    bad, good = (shutil.copytree(log, tmp_path / name) for name in ("bad", "good"))
    changes = [{"line": "1,2"}, {"at": "today"}, {"click": "maybe"}, {"price": "cheap"}, {"weight": "-1"}]
    for index, file in enumerate(("log-1.csv", "log-3.csv")):
        for change in [*changes[index:], {"line": "1,2"}, {"at": ""}]:
            with_row(bad / file, **change)
            last = pl.read_csv(good / file, infer_schema=False).tail(1)
            for path in (bad / file, good / file):
                with path.open("a") as opened:
                    opened.write(last.write_csv(include_header=False))
    schema = schema_file(tmp_path, split=SPLITS[split])
    expected = prepared(str(good), tmp_path / "expected", schema, "polars")
    found = {}
    for engine in ("polars", "spark"):
        output = tmp_path / engine
        prepare("clicks", output, input=str(bad), schema=schema, engine=engine, on_bad_row="skip")
        found[engine] = {file.name: file.read_bytes() for file in output.iterdir() if file.name != PREPARATION_FILE}
        with pytest.raises(
            DataError, match=r"13 rows are bad, more than --max-bad-rows allows\. The first: log-1\.csv: row 91:"
        ):
            prepare(
                "clicks", tmp_path / "out", input=str(bad), schema=schema, engine=engine,
                on_bad_row="skip", max_bad_rows=12,
            )  # fmt: skip
        assert not (tmp_path / "out").exists()
    assert found["polars"] == found["spark"]
    notes = json.loads(found["polars"]["dataset.json"])["notes"]
    assert notes[0] == "13 bad rows skipped"
    assert notes[1] == "skipped: log-1.csv: row 91: expected 10 fields, got 2, the last is '2'"
    assert notes[3].startswith("skipped: log-1.csv: row 93, column at: 'today' does not have the format 'iso'")
    assert [name for name in expected if found["polars"][name] != expected[name]] == ["dataset.json"]


def test_a_log_without_clicks_is_reported_with_its_labels(log: str, tmp_path: Path) -> None:
    schema = schema_file(tmp_path, split=SPLITS["rows"], label={"column": "click", "positive": ["yes"]})
    with pytest.raises(DataError, match=r"no row is a click. Its values: .*'0' \(80 rows\)"):
        prepared(log, tmp_path / "out", schema, "spark")


def test_after_a_failure_either_engine_continues_from_what_is_finished(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import PySparkRuntimeError

    def fail(*_: object) -> None:
        raise PySparkRuntimeError("Job aborted.\nCaused by: java.io.IOException: No space left on device\n\tat x.y")

    schema = schema_file(tmp_path, split=SPLITS["time"])
    expected = prepared(log, tmp_path / "expected", schema, "polars")
    for engine in ("spark", "polars"):
        output = tmp_path / f"ends with {engine}"
        with monkeypatch.context() as broken, pytest.raises(ResourceError) as caught:
            broken.setattr(clicks_spark._Cluster, "encoded", fail)
            prepare("clicks", output, input=log, schema=schema, engine="spark")
        assert "Spark failed: java.io.IOException: No space left on device. On a cluster every" in str(caught.value)
        assert not output.exists()
        with monkeypatch.context() as done:
            for step in ("times_at", "counted", "found"):
                done.setattr(clicks_spark._Cluster, step, fail)
                done.setattr(steps._OneMachine, step, fail)
            assert prepared(log, output, schema, engine) == expected


def test_a_file_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    (tmp_path / "log.csv").touch()
    file = clicks_spark._File(0, tmp_path / "log.csv", [])

    def result(run: Any, step: str = "s", made_by: str = MADE_BY, directory: Path = tmp_path) -> tuple[str, Any]:
        return clicks_spark._task(directory, made_by, step, run, file)

    def fail(*_: object) -> None:
        raise DataError("row 3: no label")

    assert result(lambda work, file: [file.index]) == ("", [0])
    assert result(fail) == ("", [0])
    assert result(fail, "other", made_by="recmill 0")[0] == "ConfigError"
    error, message = result(fail, "other", directory=tmp_path / "gone")
    assert error == "ResourceError" and "On a cluster every executor must be able to read" in message
    file = clicks_spark._File(1, tmp_path / "log.csv", [])
    assert result(fail) == ("DataError", "row 3: no label")
    file = clicks_spark._File(2, tmp_path / "log.csv", [])
    assert result(lambda work, file: "done") == ("", None), "the file before has an error"


def test_the_samples_of_two_files_are_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "SAMPLE_ROWS", 40)
    schema = checked_schema({"label": {"column": "click"}, "feature": [{"column": "x", "type": "bucket"}]}, "schema")
    frame = pl.DataFrame({"x": np.arange(100.0)})

    def sample(start: int, stop: int) -> list[float]:
        learner = learning.Learner(schema, training_rows=100, seen=start)
        learner.see(RawRows(frame[start:stop], "log", range(stop - start)))
        return learner.found().numbers["x"].tolist()

    assert 20 < len(sample(0, 100)) < 60
    assert sample(0, 30) + sample(30, 100) == sample(0, 100)


def test_another_master_needs_the_engine(log: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--spark-master needs --engine spark"):
        prepare("clicks", tmp_path / "out", input=log, schema=schema_file(tmp_path), spark_master="local")


def test_without_pyspark_or_recmill_on_executors_the_error_says_what_to_install(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import PySparkRuntimeError

    def no_recmill(*_: object) -> None:
        raise PySparkRuntimeError("Job aborted.\nModuleNotFoundError: No module named 'recmill'")

    schema = schema_file(tmp_path)
    with monkeypatch.context() as broken, pytest.raises(ConfigError, match="Spark's executors have no Recmill"):
        broken.setattr(clicks_spark._Cluster, "_by_file", no_recmill)
        prepare("clicks", tmp_path / "out", input=log, schema=schema, engine="spark")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="pip install pyspark"):
        prepare("clicks", tmp_path / "out", input=log, schema=schema, engine="spark")


def test_without_java_the_error_says_what_to_install(log: str, tmp_path: Path, run_cli: RunCli) -> None:
    arguments = ("--input", log, "--schema", schema_file(tmp_path), "--output", tmp_path / "out", "--engine", "spark")
    done = run_cli("prepare", "clicks", *arguments, env={**os.environ, "JAVA_HOME": str(tmp_path)})
    assert done.returncode == 5
    assert "Spark does not start without Java 17 or newer." in done.stderr
    assert "Traceback" not in done.stderr
