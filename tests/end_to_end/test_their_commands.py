"""The commands in the READMEs of other systems, with files of compat/ in place of their scripts, on small data.

torchx and MPICH are those of `make launchers`; without them the tests that need them are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recmill.data.opening import open_dataset

from ..conftest import REPO
from ..criteo_raw import stored, write_days
from ..processes import free_port

BIN = Path(sys.executable).parent
TOOLS = Path(sys.prefix) / "launchers"
SMALL = "--num_embeddings 50 --dense_arch_layer_sizes 8,4 --embedding_dim 4 --over_arch_layer_sizes 8,1".split()  # noqa: SIM905
LOCAL_TORCHX = ["torchx", "run", "-s", "local_cwd", "-cfg", "log_dir=logs"]


def in_place(script: str, directory: Path) -> None:
    """Put the file of compat/ where the original script would be."""
    target = directory / Path(script).name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPO / "compat" / script, target)


def run(directory: Path, *words: str, **variables: str) -> str:
    """Run a command with our Python first on the path, and return what it prints."""
    if not (TOOLS / "torchx").is_dir() and words[0] == "torchx":
        pytest.skip("no torchx: see `make launchers`")
    path = f"{BIN}:{TOOLS / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    if words[0] == "torchx":
        environment["PYTHONPATH"] = str(TOOLS)
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def only_run(directory: Path) -> Path:
    (found,) = directory.glob("runs/*/results.json")
    return found.parent


def torchrun() -> list[str]:
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_port()}", "--rdzv_id", "54321"]
    return ["torchrun", "--nnodes", "1", "--nproc_per_node", "2", *meeting, "--role", "trainer", "dlrm_main.py"]


COMMANDS = {
    "torchrun": torchrun,
    "torchx": lambda: [*LOCAL_TORCHX, "dist.ddp", "-j", "1x2", "--script", "dlrm_main.py", "--"],
    "aws_component": lambda: [*LOCAL_TORCHX, "aws_component.py:run_dlrm_main", "--num_trainers=2", "--"],
}


@pytest.mark.parametrize("launcher", COMMANDS)
def test_dlrm_main_trains_under_the_launchers_of_its_readme(launcher: str, tmp_path: Path) -> None:
    in_place("dlrm_main.py", tmp_path)
    in_place("aws_component.py", tmp_path)
    run(tmp_path, *COMMANDS[launcher](), *SMALL, "--seed", "3")
    found = only_run(tmp_path)
    facts = json.loads((found / "env.json").read_text(encoding="utf-8"))
    assert (facts["launcher"], facts["world_size"]) == ("torchrun", 2)
    status = json.loads((found / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("done", 10)
    results = json.loads((found / "results.json").read_text(encoding="utf-8"))
    assert results["test"]["rows"] == 10 * 2 * 32


def test_if_the_data_cannot_be_used_all_processes_say_so_and_end(tmp_path: Path) -> None:
    """mpiexec of MPICH does not end the other processes."""
    words = [str(BIN / "recmill"), "run-like", "dlrm_main.py", "--", "--in_memory_binary_criteo_path", "nowhere"]
    processes = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        environment = {**os.environ, **place}
        processes.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    for process in processes:
        assert "nowhere: no such directory" in process.communicate(timeout=120)[1]
        assert process.returncode == 3


def test_the_slurm_commands_of_the_readme_are_jobs_with_the_same_script(tmp_path: Path) -> None:
    in_place("dlrm_main.py", tmp_path)
    in_place("aws_component.py", tmp_path)
    words = ["torchx", "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "1x8", "--script", "dlrm_main.py"]
    printed = run(tmp_path, *words)
    assert "--nproc_per_node 8" in " ".join(printed.replace("'", "").split())
    assert "dlrm_main.py" in printed
    words = ["torchx", "run", "--dryrun", "--scheduler", "slurm", "--scheduler_args", "partition=train,time=5:00:00"]
    words += ["aws_component.py:run_dlrm_main", "--num_trainers=8", "--", "--pin_memory", "--batch_size", "8192"]
    printed = run(tmp_path, *words)
    assert all(word in printed for word in ("--partition=train", "--time=5:00:00", "--batch_size", "8192"))


SIZES = ",".join(map(str, range(3, 29)))
SMALL_LAYERS = SMALL[2:]


def test_polaris_scripts_split_preprocess_and_train_with_mpiexec(tmp_path: Path) -> None:
    if not (TOOLS / "bin" / "mpiexec").exists():
        pytest.skip("no MPICH: see `make launchers`")
    for script in ("1_split_dataset.sh", "2_preprocess_dataset.sh", "3_train.sh"):
        in_place(f"polaris/{script}", tmp_path)
    data = tmp_path / "data"
    write_days(data, [24 * 20 + 7])
    run(tmp_path, "./1_split_dataset.sh", str(data), str(data / "criteo1tb_split"), "20")
    assert len([*(data / "criteo1tb_split").iterdir()]) == 24
    project = {"DATASET_DIR": str(data), "WORKDIR": str(tmp_path / "project")}
    printed = run(tmp_path, "./2_preprocess_dataset.sh", **project)
    assert "here all ids stay exact" in printed
    nodes = tmp_path / "nodes"
    nodes.write_text("127.0.0.1\n127.0.0.1\n", encoding="utf-8")
    job = {"PBS_JOBID": "77.polaris", "PBS_NODEFILE": str(nodes), "PPN": "2", "MPIEXEC_OPTIONS": ""}
    settings = {"BATCH_SIZE": "30", "EPOCHS": "2", "EMBEDDING_DIM": "4", "MASTER_PORT": str(free_port())}
    final = {**project, "DATASET_DIR": str(data / "criteo1tb_final"), "DFTRACER_ENABLE": "0"}
    layers = ["--dense_arch_layer_sizes", "8,4", "--over_arch_layer_sizes", "8,1"]
    run(tmp_path, "./3_train.sh", *layers, "--num_embeddings_per_feature", SIZES, **final, **job, **settings)
    found = tmp_path / "project" / "dlrm" / "results" / "77"
    status = json.loads((found / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("done", 2 * 8)  # 23 * 20 rows: 7 batches of 60, and a rest of 40
    facts = json.loads((found / "env.json").read_text(encoding="utf-8"))
    assert (facts["launcher"], facts["world_size"], facts["job_id"]) == ("MPICH", 2, "77.polaris")
    assert (found / "trace.json.gz").is_file()
    splits = json.loads((found / "results.json").read_text(encoding="utf-8"))
    assert (splits["val"]["rows"], splits["test"]["rows"]) == (10, 10)


def test_torchrec_s_data_scripts_and_the_multi_hot_training_of_mlperf(tmp_path: Path) -> None:
    scripts = ["npy_preproc_criteo", "contiguous_preproc_criteo", "shuffle_preproc_criteo"]
    for script in (*scripts, "materialize_synthetic_multihot_dataset", "mlcommons/dlrm_main"):
        in_place(f"{script}.py", tmp_path)
    in_place("process_Criteo_1TB_Click_Logs_dataset.sh", tmp_path)
    write_days(tmp_path / "raw", [60, 50, 41])
    python = [sys.executable]
    step = {name: str(tmp_path / name) for name in ("raw", "npy", "ids", "shuffled", "multi_hot", "at_once")}
    run(tmp_path, *python, f"{scripts[0]}.py", "--input_dir", step["raw"], "--output_dir", step["npy"])
    run(tmp_path, *python, f"{scripts[1]}.py", "--input_dir", step["npy"], "--output_dir", step["ids"])
    sources = ["--input_dir_labels_and_dense", step["npy"], "--input_dir_sparse", step["ids"]]
    run(tmp_path, *python, f"{scripts[2]}.py", *sources, "--output_dir_shuffled", step["shuffled"])
    run(tmp_path, "./process_Criteo_1TB_Click_Logs_dataset.sh", step["raw"], step["npy"], step["at_once"])
    for day in range(3):
        for part in ("dense", "sparse", "labels"):
            found, expected = (stored(Path(step[name]), f"day_{day}_{part}") for name in ("shuffled", "at_once"))
            np.testing.assert_array_equal(found, expected)
    words = ["--in_memory_binary_criteo_path", step["shuffled"], "--output_path", step["multi_hot"]]
    words += ["--num_embeddings_per_feature", SIZES, "--multi_hot_sizes", ",".join("2" * 26)]
    run(tmp_path, *python, "materialize_synthetic_multihot_dataset.py", *words, "--copy_labels_and_dense")
    assert open_dataset(Path(step["multi_hot"]), verify="digests").clicks.multi_hot == [2] * 26
    flags = ["--synthetic_multi_hot_criteo_path", step["multi_hot"], "--num_embeddings_per_feature", SIZES]
    flags += ["--interaction_type", "dcn", "--dcn_num_layers", "2", "--dcn_low_rank_dim", "4", "--adagrad"]
    flags += ["--learning_rate", "0.005", "--validation_auroc", "0.99", "--validation_freq_within_epoch", "2"]
    run(tmp_path, *python, "dlrm_main.py", *SMALL_LAYERS, *flags)
    assert (only_run(tmp_path) / "mlperf.log").is_file()
