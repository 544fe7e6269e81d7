"""What `recmill run-like` makes of TorchRec's bert4rec_main.py and of tdfo's config.toml."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recmill.commands.run_like import plan_like
from recmill.compat.program import Plan
from recmill.config import load_config
from recmill.errors import ConfigError
from recmill.training.schedule import learning_rate, run_steps

TDFO = {
    "data_dir": "/data",
    "train_data": "train_part_*.parquet",
    "eval_data": "eval_part_*.parquet",
    "n_epochs": 10,
    "learning_rate": 3e-4,
    "weight_decay": 1e-4,
    "embed_dim": 16,
    "n_heads": 2,
    "n_layers": 2,
    "max_len": 20,
    "sliding_step": 10,
    "mask_prob": 0.2,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 8,
    "model_parallel": True,
    "num_workers": 3,
    "seed": 42,
}


def trained_config(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = plan.steps[-1].arguments["config"]
    return config


def test_without_flags_bert4rec_main_trains_on_movielens_1m_with_its_own_defaults() -> None:
    plan = plan_like("bert4rec_main.py", [], procs=2)
    words = plan.steps[0].words
    filters = ["--min-rating", "0.0", "--min-user-count", "5", "--min-item-count", "0"]
    assert words[:-2] == ["recmill", "prepare", "movielens", "--input", "ml-1m", *filters]
    adam = {"name": "adam", "lr": 0.001, "weight_decay": 0.0}
    assert trained_config(plan) == {
        "model": {
            "name": "bert4rec",
            "embedding_dim": 256,
            "num_heads": 2,
            "num_layers": 2,
            "max_length": 100,
            "sliding_step": 0.1,
            "mask_prob": 0.15,
            "mask_random": 0.2,
            "mask_last_only": 0.0,
            "dupe_factor": 3,
        },
        "data": {"path": words[-1]},
        "sharding": {"mode": "auto"},
        "optim": {"dense": adam, "tables": adam},
        "train": {"num_epochs": 100, "global_batch_size": 256},
        "eval": {"global_batch_size": 256, "protocols": ["pop100"], "before_training": True},
        "checkpoint": {"every_steps": "10%"},
    }


def test_every_flag_of_bert4rec_main_reaches_its_key() -> None:
    flags = [
        "--dataset_name ml-20m --dataset_path /ml --min_user_count 3 --min_item_count 4 --min_rating 2 --max_len 16",
        "--mask_prob 0.3 --num_epochs 9 --lr 0.01 --decay_step 3 --gamma 0.5 --weight_decay 0.1 --train_batch_size 5",
        "--val_batch_size 6 --test_batch_size 7 --emb_dim 8 --nhead 4 --num_layers 1 --export_root out/b",
        "--dupe_factor 2 --mode ddp",
    ]
    plan = plan_like("bert4rec_main.py", " ".join(flags).split(), procs=3)
    prepared = plan.steps[0].arguments
    assert (prepared["input"], prepared["min_user_count"], prepared["min_item_count"]) == ("/ml", 3, 4)
    assert prepared["min_rating"] == 2.0
    config = trained_config(plan)
    assert config["model"].items() >= {"max_length": 16, "mask_prob": 0.3, "dupe_factor": 2}.items()
    assert config["model"].items() >= {"embedding_dim": 8, "num_heads": 4, "num_layers": 1}.items()
    assert config["optim"]["tables"] == {"name": "adam", "lr": 0.01, "weight_decay": 0.1}
    assert config["train"] == {"num_epochs": 9, "global_batch_size": 15}
    assert config["eval"]["global_batch_size"] == 18
    assert config["sharding"] == {"mode": "ddp"}
    assert plan.steps[-1].arguments["run"] == "out/b"


@pytest.mark.parametrize(("epochs", "decay_step", "batches"), [(9, 3, 7), (7, 3, 1001), (3, 1, 333_333), (70, 25, 13)])
def test_the_rate_changes_after_the_same_epochs(epochs: int, decay_step: int, batches: int) -> None:
    flags = f"--dataset_name random --num_epochs {epochs} --decay_step {decay_step} --gamma 0.5 --lr 1".split()
    settings = load_config(trained_config(plan_like("bert4rec_main.py", flags))).settings
    steps = run_steps(settings, batches)
    for epoch in range(epochs):
        expected = 0.5 ** (epoch // decay_step)  # torch.optim.lr_scheduler.StepLR, stepped after each epoch
        for step in (epoch * batches, (epoch + 1) * batches - 1):
            assert learning_rate(settings.optim.schedule, steps, 1.0, step) == expected


def test_random_data_is_ranked_as_there_if_there_are_items_enough() -> None:
    sizes = {"user_count": 3000, "item_count": 500_000, "size": 8_000_000}
    many = ["--dataset_name=random", *(f"--random_{name}={size}" for name, size in sizes.items())]
    plan = plan_like("bert4rec_main.py", many)
    assert plan.steps[0].words[:3] == ["recmill", "prepare", "random-histories"]
    assert plan.steps[0].arguments["random_size"] == 8_000_000
    assert trained_config(plan)["eval"]["protocols"] == ["uni10"]
    few = plan_like("bert4rec_main.py", ["--dataset_name", "random"])
    assert trained_config(few)["eval"]["protocols"] == ["full"]
    assert any("theirs ranks among 10 random negatives" in note for note in few.notes)


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_toml(**changes: Any) -> None:
    values = {key: value for key, value in {**TDFO, **changes}.items() if value is not None}
    Path("config.toml").write_text(tomli_w.dumps(values), encoding="utf-8")


@pytest.mark.usefixtures("in_directory")
def test_every_key_of_tdfo_s_file_reaches_ours() -> None:
    write_toml()
    plan = plan_like("tdfo/train.py", [], procs=2)
    adam = {"name": "adam", "lr": 3e-4, "weight_decay": 1e-4}
    assert trained_config(plan) == {
        "model": {
            "name": "bert4rec",
            "embedding_dim": 16,
            "num_heads": 2,
            "num_layers": 2,
            "max_length": 20,
            "sliding_step": 10,
            "mask_prob": 0.2,
            "mask_last_too": True,
            "mask_last_only": 0.0,
            "label_smoothing": 0.1,
        },
        "data": {"path": "/data/histories", "prefetch": 3},
        "sharding": {"mode": "auto"},
        "optim": {"dense": adam, "tables": adam},
        "train": {"num_epochs": 10, "global_batch_size": 32, "seed": 42},
        "eval": {"global_batch_size": 16, "protocols": ["pop100"], "ks": [10, 20, 50], "before_training": True},
    }
    assert any("16 * 2 * 2 rows per step; here on 16 * 2" in note for note in plan.notes)
    assert any("SGD on a CPU" in note for note in plan.notes)
    prepared = plan_like("tdfo/preprocessing.py", [])
    words = ["recmill", "prepare", "goodreads", "--input", "/data", "--output", "/data/histories"]
    assert prepared.steps[0].words == words
    assert any("sorts each history by book id" in note for note in prepared.notes)
    write_toml(model_parallel=False)
    assert trained_config(plan_like("tdfo/train.py", []))["sharding"] == {"mode": "ddp"}


@pytest.mark.usefixtures("in_directory")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 3}, "unknown key 'n_head'. Did you mean 'n_heads'?"),
        ({"n_heads": None}, "no key 'n_heads'. Add it; tdfo's own value is 2."),
        ({"n_heads": True}, "n_heads = True should be like 2"),
        ({"train_data": "mine_*.parquet"}, "not sets of files. Leave it as it was: 'train_part_*.parquet'"),
        ({"sliding_step": 21}, "model.sliding_step = 21 is larger than model.max_length = 20"),
    ],
)
def test_mistakes_in_tdfo_s_file_are_named(changes: dict[str, Any], message: str) -> None:
    write_toml(**changes)
    with pytest.raises(ConfigError) as caught:
        plan_like("tdfo/train.py", [])
    assert message in str(caught.value)


def test_tdfo_s_scripts_need_their_file_and_take_no_flags(in_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml in the current directory"):
        plan_like("tdfo/preprocessing.py", [])
    with pytest.raises(ConfigError, match="has no flags, but got '--seed'"):
        plan_like("tdfo/train.py", ["--seed", "3"])
    (in_directory / "config.toml").write_text("n_heads = ")
    with pytest.raises(ConfigError, match=r"config\.toml: Invalid value"):
        plan_like("tdfo/train.py", [])
