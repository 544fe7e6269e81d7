"""The commands in the README of OneFlow's DLRM, with files of compat/, on small data."""

import json
import shutil
from pathlib import Path

import polars as pl

from ..conftest import REPO
from ..criteo_raw import write_days
from .test_their_commands import only_run, run

LAUNCH = ["python3", "-m", "oneflow.distributed.launch"]
PROCESSES = ["--nproc_per_node", "2", "--nnodes", "1", "--node_rank", "0", "--master_addr", "127.0.0.1"]
SMALL = [
    *["--embedding_vec_size", "8", "--bottom_mlp", "16,8", "--top_mlp", "16", "--train_batch_size", "100"],
    *["--train_batches", "12", "--warmup_batches", "2", "--decay_start", "6", "--decay_batches", "20"],
    *["--learning_rate", "0.5", "--eval_interval", "6", "--eval_batch_size", "64", "--loss_print_interval", "4"],
    *["--cache_memory_budget_mb", "64"],
]


def test_the_commands_of_the_readme_prepare_and_train(tmp_path: Path) -> None:
    """Twelve batches are two epochs; ids are modulo 40 million, and only those that occur have rows."""
    for script in ("dlrm_train_eval.py", "tools"):
        source = REPO / "compat" / script
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / script)
    write_days(tmp_path / "raw", [300, 257, 201], smallest=-1)
    (tmp_path / "ssd").mkdir()
    words = ["--input_dir=raw", "--output_dir=dlrm_parquet", "--spark_tmp_dir=spark_tmp", "--export_dataset_info"]
    run(tmp_path, "python", "tools/criteo1t_parquet.py", *words)
    (test,) = (tmp_path / "dlrm_parquet").glob("test-*.parquet")
    columns = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    assert pl.read_parquet(test).select(columns).height == 101  # the first half of the last day
    paths = ["--data_dir", "dlrm_parquet", "--persistent_path", "ssd", "--table_size_array", ",".join(["200"] * 26)]
    train = [*LAUNCH, *PROCESSES, "dlrm_train_eval.py", *paths, *SMALL]
    printed = run(tmp_path, *train, PYTHONPATH=str(REPO / "compat"))
    assert "note: theirs measures AUC on the test rows" in printed
    found = only_run(tmp_path)
    results = json.loads((found / "results.json").read_text(encoding="utf-8"))
    assert (results["test"]["rows"], results["val"]["rows"], results["test"]["step"]) == (101, 100, 12)
    lines = [json.loads(line) for line in (found / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line.get("split") == "val"] == [6, 12]
    ids = pl.concat([pl.read_parquet(file) for file in (tmp_path / "dlrm_parquet").glob("train-*.parquet")])
    known = sum(ids[f"C{n}"].n_unique() for n in range(1, 27))
    assert [line["dynamic_rows"] for line in lines if "dynamic_rows" in line][-1] == known
    assert json.loads((found / "env.json").read_text(encoding="utf-8"))["world_size"] == 2
