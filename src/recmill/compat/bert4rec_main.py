"""`bert4rec_main.py`: TorchRec's BERT4Rec example, on MovieLens or random data."""

from dataclasses import replace
from typing import Any

from recmill.compat.program import BOTH_DECAYS, BOTH_RATES, Flag, Given, Plan, Program, Step, put

_SAVE_EPOCHS = 10
_PER_PROCESS = "theirs times the number of processes"

FLAGS = (
    Flag("--min_user_count", int, 5, ours="`recmill prepare movielens --min-user-count`"),
    Flag("--min_item_count", int, 0, ours="`recmill prepare movielens --min-item-count`",
         note="5 by default here; items before users, once, in both"),
    Flag("--max_len", int, 100, "model.max_length", "windows as there: `model.sliding_step = 0.1`. The starts are the "
         "same; the oldest window takes what is left instead of overlapping the next one"),
    Flag("--mask_prob", float, 0.15, "model.mask_prob", "its 80/20 rule: `model.mask_random = 0.2`. No windows with "
         "only the last item masked: `model.mask_last_only = 0.0`"),
    Flag("--dataset_name", str, "ml-1m", ours="`data.path`", choices=("ml-1m", "ml-20m", "random"),
         note="any prepared dataset; `random`: `recmill prepare random-histories`, which has the same filters"),
    Flag("--min_rating", int, 0, ours="`recmill prepare movielens --min-rating`", note="no effect on random data"),
    Flag("--num_epochs", int, 100, "train.num_epochs"),
    Flag("--lr", float, 0.001, BOTH_RATES, 'one rate for both there; `optim.tables.name = "adam"`'),
    Flag("--decay_step", int, 25, ours="`optim.schedule.step_size`",
         note='as a share of the run like "25%": theirs is in epochs; with `optim.schedule.name = "step"`'),
    Flag("--gamma", float, 1.0, ours="`optim.schedule.gamma`", note="1.0 there, which means off"),
    Flag("--weight_decay", float, 0.0, BOTH_DECAYS, "of the tables, only rows that a batch looks up"),
    Flag("--train_batch_size", int, 128, "train.global_batch_size", _PER_PROCESS, is_per_process=True),
    Flag("--val_batch_size", int, 128, "eval.global_batch_size", _PER_PROCESS, is_per_process=True),
    Flag("--test_batch_size", int, 128, ours="`eval.global_batch_size`",
         note="that of `--val_batch_size` serves for both; it changes no result"),
    Flag("--emb_dim", int, 256, "model.embedding_dim"),
    Flag("--nhead", int, 2, "model.num_heads"),
    Flag("--num_layers", int, 2, "model.num_layers"),
    Flag("--dataset_path", str, ours="`recmill prepare movielens --input`",
         note="without it: the directory `ml-1m` or `ml-20m`"),
    Flag("--export_root", str, "", ours="`recmill train --run`",
         note="checkpoints that can be resumed, with any number of processes"),
    Flag("--random_user_count", int, 10, ours="`recmill prepare random-histories --random-user-count`"),
    Flag("--random_item_count", int, 30, ours="`recmill prepare random-histories --random-item-count`"),
    Flag("--random_size", int, 300, ours="`recmill prepare random-histories --random-size`"),
    Flag("--dupe_factor", int, 3, "model.dupe_factor", "made once for all epochs there, new in each epoch here"),
    Flag("--mode", str, "dmp", ours="`sharding.mode`", note='`dmp`: `"auto"`; anything else: `"ddp"`'),
)  # fmt: skip


def _plan(given: Given) -> Plan:
    given = replace(given, run=given.run or given["export_root"] or None)
    config: dict[str, Any] = given.config()
    config["model"] |= {"name": "bert4rec", "sliding_step": 0.1, "mask_random": 0.2, "mask_last_only": 0.0}
    config["sharding"] = {"mode": "auto" if given["mode"] == "dmp" else "ddp"}
    for part in ("dense", "tables"):
        config["optim"][part]["name"] = "adam"
    if given["gamma"] != 1 and given["decay_step"] < given["num_epochs"]:
        step_size = _share(given["decay_step"], given["num_epochs"])
        config["optim"]["schedule"] = {"name": "step", "step_size": step_size, "gamma": given["gamma"]}
    if given["num_epochs"] > _SAVE_EPOCHS:
        put(config, "checkpoint.every_steps", _share(_SAVE_EPOCHS, given["num_epochs"]))
    dataset, protocol, notes = _dataset(given)
    config["eval"] |= {"protocols": [protocol], "before_training": True}
    config["data"] = {"path": dataset.arguments["output"]}
    return Plan([dataset, given.train(config)], [*notes, *_NOTES])


_NOTES = [
    "theirs is not seeded, and every process makes its own masks and negatives; here all follow from train.seed = 1",
    "theirs makes masks once; here each epoch has new ones",
    "theirs normalizes all positions of a window together, padding included; here each position by itself "
    '(model.norm = "window": as there)',
    "theirs starts item vectors uniform in +-1; here in +-0.05",
    "theirs averages metrics over batches and repeats users to fill them up; here each user counts once, and "
    "validation and test have different negatives",
]


def _share(epochs: int, of: int) -> str:
    """Return a share of the run. It is rounded down, because the number of steps that it stands for is rounded up."""
    billionths = epochs * 10**11 // of
    return f"{billionths // 10**9}.{billionths % 10**9:09}".rstrip("0").rstrip(".") + "%"


def _dataset(given: Given) -> tuple[Step, str, list[str]]:
    """Return the step that makes the dataset, the protocol of evaluation, and notes."""
    arguments = {name: given[name] for name in ("min_user_count", "min_item_count")}
    if given["dataset_name"] != "random":
        found = {"input": given["dataset_path"] or given["dataset_name"], "min_rating": float(given["min_rating"])}
        arguments = {"name": "movielens", **found, **arguments}
        return Step("prepare", {**arguments, "output": given.new_directory("data", arguments)}), "pop100", []
    arguments |= {name: given[name] for name in ("random_user_count", "random_item_count", "random_size")}
    arguments = {"name": "random-histories", **arguments}
    step = Step("prepare", {**arguments, "output": given.new_directory("data", arguments)})
    if given["random_item_count"] > 50 + 2 * given["random_size"] / given["random_user_count"]:
        return step, "uni10", []
    reason = "some users may have seen all but a few of so few items"
    return step, "full", [f"theirs ranks among 10 random negatives; here among all items, because {reason}"]


PROGRAM = Program("bert4rec_main.py", FLAGS, _plan)
