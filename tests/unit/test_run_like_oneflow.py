"""What `recmill run-like` makes of the command lines of OneFlow's DLRM, and its launcher in compat/."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import recmill
from recmill.commands import assemble
from recmill.commands.run_like import plan_like
from recmill.config import load_config
from recmill.errors import ConfigError, DataError

from ..conftest import REPO
from ..criteo_raw import write_days
from .test_run_like import trained_config

REQUIRED = ["--data_dir", "/parquet", "--persistent_path", "/ssd"]
# Of the README; the last ones of the built-in array are the same
README_SIZES = (
    "39884407,39043,17289,7420,20263,3,7120,1543,63,38532952,2953546,403346,10,2208,11938,155,4,976,14,39979772"
)
README_SIZES += ",25641295,39664985,585935,12972,108,36"


def dlrm(*arguments: str, procs: int = 1) -> dict[str, Any]:
    return trained_config(plan_like("dlrm_train_eval.py", [*REQUIRED, *arguments], procs=procs))


def problem(*arguments: str, program: str = "dlrm_train_eval.py") -> str:
    with pytest.raises(ConfigError) as caught:
        plan_like(program, arguments)
    return str(caught.value)


def test_without_other_flags_dlrm_train_eval_has_its_own_defaults() -> None:
    """The number of processes changes no batch: theirs are global."""
    config = dlrm(procs=8)
    dynamic = config["tables"].pop("dynamic")
    assert list(dynamic) == [f"C{n}" for n in range(1, 27)]
    assert (dynamic["C1"], dynamic["C26"]) == (
        {"max_rows": 39884406, "init_rows": 39884406},
        {"max_rows": 36, "init_rows": 36},
    )
    assert config == {
        "data": {"path": "/parquet", "order": "file", "limit_val_batches": 1612, "limit_test_batches": 1612},
        "tables": {"store": "cached_host_mem", "cache_memory_budget_mb": 8192},
        "model": {
            "name": "dlrm",
            "embedding_dim": 128,
            "bottom_mlp": [512, 256, 128],
            "top_mlp": [1024, 1024, 512, 256],
            "init": "dlrm",
            "interaction_itself": False,
            "pad_to_multiple_of": 8,
        },
        "train": {
            "global_batch_size": 55296,
            "max_steps": 75000,
            "num_epochs": 75000,
            "log_every_steps": 1000,
            "device": "cpu",
        },
        "optim": {
            "dense": {"name": "sgd", "lr": 24.0},
            "tables": {"name": "sgd", "lr": 24.0},
            "schedule": {"name": "oneflow", "warmup_steps": 2750, "decay_start_step": 49315, "decay_steps": 27772},
        },
        "eval": {"every_steps": 10000, "global_batch_size": 55296},
        "checkpoint": {"every_steps": 10000, "each_eval": False, "at_start": False},
    }


def test_every_flag_of_dlrm_train_eval_reaches_its_key() -> None:
    flags = [
        f"--table_size_array {README_SIZES} --store_type cached_ssd --cache_memory_budget_mb 64 --embedding_vec_size 8",
        "--one_embedding_key_type int32 --bottom_mlp 16,8 --top_mlp 4 --disable_fusedmlp --disable_interaction_padding",
        "--disable_dense_input_padding --interaction_itself --train_batch_size 10 --train_batches 40 --learning_rate 2",
        "--warmup_batches 3 --decay_start 9 --decay_batches 0 --loss_print_interval 5 --eval_interval 20",
        "--eval_batches 6 --eval_batch_size 7 --model_load_dir runs/first --model_save_dir out/second",
        "--save_model_after_each_eval --save_initial_model --amp --loss_scale_policy dynamic",
    ]
    plan = plan_like("dlrm_train_eval.py", [*REQUIRED, *" ".join(flags).split()])
    assert plan.steps[-1].words == [
        *["recmill", "train", "second.toml", "--run", "out/second", "--init-from", "runs/first", "--allow-partial"],
        *["--procs", "1"],
    ]
    config = trained_config(plan)
    dynamic = config["tables"].pop("dynamic")
    assert [rules["max_rows"] for rules in dynamic.values()] == [int(size) for size in README_SIZES.split(",")]
    assert config["tables"] == {"store": "cached_ssd", "cache_memory_budget_mb": 64, "path": "/ssd"}
    assert config["model"].items() >= {"embedding_dim": 8, "bottom_mlp": [16, 8], "top_mlp": [4]}.items()
    assert config["model"].items() >= {"interaction_itself": True, "pad_to_multiple_of": 1}.items()
    assert config["train"].items() >= {"global_batch_size": 10, "max_steps": 40, "log_every_steps": 5}.items()
    assert config["train"].items() >= {"precision": "float16", "loss_scale": 0.0}.items()
    assert config["optim"]["schedule"] == {"name": "oneflow", "warmup_steps": 3, "decay_steps": 0}
    assert config["eval"] == {"every_steps": 20, "global_batch_size": 7}
    assert config["data"].items() >= {"limit_val_batches": 6, "limit_test_batches": 6}.items()
    assert config["checkpoint"] == {"every_steps": 20, "each_eval": True, "at_start": True, "keep": 4}
    assert dlrm("--amp")["train"]["loss_scale"] == 1024.0
    assert dlrm("--store_type", "device_mem")["tables"].keys() == {"store", "dynamic"}


def test_mistakes_are_named() -> None:
    assert "required: --data_dir, --persistent_path" in problem()
    assert "--table_size_array has 2 sizes. Give 26" in problem(*REQUIRED, "--table_size_array", "3,4")
    assert "choose from" in problem(*REQUIRED, "--store_type", "tape")
    assert "model.bottom_mlp ends with 128" in problem(*REQUIRED, "--embedding_vec_size", "64")
    words = ["--input_dir", "a", "--output_dir", "b", "--num_test_examples", "5"]
    assert "--num_test_examples is not offered: the first half of the last day" in problem(
        *words, program="criteo1t_parquet.py"
    )


def test_files_of_their_own_tool_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="has a directory 'train', as OneFlow's own tool writes it"):
        plan_like("dlrm_train_eval.py", ["--data_dir", str(tmp_path), "--persistent_path", "p"])


def test_the_flags_of_criteo1t_parquet_are_options_of_prepare() -> None:
    required = ["--input_dir=/raw", "--output_dir=/parquet"]
    start = ["recmill", "prepare", "criteo", "--input", "/raw", "--output", "/parquet", "--compat", "oneflow"]
    plan = plan_like("criteo1t_parquet.py", [*required, "--spark_tmp_dir=/tmp", "--export_dataset_info"])
    assert plan.steps[0].words == [*start, "--ids", "mod", "--table-size", "40000000"]
    other = plan_like("criteo1t_parquet.py", [*required, "--mod_idx=0", "--spark_driver_memory_gb=16"])
    assert other.steps[0].words == [*start, "--memory-budget", "16GB", "--ids", "hash64"]


def test_rows_start_as_in_tables_of_the_given_sizes(tmp_path: Path) -> None:
    """Theirs are uniform in +-sqrt(1 / size), whatever the range of the ids."""
    write_days(tmp_path / "raw", [40, 30], smallest=-1)
    recmill.prepare("criteo", tmp_path / "d", input=str(tmp_path / "raw"), compat="oneflow")
    arguments = ["--data_dir", str(tmp_path / "d"), "--persistent_path", "p", "--table_size_array", README_SIZES]
    config = load_config(trained_config(plan_like("dlrm_train_eval.py", arguments)))
    specs = assemble.table_specs(config, assemble.open_matching_dataset(config))
    assert [spec.rows for spec in specs] == [int(size) for size in README_SIZES.split(",")]
    assert [spec.init_bound for spec in specs] == pytest.approx([int(s) ** -0.5 for s in README_SIZES.split(",")])


def test_the_launcher_passes_all_its_flags_to_torchrun(tmp_path: Path) -> None:
    """In place of torch's module, one that prints its arguments."""
    fake = tmp_path / "torch" / "distributed"
    fake.mkdir(parents=True)
    for package in (fake, fake.parent):
        (package / "__init__.py").touch()
    (fake / "run.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO / 'compat'}"}

    def started(*words: str) -> list[str]:
        command = [sys.executable, "-m", "oneflow.distributed.launch", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        found: list[str] = json.loads(done.stdout)
        return found

    one = started("--nproc_per_node", "8", "--nnodes", "1", "--node_rank", "0", "train.py", "--nnodes", "of the script")
    assert one == ["--nproc_per_node=8", "--standalone", "train.py", "--nnodes", "of the script"]
    address = ["--master_addr", "a", "--master_port", "7"]
    logs = ["--logdir", "logs", "--redirect_stdout_and_stderr"]
    two = started("--nnodes", "2", "--node_rank", "1", *address, *logs, "-m", "package.module")
    meeting = ["--nnodes=2", "--node_rank=1", "--master_addr=a", "--master_port=7"]
    assert two == ["--nproc_per_node=1", *meeting, "--module", "--log_dir=logs", "--redirects=3", "package.module"]
