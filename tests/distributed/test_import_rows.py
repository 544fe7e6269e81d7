"""Rows of a table, read into a Parquet file and written into a new run: the way there and back loses nothing."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import recmill
from recmill.checkpoints import incremental
from recmill.checkpoints.format import Checkpoint, step_path, verify
from recmill.commands import import_rows as command
from recmill.commands.checkpoint import inspect_checkpoint, list_checkpoints
from recmill.errors import CheckpointError, ConfigError, DataError
from recmill.tables.stores.row_file import file_system

from ..checkpoints import newest, tensors_of
from ..conftest import RunCli
from ..group import train
from .runs import losses, prepared_clicks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Config = dict[str, Any]
DIM = 4
AS_LIST = pl.List(pl.Float32)
DYNAMIC: Config = {"dynamic": {"C1": {"max_rows": 400, "min_count": 2, "expire_after_steps": 6}}}
CACHED: Config = {"store": "cached_ssd", "cache_memory_budget_mb": 4}
STORES = {"memory": DYNAMIC, "files": CACHED | DYNAMIC, "mixed": CACHED | {"stores": {"C3": "device_mem"}}}


@pytest.fixture(scope="module")
def random_clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_clicks(tmp_path_factory, [300, 40, 200], rows=600)


def config_of(data: Path, store: str, optimizer: str = "adagrad") -> Config:
    """Eight steps; every second checkpoint holds changes."""
    return {
        "data": {"path": str(data)},
        "model": {"name": "dlrm", "embedding_dim": DIM, "bottom_mlp": [DIM], "top_mlp": [4]},
        "optim": {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": optimizer, "lr": 0.3}},
        "tables": STORES[store],
        "train": {"device": "cpu", "global_batch_size": 50, "max_steps": 8, "log_every_steps": 1},
        "eval": {"global_batch_size": 200, "every_steps": 100},
        "checkpoint": {"every_steps": 2, "full_every": 2, "keep": 4},
    }


@pytest.fixture(scope="module")
def trained(random_clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each store."""
    folder = tmp_path_factory.mktemp("runs")
    if file_system(folder) == "tmpfs":
        pytest.skip(f"{folder} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")
    for store in STORES:
        train(config_of(random_clicks, store), folder / store)
    return {store: folder / store for store in STORES}


def content(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def exported(run: Path, table: str, file: Path, step: int | None = None) -> pl.DataFrame:
    recmill.export_rows(run, table, file, step=step)
    return pl.read_parquet(file)


@pytest.mark.parametrize("store", STORES)
def test_rows_that_are_written_back_give_the_same_run(
    store: str, trained: dict[str, Path], random_clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_BLOCK_BYTES", 1000)  # 25 rows
    monkeypatch.setattr(incremental, "_PIECE_BYTES", 1000)
    before = content(trained[store])
    run = trained[store]
    for number, table in enumerate(("table_C1", "table_C3", "table_C2")):
        frame = exported(run, table, tmp_path / "rows.parquet", step=4)
        frame.sample(fraction=1, shuffle=True, seed=1).write_parquet(tmp_path / "shuffled.parquet")
        new = tmp_path / f"new-{number}"
        facts = recmill.import_rows(run, table, tmp_path / "shuffled.parquet", new, step=4)
        assert (facts["rows"], facts["step"]) == (len(frame), 4)
        assert exported(new, table, tmp_path / "again.parquet").equals(frame)
        assert [c["health"] for c in list_checkpoints(new, digests=True)] == ["complete"] * 2  # with the full one
        run = new
    assert content(trained[store]) == before
    ours, theirs = tensors_of(newest(run)), tensors_of(checkpoint_at(trained[store], 4))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    train(config_of(random_clicks, store), run)
    assert losses(run) == losses(trained[store])[4:]
    ours, theirs = tensors_of(newest(run)), tensors_of(newest(trained[store]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def checkpoint_at(run: Path, step: int) -> Checkpoint:
    return verify(step_path(run / "checkpoints", step))


def test_new_rows_replace_those_of_their_ids_and_of_no_others(
    trained: dict[str, Path], random_clicks: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    rows = np.arange(100 * DIM, dtype=np.float32).reshape(100, DIM) / 100
    ids = list(range(199, 99, -1))
    file = tmp_path / "new.parquet"
    pl.DataFrame({"id": ids, "row": pl.Series(rows.tolist(), dtype=AS_LIST)}).write_parquet(file)
    new = tmp_path / "new"
    shown = run_cli("checkpoint", "write-rows", trained["mixed"], "table_C3", "--input", file, "--output", new)
    assert shown.stdout == f"{new}: step 8 of {trained['mixed']} with 100 rows of table table_C3 from {file}\n"
    before = exported(trained["mixed"], "table_C3", tmp_path / "old.parquet").to_dict(as_series=False)
    after = exported(new, "table_C3", tmp_path / "rows.parquet").to_dict(as_series=False)
    for row, values in zip(ids, rows, strict=True):
        before["row"][row], before["state"][row] = values.tolist(), [0.0] * DIM
    assert after == before
    (written,) = inspect_checkpoint(new)["written_rows"]
    assert written["file"] == str(file) and written["checkpoint"].startswith(str(trained["mixed"]))
    assert "100 rows of table table_C3 were written from" in (new / "log.txt").read_text()
    # The run was finished: it is tested again, with the new rows.
    auroc = json.loads((trained["mixed"] / "results.json").read_text())["test"]["auroc"]
    assert train(config_of(random_clicks, "mixed"), new)["test"]["auroc"] != auroc
    in_memory = config_of(random_clicks, "mixed") | {"tables": {}}
    train(in_memory, tmp_path / "more", init_from=new, overrides=["train.max_steps=1"])
    assert "starting from step 8 of another run" in (tmp_path / "more" / "log.txt").read_text()


def test_an_id_that_is_written_to_a_dynamic_table_gets_a_row(
    trained: dict[str, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    before = exported(trained["files"], "table_C1", tmp_path / "old.parquet")
    known = before["id"][0]
    rows = np.ones((2, DIM), np.float32)
    pl.DataFrame({"id": [known, 2**62 - 1], "row": rows}).write_parquet(tmp_path / "new.parquet")
    recmill.import_rows(trained["files"], "table_C1", tmp_path / "new.parquet", tmp_path / "new")
    after = {row["id"]: row for row in exported(tmp_path / "new", "table_C1", tmp_path / "r.parquet").to_dicts()}
    expected = {row["id"]: row for row in before.to_dicts()}
    expected[known] |= {"row": [1.0] * DIM, "state": [0.0] * DIM}
    expected[2**62 - 1] = expected[known] | {"id": 2**62 - 1, "count": 1, "steps_ago": 1}
    assert after == expected
    tensors = {tensor["key"]: tensor for tensor in inspect_checkpoint(tmp_path / "new")["tensors"]}
    table = tensors["model.tables.embedding_bags.table_C1.weight"]
    assert (table["size"], table["shared_rows"]) == ([len(expected), DIM], 1024)
    assert table["bytes"] == (len(expected) + 1024) * DIM * 4
    assert tensors["model.tables.embedding_bags.table_C3.weight"]["shared_rows"] == 0
    shown = run_cli("checkpoint", "inspect", tmp_path / "new").stdout
    assert re.search(rf"table_C1.weight +table_C1 +\({len(expected)} \+ 1,024\) x 4 ", shown)
    assert re.search(rf"rows of table_C1 +2 from {tmp_path}/new.parquet", shown)


GOOD: dict[str, Any] = {"id": [1, 2], "row": np.ones((2, DIM), np.float32), "state": np.ones((2, DIM), np.float32)}
NAN = np.array([[1, 1, 1, 1], [1, 1, np.nan, 1]], np.float32)


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ("table_C3", {"id": [1, 200]}, r"row 1: id 200 is not in 0..199"),
        ("table_C3", {"id": [-1, 2]}, r"row 0: id -1 is not in 0..199"),
        ("table_C3", {"id": [1, None]}, r"row 1: id None is not in"),
        ("table_C3", {"id": pl.Series([2**64 - 1, 2], dtype=pl.UInt64)}, r"row 0: id 18446744073709551615 is not in"),
        ("table_C1", {"id": [1, 2**62]}, r"row 1: id 4611686018427387904 is not in 0..4611686018427387903"),
        ("table_C3", {"id": [5, 5]}, r"id 5 occurs more than once"),
        ("table_C3", {"id": [1.0, 2.0]}, r"column 'id' is Float64, expected Int64"),
        (
            "table_C3",
            {"row": np.ones((2, 5), np.float32)},
            r"'row' is Array\(Float32.*expected .* of 4 values of Float32",
        ),
        ("table_C3", {"row": np.ones((2, DIM))}, r"'row' is Array\(Float64"),
        ("table_C3", {"row": [1.0, 2.0]}, r"column 'row' is Float64"),
        ("table_C3", {"row": NAN}, r"row 1: row has a value that is not a finite number"),
        ("table_C3", {"state": NAN * np.inf}, r"row 0: state has a value that is not a finite number"),
        ("table_C3", {"row": pl.Series([[1.0] * 4, [1.0, None, 1, 1]], dtype=AS_LIST)}, r"row 1: row has a value"),
        ("table_C3", {"row": pl.Series([[1.0] * 4, [1.0] * 3], dtype=AS_LIST)}, r"row 1: row does not have 4 values"),
        ("table_C3", {"row": pl.Series([None, [1.0] * 4], dtype=AS_LIST)}, r"row 0: row does not have 4 values"),
        ("table_C3", {"row": None}, r"no column 'row'; it has id, state"),
        ("table_C3", {"id": None}, r"no column 'id'"),
        ("table_C3", {"states": [1, 2]}, r"column 'states' is unknown; table table_C3 has id, row, state\."),
        ("table_C3", {"count": [1, 2]}, r"column 'count' is unknown"),
        ("table_C1", {"count": [1, 0]}, r"row 1: count 0 is not in 1..4294967295"),
        ("table_C1", {"steps_ago": [9, 1]}, r"row 0: steps_ago 9 is not in 1..8"),
        (
            "table_C3",
            {"id": pl.Series([], dtype=pl.Int64), "row": np.ones((0, DIM), np.float32), "state": None},
            r"no rows",
        ),
    ],
)
def test_a_file_with_a_mistake_is_one_error_and_nothing_is_written(
    table: str, columns: dict[str, Any], message: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    values = {name: value for name, value in (GOOD | columns).items() if value is not None}
    pl.DataFrame(values).write_parquet(tmp_path / "rows.parquet")
    refuse(DataError, message, trained["memory"], table, tmp_path / "rows.parquet")


def refuse(kind: type[Exception], message: str, run: Path, table: str, file: Path, output: str = "new") -> None:
    before = sorted(file.parent.rglob("*"))
    with pytest.raises(kind, match=message) as caught:
        recmill.import_rows(run, table, file, file.parent / output)
    assert type(caught.value) is kind
    assert sorted(file.parent.rglob("*")) == before


def test_a_wrong_table_file_or_output_is_refused(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.parquet"
    pl.DataFrame(GOOD).write_parquet(file)
    run = trained["memory"]
    refuse(CheckpointError, r"no table 'C3'\. It has table_C1, table_C2, table_C3", run, "C3", file)
    refuse(ConfigError, r"rows.parquet exists already", run, "table_C3", file, "rows.parquet")
    (tmp_path / "text").write_text("id,row")
    refuse(DataError, r"text: not a Parquet file that can be read", run, "table_C3", tmp_path / "text")
    monkeypatch.setenv("RECMILL_FAIL", "ckpt.rows:nospace")
    refuse(OSError, r"No space left on device", run, "table_C3", file)


def test_tables_of_adam_in_every_process_are_written_back_too(random_clicks: Path, tmp_path: Path) -> None:
    config = config_of(random_clicks, "memory", "adam") | {"tables": {}, "sharding": {"default": "data_parallel"}}
    train(config, tmp_path / "run", overrides=["train.max_steps=2"])
    frame = exported(tmp_path / "run", "table_C3", tmp_path / "rows.parquet")
    assert frame["state"].dtype == pl.Array(pl.Float32, 2 * DIM)
    recmill.import_rows(tmp_path / "run", "table_C3", tmp_path / "rows.parquet", tmp_path / "new")
    for run in ("new", "run"):
        train(config, tmp_path / run, overrides=["train.max_steps=4"], procs=2)
    assert losses(tmp_path / "new") == losses(tmp_path / "run")[2:]
