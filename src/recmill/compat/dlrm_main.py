"""`dlrm_main.py`: TorchRec's DLRM (facebookresearch/dlrm), MLCommons' fork of it, and the fork for Polaris.

These are three versions of one script: each accepts the flags of all three, and of the versions of 2022.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from recmill.compat.program import BOTH_RATES, Flag, Given, Plan, Program, Step, ints, put
from recmill.errors import ConfigError

NUM_TABLES = 26
_RANDOM_BATCHES = 10  # per epoch, of the random dataset
_RATE, _RANDOM_RATE = 15.0, 1.0  # with 15, random labels made the loss diverge in some runs, theirs and ours
_MODELS = {"original": "dlrm", "dcn": "dcnv2", "projection": "projection"}
_OWN_KEYS = {"dcnv2": ("num_cross_layers", "cross_rank"), "projection": ("branch1_mlp", "branch2_mlp"), "dlrm": ()}
_ALWAYS = "always on"
_MLPERF = "MLPerf, Polaris"
_TABLE_SIZES = "`recmill adopt --table-size`, `recmill prepare criteo --table-size`"

FLAGS = (
    Flag("--epochs", int, 1, "train.num_epochs"),
    Flag("--batch_size", int, 32, "train.global_batch_size", "theirs times the number of processes",
         is_per_process=True),
    Flag("--drop_last_training_batch", bool, None, "data.drop_last", 'without it: `data.remainder = "torchrec"`'),
    Flag("--test_batch_size", int, None, "eval.global_batch_size",
         "theirs times the number of processes; without it that of training", is_per_process=True),
    Flag("--limit_train_batches", int, None, "data.limit_train_batches",
         "limits an epoch; `train.max_steps` limits the run"),
    Flag("--limit_val_batches", int, None, "data.limit_val_batches", "random data: 10 batches per split by default"),
    Flag("--limit_test_batches", int, None, "data.limit_test_batches"),
    Flag("--dataset_name", str, "criteo_1t", ours="`data.path`",
         note="any prepared dataset. Random data, which the script uses if it is given no path: "
         "`recmill prepare random-clicks`"),
    Flag("--num_embeddings", int, 100_000, ours=_TABLE_SIZES,
         note="the dataset determines the size of the tables. There, ids are taken modulo the size: "
         "`recmill adopt --modulo` or `--ids mod`. By default each of the most frequent ids keeps a row of its own"),
    Flag("--num_embeddings_per_feature", ints, None, ours=_TABLE_SIZES, note="26 numbers; also with `--modulo`"),
    Flag("--dense_arch_layer_sizes", ints, [512, 256, 64], "model.bottom_mlp"),
    Flag("--over_arch_layer_sizes", ints, [512, 512, 256, 1], "model.top_mlp", "without the last 1"),
    Flag("--embedding_dim", int, 64, "model.embedding_dim"),
    Flag("--interaction_type", str, "original", ours="`model.name`",
         note="original: `dlrm`, dcn: `dcnv2`, projection: `projection`", choices=tuple(_MODELS)),
    Flag("--interaction_branch1_layer_sizes", ints, [2048, 2048], "model.branch1_mlp"),
    Flag("--interaction_branch2_layer_sizes", ints, [2048, 2048], "model.branch2_mlp"),
    Flag("--dcn_num_layers", int, 3, "model.num_cross_layers"),
    Flag("--dcn_low_rank_dim", int, 512, "model.cross_rank"),
    Flag("--undersampling_rate", float, None, ours="no effect, as there: the script ignores it", note="TorchRec"),
    Flag("--seed", int, None, "train.seed",
         "also fixes tables and layers; there it fixes only random data and `--shuffle_training_set`"),
    Flag("--pin_memory", bool, ours=_ALWAYS, note="batches for a GPU are pinned in the background"),
    Flag("--mmap_mode", bool, ours=_ALWAYS, note="files are memory-mapped, never loaded completely"),
    Flag("--in_memory_binary_criteo_path", str, ours="`data.path`", note="after `recmill adopt`"),
    Flag("--synthetic_multi_hot_criteo_path", str, ours="`data.path`",
         note="after `recmill adopt`, or from `recmill prepare criteo --multi-hot`"),
    Flag("--learning_rate", float, _RATE, BOTH_RATES,
         "one rate for both there; random data: 1, not their default"),
    Flag("--eps", float, 1e-8, "optim.dense.eps, optim.tables.eps", "with `--adagrad`; a constant in MLPerf's code"),
    Flag("--adagrad", bool, ours='`optim.dense.name = "adagrad"`, `optim.tables.name = "adagrad"`',
         note="without it: `sgd` for both"),
    Flag("--shuffle_batches", bool, ours='`data.order = "batch"`', note='without a flag: `data.order = "file"`'),
    Flag("--shuffle_training_set", bool, ours='`data.order = "shuffled"`',
         note="our default; needs no memory, and has a new order in each epoch"),
    Flag("--validation_freq_within_epoch", int, None, "eval.every_steps",
         "counted over all epochs; TorchRec's script also validates at the end of each epoch: `eval.each_epoch`"),
    Flag("--validation_auroc", float, None, "eval.target_auroc", _MLPERF),
    Flag("--evaluate_on_epoch_end", bool, ours="`eval.each_epoch = true`",
         note=f"{_MLPERF}. Always on if `eval.every_steps` is not set"),
    Flag("--evaluate_on_training_end", bool, ours=_ALWAYS, note=_MLPERF),
    Flag("--collect_multi_hot_freqs_stats", bool, None, "data.multi_hot.collect_frequencies",
         "one `frequencies.npz` for all processes, with integer counts"),
    Flag("--multi_hot_sizes", ints, None, "data.multi_hot.sizes",
         "or the same ids stored on disk: `recmill prepare criteo --multi-hot`"),
    Flag("--multi_hot_distribution_type", str, None, "data.multi_hot.distribution",
         "if stored on disk: `recmill prepare criteo --multi-hot-distribution`", choices=("uniform", "pareto")),
    Flag("--multi_hot_size", int, None, ours="`data.multi_hot.sizes`",
         note="a flag until 2022, whose random ids differ from today's"),
    Flag("--multi_hot_min_table_size", int, None, "data.multi_hot.min_table_size", "a flag until 2022"),
    Flag("--lr_warmup_steps", int, 0, "optim.schedule.warmup_steps", 'with `optim.schedule.name = "mlperf"`'),
    Flag("--lr_decay_start", int, 0, "optim.schedule.decay_start_step"),
    Flag("--lr_decay_steps", int, 0, "optim.schedule.decay_steps"),
    Flag("--change_lr", bool, ours='`optim.schedule.name = "step"`',
         note="a flag until 2022; MLPerf's README still mentions it. Refused with `--epochs` above 1, "
         "`--lr_warmup_steps` or `--lr_decay_steps`"),
    Flag("--lr_change_point", float, 0.8, ours="`optim.schedule.step_size`",
         note='as a share like "80%": for one epoch and above 0.5, the rate changes once, as there'),
    Flag("--lr_after_change_point", float, 0.2, ours="`optim.schedule.gamma`", note="theirs divided by the first rate"),
    Flag("--print_lr", bool, ours=_ALWAYS, note="in every report: `train.log_every_steps`"),
    Flag("--allow_tf32", bool, None, "train.tf32"),
    Flag("--print_sharding_plan", bool, ours=_ALWAYS, note="also written to the run directory"),
    Flag("--print_progress", bool, ours="always on, on a terminal", note=_MLPERF),
    Flag("--output_dir", str, ours="`recmill train --run`",
         note="Polaris; the directory holds results, the metrics of every report and checkpoints"),
)  # fmt: skip


def _plan(given: Given, *, is_mlperf: bool) -> Plan:
    given = replace(given, run=given.run or given["output_dir"])
    config = given.config()
    model = config["model"]
    model["name"] = _MODELS[given["interaction_type"]]
    for name in {key for keys in _OWN_KEYS.values() for key in keys} - {*_OWN_KEYS[model["name"]]}:
        del model[name]  # of another interaction
    if model["top_mlp"].pop() != 1 or not model["top_mlp"]:
        sizes = ",".join(map(str, given["over_arch_layer_sizes"]))
        raise ConfigError(f"--over_arch_layer_sizes {sizes}: the last of two layers or more must be 1. Correct it.")
    evaluation = config.setdefault("eval", {})
    evaluation.setdefault("global_batch_size", config["train"]["global_batch_size"])
    if "every_steps" in evaluation:
        evaluation["each_epoch"] = given["evaluate_on_epoch_end"] or not is_mlperf
    if is_mlperf and model["name"] == "dcnv2":
        put(config, "observe.mlperf", True)
    _set_optimizer(given, config)
    notes = _set_data(given, config)
    dataset, dataset_notes = _dataset(given, config)
    config["data"]["path"] = dataset.arguments["output"]
    if given["seed"] is None:
        notes.append("no --seed: theirs differs from run to run; here everything follows from train.seed = 1")
    return Plan([dataset, given.train(config)], notes + dataset_notes)


def _set_optimizer(given: Given, config: dict[str, Any]) -> None:
    optim = config["optim"]
    for part in ("dense", "tables"):
        optim[part]["name"] = "adagrad" if given["adagrad"] else "sgd"
        if not given["adagrad"]:
            del optim[part]["eps"]
        if not _path(given) and "learning_rate" not in given.values:
            optim[part]["lr"] = _RANDOM_RATE
    schedule = optim.pop("schedule")
    if not schedule["decay_steps"]:
        del schedule["decay_start_step"], schedule["decay_steps"]
    if any(schedule.values()):
        optim["schedule"] = {"name": "mlperf", **schedule}
    if not given["change_lr"]:
        return
    if "schedule" in optim or given["epochs"] > 1 or not 0.5 < given["lr_change_point"] < 1:
        raise ConfigError(
            "--change_lr changes the rate once: for --epochs 1, an --lr_change_point between 0.5 and 1, and no "
            "--lr_warmup_steps or --lr_decay_steps. Otherwise use optim.schedule of a run config."
        )
    share = f"{100 * given['lr_change_point']:g}%"
    gamma = given["lr_after_change_point"] / optim["dense"]["lr"]
    optim["schedule"] = {"name": "step", "step_size": share, "gamma": gamma}


def _set_data(given: Given, config: dict[str, Any]) -> list[str]:
    """Set the order of rows and the companions of ids. Return notes."""
    data = config["data"]
    if not data["drop_last"]:
        data["remainder"] = "torchrec"
    data["order"] = "batch" if given["shuffle_batches"] else "file"
    notes = []
    if given["shuffle_training_set"]:
        data["order"] = "shuffled"
        notes.append(
            "--shuffle_training_set: theirs shuffles once, and without --seed differently in each process, so that "
            "rows are lost or repeated; here all processes share one permutation, a new one in each epoch"
        )
    multi_hot = data["multi_hot"]
    if given["multi_hot_size"] and not given["multi_hot_sizes"]:
        multi_hot["sizes"] = [given["multi_hot_size"]]
        notes.append("--multi_hot_size: the ids that are added are those of today's version of their script")
    if "sizes" not in multi_hot:
        del data["multi_hot"]
    return notes


def _path(given: Given) -> str | None:
    """Return the directory of npy files; None: the data is random."""
    paths = [given["in_memory_binary_criteo_path"], given["synthetic_multi_hot_criteo_path"]]
    if all(paths):
        raise ConfigError("--in_memory_binary_criteo_path and --synthetic_multi_hot_criteo_path: give one of them.")
    return paths[0] or paths[1]


def _dataset(given: Given, config: dict[str, Any]) -> tuple[Step, list[str]]:
    """Return the step that makes the dataset, and notes. Without a path the data is random."""
    sizes = given["num_embeddings_per_feature"] or [given["num_embeddings"]] * NUM_TABLES
    if len(sizes) != NUM_TABLES or min(sizes) < 1:
        raise ConfigError(
            f"--num_embeddings_per_feature takes {NUM_TABLES} numbers from 1 on, and --num_embeddings one. Correct it."
        )
    if path := _path(given):
        arguments = {"path": path, "table_size": sizes, "modulo": True}
        notes = []
        if "kaggle" in given["dataset_name"]:
            notes.append(
                "criteo_kaggle: theirs validates and tests on rows that it trains on; here the last 10 % of the rows "
                "are for test and the 10 % before for validation, so AUROC is lower"
            )
        return Step("adopt", {**arguments, "output": given.new_directory("data", arguments)}), notes
    data, train, evaluation = config["data"], config["train"], config["eval"]
    for split in ("train", "val", "test"):
        data.setdefault(f"limit_{split}_batches", _RANDOM_BATCHES)
    held_out = 2 * max(data["limit_val_batches"], data["limit_test_batches"]) * evaluation["global_batch_size"]
    rows = 2 * max(data["limit_train_batches"] * train["global_batch_size"], held_out)
    arguments = {"rows": rows, "days": 2, "tables": sizes, "seed": given["seed"] or 1}
    output = given.new_directory("data", arguments)
    notes = ["random data: theirs has the same 10 batches in every process; here all rows of an epoch are different"]
    if config["optim"]["dense"]["lr"] == _RANDOM_RATE != given["learning_rate"]:
        notes.append(f"random data: --learning_rate is {_RANDOM_RATE:g}, because {_RATE:g} makes the loss diverge")
    return Step("prepare", {"name": "random-clicks", "output": output, **arguments}), notes


TORCHREC = Program("dlrm_main.py", FLAGS, partial(_plan, is_mlperf=False))
MLCOMMONS = Program("mlcommons/dlrm_main.py", FLAGS, partial(_plan, is_mlperf=True))
POLARIS = Program("polaris/dlrm_main.py", FLAGS, partial(_plan, is_mlperf=True))
