"""OneFlow's DLRM: `dlrm_train_eval.py`, and `tools/criteo1t_parquet.py`, which makes its data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.compat.program import BOTH_RATES, Flag, Given, Plan, Program, Step, ints
from recmill.errors import ConfigError, DataError

_TABLE_SIZES = [39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10]
_TABLE_SIZES += [2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36]
_STATIC_SCALE = 1024.0
_DRIVER_GB = 360
_PADDING = "`model.pad_to_multiple_of = 1`"

FLAGS = (
    Flag("--data_dir", str, None, "data.path", "what `compat/tools/criteo1t_parquet.py` or `recmill prepare criteo` "
         "wrote. The directories that their own tool writes are refused", is_required=True),
    Flag("--persistent_path", str, None, "tables.path", "only with the store `cached_ssd`, and only temporary: rows "
         "persist in the checkpoints of `recmill train --run`", is_required=True),
    Flag("--table_size_array", ints, _TABLE_SIZES,
         ours="`tables.dynamic.NAME.max_rows`, `tables.dynamic.NAME.init_rows`",
         note="for C1 to C26: a row is made when its id first occurs, as there ([stores.md](stores.md)), on CPU only. "
         "One id too many is an error; there it is written out of bounds"),
    Flag("--store_type", str, "cached_host_mem", "tables.store", "the same names; what they mean on CPU: "
         "[stores.md](stores.md)", choices=("device_mem", "cached_host_mem", "cached_ssd")),
    Flag("--cache_memory_budget_mb", int, 8192, "tables.cache_memory_budget_mb", "for each process"),
    Flag("--one_embedding_key_type", str, "int64", choices=("int32", "int64"),
         ours="no effect: ids are 64-bit in batches, and as wide on disk as needed"),
    Flag("--embedding_vec_size", int, 128, "model.embedding_dim"),
    Flag("--bottom_mlp", ints, [512, 256, 128], "model.bottom_mlp"),
    Flag("--top_mlp", ints, [1024, 1024, 512, 256], "model.top_mlp", "without the last 1 in both"),
    Flag("--disable_fusedmlp", bool, ours="no effect: the result is the same",
         note='`train.kernels = "torch"` switches our own kernels off, which tables of ids that are not known in '
         'advance need. `model.init = "dlrm"` initializes layers as their script does'),
    Flag("--disable_interaction_padding", bool, ours=_PADDING,
         note="the default here is 16; without the flag theirs pads to a multiple of 8: "
         "`model.pad_to_multiple_of = 8`. Padding changes no result"),
    Flag("--disable_dense_input_padding", bool, ours=_PADDING, note="the same key pads both inputs"),
    Flag("--interaction_itself", bool, None, "model.interaction_itself"),
    Flag("--train_batch_size", int, 55296, "train.global_batch_size", "global in both"),
    Flag("--train_batches", int, 75000, "train.max_steps", "with as many `train.num_epochs` as needed"),
    Flag("--learning_rate", float, 24.0, BOTH_RATES,
         'with `optim.dense.name = "sgd"`, `optim.tables.name = "sgd"`'),
    Flag("--warmup_batches", int, 2750, "optim.schedule.warmup_steps", 'with `optim.schedule.name = "oneflow"`'),
    Flag("--decay_start", int, 49315, "optim.schedule.decay_start_step"),
    Flag("--decay_batches", int, 27772, "optim.schedule.decay_steps"),
    Flag("--loss_print_interval", int, 1000, "train.log_every_steps"),
    Flag("--eval_interval", int, 10000, "eval.every_steps, checkpoint.every_steps",
         "on val, the second half of the last day; test, the first half, is measured at the end"),
    Flag("--eval_batches", int, 1612, "data.limit_val_batches, data.limit_test_batches",
         "0, our default, uses all rows: 167 more than theirs"),
    Flag("--eval_batch_size", int, 55296, "eval.global_batch_size"),
    Flag("--model_load_dir", str, ours="`recmill train --init-from`",
         note="a run of ours: starts from the weights of its newest checkpoint (`RUN@best`, `RUN@STEP`: another one). "
         "`--allow-partial`, which is on in `run-like`, loads only what has the same size (`strict=False` there). To "
         "resume a run at its step, learning rate and position in the data, repeat its command"),
    Flag("--model_save_dir", str, ours="`recmill train --run`"),
    Flag("--save_model_after_each_eval", bool, None, "checkpoint.each_eval",
         "`checkpoint.keep` and `checkpoint.keep_best` determine which ones are kept: all in `run-like`"),
    Flag("--save_initial_model", bool, None, "checkpoint.at_start", "saves before the first step. Later checkpoints "
         "replace it unless `checkpoint.keep` is large enough; the initial state also follows from `train.seed`"),
    Flag("--amp", bool, ours='`train.precision = "float16"`', note='`"bfloat16"` needs no scaling'),
    Flag("--loss_scale_policy", str, "static", ours="`train.loss_scale`", choices=("static", "dynamic"),
         note="with `--amp`. 0 means `dynamic`; any other number is a `static` scale (1024 there)"),
)  # fmt: skip


def _plan_training(given: Given) -> Plan:
    if (Path(given["data_dir"]) / "train").is_dir():
        raise DataError(
            f"--data_dir {given['data_dir']} has a directory 'train', as OneFlow's own tool writes it. Make the data "
            "again from the raw logs, with compat/tools/criteo1t_parquet.py in the place of that tool."
        )
    given = replace(given, run=given.run or given["model_save_dir"])
    config: dict[str, Any] = given.config()
    padding = 1 if given["disable_interaction_padding"] or given["disable_dense_input_padding"] else 8
    config["model"] |= {"name": "dlrm", "init": "dlrm", "pad_to_multiple_of": padding}
    config["data"]["order"] = "file"  # the rows are shuffled already
    config["train"] |= {"num_epochs": given["train_batches"], "device": "cpu"}
    for part in ("dense", "tables"):
        config["optim"][part]["name"] = "sgd"
    schedule = config["optim"]["schedule"]
    schedule["name"] = "oneflow"
    if not given["decay_batches"]:
        del schedule["decay_start_step"]
    _set_tables(given, config["tables"])
    if given["save_model_after_each_eval"]:  # theirs keeps all
        config["checkpoint"]["keep"] = given["train_batches"] // given["eval_interval"] + 2
    if given["amp"]:
        is_static = given["loss_scale_policy"] == "static"
        config["train"] |= {"precision": "float16", "loss_scale": _STATIC_SCALE if is_static else 0.0}
    options = {"init_from": given["model_load_dir"], "allow_partial": True} if given["model_load_dir"] else {}
    return Plan(
        [given.train(config, **options)],
        [
            "theirs measures AUC on the test rows every --eval_interval batches, and never uses its val rows; here it "
            "is measured on val, and once, at the end, on test",
            "theirs shares the row of a missing id with the first id of the next column; here each column has its own",
            "theirs makes a row for an id that only evaluation has; here such ids share 1,024 rows",
        ],
    )


def _set_tables(given: Given, tables: dict[str, Any]) -> None:
    sizes = given["table_size_array"]
    if len(sizes) != len(_TABLE_SIZES):
        raise ConfigError(f"--table_size_array has {len(sizes)} sizes. Give {len(_TABLE_SIZES)}, one for each column.")
    tables["dynamic"] = {f"C{n}": {"max_rows": size, "init_rows": size} for n, size in enumerate(sizes, 1)}
    if given["store_type"] != "cached_ssd":
        del tables["path"]
    if given["store_type"] == "device_mem":
        del tables["cache_memory_budget_mb"]


PARQUET_FLAGS = (
    Flag("--input_dir", str, ours="`recmill prepare criteo --input`", is_required=True),
    Flag("--output_dir", str, ours="`recmill prepare criteo --output`", is_required=True,
         note="`train-*.parquet`, `val-*.parquet`, `test-*.parquet` with the same columns, and `dataset.json`"),
    Flag("--spark_tmp_dir", str, ours="no effect: temporary files are beside the output",
         note="`recmill prepare criteo --engine spark` uses a cluster, and its `spark-defaults.conf`"),
    Flag("--spark_driver_memory_gb", int, _DRIVER_GB, ours="`recmill prepare criteo --memory-budget`",
         note="4GB by default, 360 there; it changes no result"),
    Flag("--mod_idx", int, 40_000_000, ours="`recmill prepare criteo --table-size`",
         note="with `--compat oneflow`; 0 or less: `--ids hash64`"),
    Flag("--num_test_examples", int, 89_137_319, is_refused=True,
         ours="not offered: the first half of the last day, rounded up, is test: 89,137,319 rows of Criteo's. Leave it "
         "out, or use `recmill prepare criteo --last-day`"),
    Flag("--export_dataset_info", bool, ours="always on", note="`dataset.json`; `recmill audit` reports more"),
)  # fmt: skip


def _plan_parquet(given: Given) -> Plan:
    mod = given["mod_idx"]
    ids = {"ids": "mod", "table_size": [mod]} if mod > 0 else {"ids": "hash64"}
    arguments = {"name": "criteo", "input": given["input_dir"], "output": given["output_dir"], "compat": "oneflow"}
    if given["spark_driver_memory_gb"] != _DRIVER_GB:
        arguments["memory_budget"] = f"{given['spark_driver_memory_gb']}GB"
    notes = ["theirs takes exactly 24 days, and 89,137,319 rows of the last one as test; here its first half is test"]
    return Plan([Step("prepare", {**arguments, **ids})], notes)


TRAIN = Program("dlrm_train_eval.py", FLAGS, _plan_training)
PARQUET = Program("criteo1t_parquet.py", PARQUET_FLAGS, _plan_parquet)
