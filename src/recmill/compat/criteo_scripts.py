"""The scripts that prepare Criteo's logs: TorchRec's, those of facebookresearch/dlrm, and the ones for Polaris."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from recmill.compat import dlrm_main
from recmill.compat.program import Flag, Given, Plan, Program, Step, Values, ints

_FIXED = "torchrec-fixed"
_INPUT = "`recmill prepare criteo --input`"
_OUTPUT = "`recmill prepare criteo --output`"
_ROUNDED = "theirs rounds training ids above 2^24 to float32, so that ids share rows; here all ids stay exact"
_ORDER = "Recmill's order differs from theirs and needs no memory; theirs needs the rows in memory"
_MINIMUM = "theirs uses the smallest dense value of each file; here all files have the same transform"


def _prepare(logs: str, output: str, **options: object) -> Step:
    return Step("prepare", {"name": "criteo", "input": logs, "output": output, "compat": _FIXED, **options})


NPY_FLAGS = (
    Flag("--input_dir", str, ours=_INPUT, is_required=True),
    Flag("--output_dir", str, ours=_OUTPUT, is_required=True),
    Flag("--dataset_name", str, "criteo_1tb", ours="`recmill prepare criteo --source`", note="1tb or kaggle",
         choices=("criteo_1tb", "criteo_kaggle")),
)  # fmt: skip


def _npy(given: Given) -> Plan:
    source = given["dataset_name"].removeprefix("criteo_")
    step = _prepare(given["input_dir"], given["output_dir"], ids="mod", source=source)
    return Plan([step], [_MINIMUM])


CONTIGUOUS_FLAGS = (
    Flag("--input_dir", str, ours=_INPUT, note="of npy files", is_required=True),
    Flag("--output_dir", str, ours=_OUTPUT,
         note="a complete dataset; its ids are in `day_N_sparse.npy`, so nothing has to be renamed", is_required=True),
    Flag("--frequency_threshold", int, 0, ours="`recmill prepare criteo --min-frequency`"),
)  # fmt: skip


def _contiguous(given: Given) -> Plan:
    return Plan([_prepare(given["input_dir"], given["output_dir"], min_frequency=given["frequency_threshold"])])


SHUFFLE_FLAGS = (
    Flag("--input_dir_labels_and_dense", str, ours=_INPUT, note="of npy files", is_required=True),
    Flag("--input_dir_sparse", str, ours="`recmill prepare criteo --sparse-input`", is_required=True),
    Flag("--output_dir_full_set", str,
         ours="not offered: it holds ids as float32, which is inexact. Leave it out: the input files are the full set",
         is_refused=True),
    Flag("--output_dir_shuffled", str, ours=_OUTPUT, is_required=True),
    Flag("--random_seed", int, 0, ours="`recmill prepare criteo --seed`", note="with `--shuffle global`"),
)  # fmt: skip


def _shuffle(given: Given) -> Plan:
    options = {
        "sparse_input": given["input_dir_sparse"],
        "ids": "mod",
        "shuffle": "global",
        "seed": given["random_seed"],
    }
    step = _prepare(given["input_dir_labels_and_dense"], given["output_dir_shuffled"], **options)
    return Plan([step], [_ROUNDED, _ORDER])


MULTI_HOT_FLAGS = (
    Flag("--in_memory_binary_criteo_path", str, ours=_INPUT, note="of npy files", is_required=True),
    Flag("--output_path", str, ours=_OUTPUT, is_required=True),
    Flag("--copy_labels_and_dense", bool, ours="always on", note="a dataset is complete"),
    Flag("--num_embeddings_per_feature", ints, ours="`recmill prepare criteo --table-size`", is_required=True),
    Flag("--multi_hot_sizes", ints, ours="`recmill prepare criteo --multi-hot`", is_required=True),
    Flag("--multi_hot_distribution_type", str, "uniform", ours="`recmill prepare criteo --multi-hot-distribution`",
         choices=("uniform", "pareto")),
)  # fmt: skip


def _multi_hot(given: Given) -> Plan:
    options = {
        "ids": "mod",
        "table_size": given["num_embeddings_per_feature"],
        "multi_hot": given["multi_hot_sizes"],
        "multi_hot_distribution": given["multi_hot_distribution_type"],
    }
    return Plan([_prepare(given["in_memory_binary_criteo_path"], given["output_path"], **options)])


PROCESS_FLAGS = (
    Flag("RAW", str, ours=_INPUT, is_required=True),
    Flag("TEMPORARY", str, ours="no effect: temporary files are beside the output", is_required=True),
    Flag("OUTPUT", str, ours=_OUTPUT, is_required=True),
)  # fmt: skip


def _processed(source: str, output: str) -> Plan:
    return Plan([_prepare(source, output, min_frequency=0, shuffle="global")], [_MINIMUM, _ROUNDED, _ORDER])


SPLIT_FLAGS = (
    Flag("DATASET_DIR", str, ours="`recmill split --input`", note="holds `day_0`", is_required=True),
    Flag("SPLIT_DIR", str, ours="`recmill split --output`", is_required=True),
    Flag("SPLIT_LINE", int, 5_000_000, ours="`recmill split --lines`", note="24 parts; too few lines are an error"),
)  # fmt: skip


def _split(given: Given) -> Plan:
    log = str(Path(given["DATASET_DIR"]) / "day_0")
    note = "these days are slices of one day, as theirs: results cannot be compared with those of the 24 real days"
    return Plan([Step("split", {"input": log, "output": given["SPLIT_DIR"], "lines": given["SPLIT_LINE"]})], [note])


_WORKDIR = Flag(
    "WORKDIR", str, None, ours="`recmill train --run`", note="the run is `$WORKDIR/dlrm/results/$PBS_JOBID`"
)
PREPROCESS_VARIABLES = (
    Flag("DATASET_DIR", str, ours=_INPUT, note="the directory of `criteo1tb_split`, or of the logs", is_required=True),
    Flag("WORKDIR", str, None, ours="no effect: nothing is read from there"),
)  # fmt: skip


def _preprocess(given: Given) -> Plan:
    root = Path(given["DATASET_DIR"])
    is_root = (root / "criteo1tb_split").is_dir()  # as the script has it; its README names the directory of the logs
    return _processed(str(root / "criteo1tb_split" if is_root else root), str(root / "criteo1tb_final"))


TRAIN_VARIABLES = (
    Flag("DATASET_DIR", str, ours="`data.path`", note="after `recmill adopt`", is_required=True),
    _WORKDIR,
    Flag("PBS_JOBID", str, "0", ours="`recmill train --run`", note="only what is before the first dot"),
    Flag("BATCH_SIZE", int, 8192, ours="`train.global_batch_size`", note="theirs times the number of processes"),
    Flag("EMBEDDING_DIM", int, 128, ours="`model.embedding_dim`"),
    Flag("EPOCHS", int, 3, ours="`train.num_epochs`"),
    Flag("LEARNING_RATE", float, 0.1, ours="`optim.dense.lr`, `optim.tables.lr`"),
    Flag("DFTRACER_ENABLE", int, 1, ours="the same", note="with `pip install dftracer`; steps are always recorded"),
    Flag("DFTRACER_INC_METADATA", int, 1, ours="the same"),
)  # fmt: skip
_POLARIS_SIZES = (
    "45833188,36746,17245,7413,20243,3,7114,1441,62,29275261,1572176,345138,10,2209,11267,128,4,974,14,48937457,"
    "11316796,40094537,452104,12606,104,35"
)


class _Train(Program):
    """`3_train.sh`: a command line of dlrm_main.py made of variables. Flags after its name are added to it."""

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Values:
        values = {flag.name: self.variable(flag, environment) for flag in self.variables}
        job = values["PBS_JOBID"].partition(".")[0]
        words = [
            *("--dense_arch_layer_sizes", "512,256,128", "--over_arch_layer_sizes", "1024,1024,512,256,1"),
            *("--num_embeddings_per_feature", _POLARIS_SIZES, "--evaluate_on_epoch_end", "--evaluate_on_training_end"),
            *("--pin_memory", "--print_sharding_plan", "--shuffle_batches"),
            *("--in_memory_binary_criteo_path", values["DATASET_DIR"]),
            *("--output_dir", str(Path(values["WORKDIR"] or ".") / "dlrm" / "results" / job)),
        ]
        for name in ("BATCH_SIZE", "EMBEDDING_DIM", "EPOCHS", "LEARNING_RATE"):
            words += [f"--{name.lower()}", str(values[name])]
        return super().read([*words, *arguments], environment)


def _train(given: Given) -> Plan:
    trained = dlrm_main.POLARIS.plan(given)
    run = trained.steps[-1].arguments["run"]
    return Plan([*trained.steps, Step("trace", {"run": run})], trained.notes)


NPY = Program("npy_preproc_criteo.py", NPY_FLAGS, _npy)
CONTIGUOUS = Program("contiguous_preproc_criteo.py", CONTIGUOUS_FLAGS, _contiguous)
SHUFFLE = Program("shuffle_preproc_criteo.py", SHUFFLE_FLAGS, _shuffle)
MULTI_HOT = Program("materialize_synthetic_multihot_dataset.py", MULTI_HOT_FLAGS, _multi_hot)
PROCESS = Program(
    "process_Criteo_1TB_Click_Logs_dataset.sh", PROCESS_FLAGS, lambda given: _processed(given["RAW"], given["OUTPUT"])
)
POLARIS_SPLIT = Program("1_split_dataset.sh", SPLIT_FLAGS, _split)
POLARIS_PREPROCESS = Program("2_preprocess_dataset.sh", (), _preprocess, PREPROCESS_VARIABLES)
POLARIS_TRAIN = _Train("3_train.sh", dlrm_main.FLAGS, _train, TRAIN_VARIABLES)
