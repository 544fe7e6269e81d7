"""Metrics for other tools. What Weights & Biases and MLflow store is read back from their own files."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recmill.commands.export_metrics import Target, export_metrics
from recmill.errors import CheckpointError, ConfigError, ResourceError

from ..conftest import RunCli

TRACKERS = Path(sys.executable).parents[1] / "trackers"
needs_trackers = pytest.mark.skipif(
    not TRACKERS.is_dir(), reason="Weights & Biases and MLflow are not installed. To run this test: make trackers"
)
LINES = [
    {"step": 1, "epoch": 0, "split": "train", "loss": 0.75, "time": 1e9},
    {"step": 2, "epoch": 0, "split": "train", "loss": 0.5, "time": 1e9 + 1},
    {"step": 2, "epoch": 1, "split": "val", "headline": "full/ndcg@10", "full/ndcg@10": 0.25, "time": 1e9 + 2},
    {"step": 1, "epoch": 0, "split": "test", "full/ndcg@10": 0.125, "mrr": None, "time": 1e9 + 3},
]
# Records as in a log of LevelDB: each after its checksum, length and kind. A short file has one block.
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
data = Path(sys.argv[1]).read_bytes()
assert data[:4] == b":W&B" and len(data) < 32768
at, found = 7, {"history": [], "config": {}, "summary": {}}
def values(items):
    return {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
while at + 7 <= len(data):
    length, kind = struct.unpack_from("<HB", data, at + 4)
    assert kind == 1
    record = Record.FromString(data[at + 7 : at + 7 + length])
    at += 7 + length
    if record.HasField("history"):
        found["history"].append(values(record.history.item))
    found["config"] |= values(record.run.config.update)
    found["summary"] |= values(record.summary.update)
print(json.dumps(found))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text('[model]\nname = "sasrec"\n[optim.dense]\nlr = 0.5\n')
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES) + '{"step": 3, "spl')
    return path


def test_a_csv_file_has_the_columns_of_history(run: Path, tmp_path: Path) -> None:
    path = export_metrics(run, to="csv")
    assert path == run / "metrics.csv"
    assert path.read_text().splitlines() == [
        "step,epoch,split,time,loss,full/ndcg@10,mrr",
        "1,0,train,1000000000.0,0.75,,",
        "2,0,train,1000000001.0,0.5,,",
        "2,1,val,1000000002.0,,0.25,",
        "1,0,test,1000000003.0,,0.125,",
    ]
    assert export_metrics(run, to="csv", output=tmp_path / "mine.csv").read_text() == path.read_text()


def test_an_old_run_can_be_shown_in_tensorboard(run: Path, tmp_path: Path) -> None:
    shown = EventAccumulator(str(export_metrics(run, to="tensorboard", output=tmp_path / "board"))).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("val/full/ndcg@10")] == [(2, 0.25)]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named_and_nothing_is_written(
    package: Target, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    before = sorted(run.iterdir())
    with pytest.raises(ResourceError, match=rf"needs {package}\. Install it: pip install 'recmill\[{package}\]'\."):
        export_metrics(run, to=package)
    assert sorted(run.iterdir()) == before


def test_a_run_that_writes_for_tensorboard_itself_keeps_its_file(run: Path, tmp_path: Path) -> None:
    (run / "config.toml").write_text("[observe]\ntensorboard = true\n")
    with pytest.raises(ConfigError, match=r"the run writes it itself \(observe.tensorboard\)"):
        export_metrics(run, to="tensorboard")
    assert list(export_metrics(run, to="tensorboard", output=tmp_path / "logs" / "a").iterdir())


def test_a_directory_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no metrics yet"):
        export_metrics(tmp_path, to="csv")


@needs_trackers
def test_weights_and_biases_gets_an_offline_run_with_config_curves_and_test_metrics(run: Path, run_cli: RunCli) -> None:
    environment = os.environ | {"PYTHONPATH": str(TRACKERS)}
    done = run_cli("export-metrics", run, "--to", "wandb", env=environment)
    assert done.returncode == 0, done.stderr
    (file,) = Path(done.stdout.strip()).glob("*.wandb")
    assert file.is_relative_to(run / "wandb")
    command = [sys.executable, "-c", READ_WANDB, str(file)]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    history = [
        {key: value for key, value in line.items() if key[0] != "_" or key == "_step"} for line in found["history"]
    ]
    assert history == [{"train/loss": 0.75, "_step": 1}, {"train/loss": 0.5, "val/full/ndcg@10": 0.25, "_step": 2}]
    assert found["summary"]["test/full/ndcg@10"] == 0.125
    assert (found["config"]["model.name"], found["config"]["optim.dense.lr"]) == ("sasrec", 0.5)


@needs_trackers
def test_mlflow_gets_a_run_that_a_second_export_replaces(run: Path, run_cli: RunCli) -> None:
    environment = os.environ | {"PYTHONPATH": str(TRACKERS)}
    for _ in range(2):
        done = run_cli("export-metrics", run, "--to", "mlflow", env=environment)
        assert done.returncode == 0, done.stderr
    with sqlite3.connect(run / "mlflow.db") as database:
        ((identity, name, status),) = database.execute(
            "SELECT run_uuid, name, status FROM runs WHERE lifecycle_stage = 'active'"
        ).fetchall()
        metrics = database.execute("SELECT key, step, value, timestamp FROM metrics WHERE run_uuid = ?", [identity])
        assert sorted(metrics.fetchall()) == [
            ("test/full/ndcg_at_10", 1, 0.125, 10**12 + 3000),
            ("train/loss", 1, 0.75, 10**12),
            ("train/loss", 2, 0.5, 10**12 + 1000),
            ("val/full/ndcg_at_10", 2, 0.25, 10**12 + 2000),
        ]
        params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", [identity]).fetchall()
    assert sorted(params) == [("model.name", "sasrec"), ("optim.dense.lr", "0.5")]
    assert (name, status) == ("run", "FINISHED")
