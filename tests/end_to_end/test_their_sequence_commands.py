"""The commands in the READMEs of TorchRec's BERT4Rec and of tdfo, with files of compat/, on small data."""

import json
from pathlib import Path

import pytest

from ..conftest import REPO
from .test_their_commands import LOCAL_TORCHX, in_place, only_run, run

SCRIPT = ["dist.ddp", "-j", "1x2", "--script", "bert4rec_main.py", "--"]
SMALL = ["--emb_dim", "8", "--num_epochs", "2"]
# The reproduction command with fewer users, items and interactions
REPRODUCE = [
    *["--dataset_name", "random", "--random_user_count", "30", "--random_item_count", "500", "--random_size", "800"],
    *["--lr", "0.001", "--mask_prob", "0.2", "--train_batch_size", "8", "--val_batch_size", "8", "--max_len", "16"],
    *["--emb_dim", "16", "--num_epochs", "1", "--mode", "dmp"],
]
COMMANDS = {
    "dmp": (["--dataset_name", "random", "--mode", "dmp", *SMALL], "full", 10),
    "ddp": (["--dataset_name", "random", "--mode", "ddp", *SMALL], "full", 10),
    "reproduce": (REPRODUCE, "uni10", 30),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_bert4rec_main_trains_validates_and_tests(command: str, tmp_path: Path) -> None:
    arguments, protocol, users = COMMANDS[command]
    in_place("bert4rec_main.py", tmp_path)
    printed = run(tmp_path, *LOCAL_TORCHX, *SCRIPT, *arguments)
    assert "note: theirs is not seeded" in printed
    found = only_run(tmp_path)
    results = json.loads((found / "results.json").read_text(encoding="utf-8"))
    assert f"{protocol}/hr@10" in results["test"]
    assert results["test"]["users"] == users
    lines = (found / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert any(json.loads(line)["step"] == 0 for line in lines)  # validated before training
    assert json.loads((found / "env.json").read_text(encoding="utf-8"))["world_size"] == 2


@pytest.mark.parametrize("mode", ["dmp", "ddp"])
def test_the_slurm_commands_are_jobs_with_the_same_script(mode: str, tmp_path: Path) -> None:
    in_place("bert4rec_main.py", tmp_path)
    words = ["torchx", "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "1x8", "--script", "bert4rec_main.py", "--"]
    printed = " ".join(run(tmp_path, *words, "--dataset_name", "random", "--mode", mode).replace("'", "").split())
    assert "--nproc_per_node 8" in printed
    assert f"--mode {mode}" in printed


CONFIG = """
data_dir = "data"
train_data = "train_part_*.parquet"
eval_data = "eval_part_*.parquet"
n_epochs = 1
learning_rate = 3e-4
weight_decay = 1e-4
embed_dim = 16
n_heads = 2
n_layers = 2
max_len = 20
sliding_step = 10
mask_prob = 0.2
per_device_train_batch_size = 16
per_device_eval_batch_size = 16
model_parallel = true
num_workers = 2
seed = 42
"""


def test_tdfo_preprocesses_and_trains_on_goodreads(tmp_path: Path) -> None:
    """Each of 12 users has 25 of 150 books; one more user has too few."""
    for script in ("preprocessing.py", "train.py"):
        in_place(f"tdfo/{script}", tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    rows = [f"{user},{(user * 17 + n * 7) % 150},1,5,0" for user in range(12) for n in range(25)]
    raw = ["user_id,book_id,is_read,rating,is_reviewed", *rows, *(f"12,{book},1,5,0" for book in range(19))]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "goodreads_interactions.csv").write_text("\n".join(raw) + "\n")
    assert "note: theirs sorts each history by book id" in run(tmp_path, "python", "preprocessing.py")
    printed = run(tmp_path, *LOCAL_TORCHX, "dist.ddp", "-j", "1x2", "--script", "train.py")
    assert "theirs trains on 16 * 2 * 2 rows per step; here on 16 * 2" in printed
    results = json.loads((only_run(tmp_path) / "results.json").read_text(encoding="utf-8"))
    assert results["test"]["users"] == 12
    assert {f"pop100/{metric}@{k}" for metric in ("hr", "ndcg") for k in (10, 20, 50)} <= results["test"].keys()


def test_the_files_name_their_own_program() -> None:
    for script in ("bert4rec_main.py", "tdfo/train.py", "tdfo/preprocessing.py"):
        assert f'"run-like", "{script}"' in (REPO / "compat" / script).read_text(encoding="utf-8")
