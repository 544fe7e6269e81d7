"""The commands in the READMEs of other systems, with files of compat/ in place of their scripts, on small data.

torchx and MPICH are those of `make launchers`; without them the tests that need them are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import REPO
from ..processes import free_port

BIN = Path(sys.executable).parent
TOOLS = Path(sys.prefix) / "launchers"
SMALL = "--num_embeddings 50 --dense_arch_layer_sizes 8,4 --embedding_dim 4 --over_arch_layer_sizes 8,1".split()  # noqa: SIM905
LOCAL_TORCHX = ["torchx", "run", "-s", "local_cwd"]


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


def test_the_slurm_command_of_the_readme_is_a_job_with_the_same_script(tmp_path: Path) -> None:
    in_place("dlrm_main.py", tmp_path)
    words = ["torchx", "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "1x8", "--script", "dlrm_main.py"]
    printed = run(tmp_path, *words)
    assert "--nproc_per_node 8" in " ".join(printed.replace("'", "").split())
    assert "dlrm_main.py" in printed
