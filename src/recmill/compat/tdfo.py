"""tdfo's BERT4Rec on Goodreads: `preprocessing.py` and `train.py`, whose only argument is config.toml (17 keys).

All keys are mandatory there; the defaults below are the values of its own file.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill.compat.program import BOTH_DECAYS, BOTH_RATES, Flag, Given, Plan, Program, Step, Values
from recmill.errors import ConfigError
from recmill.registry import unknown

_FILE = "config.toml"
_NO_PARTS = "not offered: training and evaluation use parts of every history, not sets of files. Leave it as it was"

KEYS = (
    Flag("data_dir", str, "/data", ours="`data.path`",
         note="its subdirectory `histories`; raw files: `recmill prepare goodreads --input`"),
    Flag("train_data", str, "train_part_*.parquet", ours=_NO_PARTS, is_refused=True),
    Flag("eval_data", str, "eval_part_*.parquet", ours=_NO_PARTS, is_refused=True),
    Flag("n_epochs", int, 10, "train.num_epochs"),
    Flag("learning_rate", float, 3e-4, BOTH_RATES, 'one rate for both there; `optim.tables.name = "adam"`'),
    Flag("weight_decay", float, 1e-4, BOTH_DECAYS, "of the tables, only rows that a batch looks up"),
    Flag("embed_dim", int, 16, "model.embedding_dim"),
    Flag("n_heads", int, 2, "model.num_heads"),
    Flag("n_layers", int, 2, "model.num_layers"),
    Flag("max_len", int, 20, "model.max_length"),
    Flag("sliding_step", int, 10, "model.sliding_step", "windows are counted from the end of a history; there from its "
         "beginning, so the newest window is a short remainder. A step larger than `max_len` is an error in both"),
    Flag("mask_prob", float, 0.2, "model.mask_prob", "its rule that the last item is masked as well: "
         "`model.mask_last_too = true`, `model.mask_last_only = 0.0`"),
    Flag("per_device_train_batch_size", int, 16, "train.global_batch_size", "theirs times the number of processes, as "
         "its README says; its code multiplies by that number twice", is_per_process=True),
    Flag("per_device_eval_batch_size", int, 16, "eval.global_batch_size", "the same", is_per_process=True),
    Flag("model_parallel", bool, True, ours="`sharding.mode`", note='`true`: `"auto"`, `false`: `"ddp"`'),
    Flag("num_workers", int, 2, "data.prefetch", "batches prepared ahead by a thread; there are no worker processes"),
    Flag("seed", int, 42, "train.seed", "there it fixes masks and negatives, never the model"),
)  # fmt: skip


@dataclass(frozen=True)
class TomlProgram(Program):
    """A program that reads config.toml of the current directory and has no flags: its `flags` are the file's keys."""

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Values:
        if arguments:
            raise ConfigError(f"{self.name} has no flags, but got '{arguments[0]}'. Its settings are in {_FILE}.")
        try:
            values = tomllib.loads(Path(_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.name}: no {_FILE} in the current directory. Run it where that file is.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{_FILE}: {error}. Correct it.") from None
        by_name = {key.name: key for key in self.flags}
        for name in values:
            if name not in by_name:
                raise ConfigError(f"{_FILE}: {unknown('key', name, by_name)}")
        return {key.name: _checked(key, values) for key in self.flags}


def _checked(key: Flag, values: Values) -> Any:
    if key.name not in values:
        raise ConfigError(f"{_FILE}: no key '{key.name}'. Add it; tdfo's own value is {key.default!r}.")
    value = values[key.name]
    if type(value) is int and key.kind is float:
        value = float(value)
    if type(value) is not key.kind:
        raise ConfigError(f"{_FILE}: {key.name} = {value!r} should be like {key.default!r}. Correct it.")
    if key.is_refused and value != key.default:
        raise ConfigError(f"{_FILE}: {key.name} = {value!r} is {key.ours}: {key.default!r}.")
    return value


def _histories(given: Given) -> str:
    return str(Path(given["data_dir"]) / "histories")


def _plan_preprocessing(given: Given) -> Plan:
    arguments = {"name": "goodreads", "input": given["data_dir"], "output": _histories(given)}
    return Plan(
        [Step("prepare", arguments)],
        [
            "theirs sorts each history by book id, so that the target is always among the largest ids; here histories "
            "keep the order of the file",
            f"{arguments['output']} holds complete histories: train.py makes windows, masks and negatives",
        ],
    )


def _plan_training(given: Given) -> Plan:
    config: dict[str, Any] = given.config()
    config["data"]["path"] = _histories(given)
    config["model"] |= {"name": "bert4rec", "mask_last_too": True, "mask_last_only": 0.0, "label_smoothing": 0.1}
    config["sharding"] = {"mode": "auto" if given["model_parallel"] else "ddp"}
    for part in ("dense", "tables"):
        config["optim"][part]["name"] = "adam"
    config["eval"] |= {"protocols": ["pop100"], "ks": [10, 20, 50], "before_training": True}
    notes = [
        "theirs makes masks once, before windows; here each window has its own, new in each epoch",
        "theirs pads windows on the right and evaluates with padding on the left; here positions count from the end",
        "theirs normalizes all positions of a window together, padding included; here each position by itself "
        '(model.norm = "window": as there)',
        "theirs starts item vectors uniform in +-1; here in +-0.05",
        "theirs averages metrics over batches, and never uses its test items; here each user counts once, and the "
        "test is the end of the run",
    ]
    if given.procs > 1:
        size, procs = given["per_device_train_batch_size"], given.procs
        notes.append(f"theirs trains on {size} * {procs} * {procs} rows per step; here on {size} * {procs}")
    if given["model_parallel"]:
        notes.append("theirs trains the item table with SGD on a CPU; here with Adam")
    return Plan([given.train(config)], notes)


PREPROCESSING = TomlProgram("tdfo/preprocessing.py", KEYS, _plan_preprocessing)
TRAIN = TomlProgram("tdfo/train.py", KEYS, _plan_training)
