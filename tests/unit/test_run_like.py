"""What `recmill run-like` makes of the command lines of other programs."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recmill
from recmill.commands.assemble import build_source
from recmill.commands.run_like import plan_like, run_like
from recmill.compat.program import Plan
from recmill.config import load_config
from recmill.data.click_rows import StoredDay
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, DataError

from ..conftest import RunCli

SEED_SIZES = (
    "40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,976,14,40000000"
)
SEED_SIZES += ",40000000,40000000,590152,12973,108,36"


def trained_config(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = plan.steps[-1].arguments["config"]
    return config


def dlrm(*arguments: str, program: str = "dlrm_main.py", procs: int = 1) -> dict[str, Any]:
    return trained_config(plan_like(program, arguments, procs=procs))


def problem(*arguments: str, program: str = "dlrm_main.py") -> str:
    with pytest.raises(ConfigError) as caught:
        plan_like(program, arguments)
    return str(caught.value)


def test_without_flags_dlrm_main_trains_on_10_random_batches_with_its_own_defaults() -> None:
    plan = plan_like("dlrm_main.py", [], procs=2)
    config = trained_config(plan)
    assert config["train"] == {"num_epochs": 1, "global_batch_size": 2 * 32, "tf32": False}
    assert config["eval"] == {"global_batch_size": 2 * 32}
    assert config["optim"] == {"dense": {"name": "sgd", "lr": 1.0}, "tables": {"name": "sgd", "lr": 1.0}}
    assert any("because 15 makes the loss diverge" in note for note in plan.notes)
    asked_for = plan_like("dlrm_main.py", ["--learning_rate", "15"])
    assert [part["lr"] for part in trained_config(asked_for)["optim"].values()] == [15.0, 15.0]
    assert not any("diverge" in note for note in asked_for.notes)
    on_files = dlrm("--in_memory_binary_criteo_path", "/npy")
    assert (on_files["optim"]["dense"]["lr"], on_files["optim"]["tables"]["lr"]) == (15.0, 15.0)
    assert config["model"] == {
        "name": "dlrm",
        "embedding_dim": 64,
        "bottom_mlp": [512, 256, 64],
        "top_mlp": [512, 512, 256],
    }
    assert (config["data"]["order"], config["data"]["remainder"]) == ("file", "torchrec")
    assert [config["data"][f"limit_{split}_batches"] for split in ("train", "val", "test")] == [10, 10, 10]
    prepared = plan.steps[0].arguments
    assert (prepared["name"], prepared["tables"]) == ("random-clicks", [100_000] * 26)
    assert prepared["rows"] == 2 * (2 * 10 * 64)  # two days; the second one is for val and test, 10 batches each
    assert prepared["output"] == config["data"]["path"]


def test_the_command_of_the_seed_s_results_means_the_same_run() -> None:
    flags = f"--pin_memory --batch_size 8192 --epochs 1 --embedding_dim 128 --num_embeddings_per_feature {SEED_SIZES}"
    layers = "--dense_arch_layer_sizes 512,256,128 --over_arch_layer_sizes 1024,1024,512,256,1"
    rest = "--in_memory_binary_criteo_path /npy --learning_rate 5.0"
    plan = plan_like("dlrm_main.py", f"{flags} {layers} {rest}".split(), procs=8)
    assert plan.steps[0].words[:3] == ["recmill", "adopt", "/npy"]
    assert plan.steps[0].words[3:6] == ["--table-size", SEED_SIZES, "--modulo"]
    config = load_config(trained_config(plan))
    assert config.settings.train.global_batch_size == 65536
    assert config.as_dict()["model"]["top_mlp"] == [1024, 1024, 512, 256]
    assert (config.settings.optim.dense.lr, config.settings.optim.tables.lr) == (5.0, 5.0)
    assert config.settings.data.limit_train_batches == 0


def test_every_flag_of_dlrm_main_reaches_its_key() -> None:
    flags = [
        "--epochs 3 --batch_size 10 --test_batch_size 20 --limit_train_batches 4 --limit_val_batches 5",
        "--limit_test_batches 6 --drop_last_training_batch --learning_rate 15.5 --seed 7 --allow_tf32",
        "--adagrad --eps 1e-6",
        "--interaction_type dcn --dcn_num_layers 2 --dcn_low_rank_dim 9 --validation_freq_within_epoch 2",
        "--lr_warmup_steps 1 --lr_decay_start 2 --lr_decay_steps 3 --shuffle_batches --num_embeddings 50",
        "--multi_hot_sizes 3 --multi_hot_distribution_type pareto --collect_multi_hot_freqs_stats",
        "--undersampling_rate 0.5 --pin_memory --mmap_mode --print_lr --print_sharding_plan",
    ]
    config = dlrm(*" ".join(flags).split(), procs=2)
    assert config["train"] == {"num_epochs": 3, "global_batch_size": 20, "seed": 7, "tf32": True}
    assert config["eval"] == {"global_batch_size": 40, "every_steps": 2, "each_epoch": True}
    optimizer = {"name": "adagrad", "lr": 15.5, "eps": 1e-6}
    schedule = {"name": "mlperf", "warmup_steps": 1, "decay_start_step": 2, "decay_steps": 3}
    assert config["optim"] == {"dense": optimizer, "tables": optimizer, "schedule": schedule}
    assert {"name", "num_cross_layers", "cross_rank"} <= config["model"].keys()
    assert (config["model"]["num_cross_layers"], config["model"]["cross_rank"]) == (2, 9)
    data = config["data"]
    assert data.pop("path").startswith("runs/dlrm_main-data-")
    assert data == {
        "drop_last": True,
        "order": "batch",
        "limit_train_batches": 4,
        "limit_val_batches": 5,
        "limit_test_batches": 6,
        "multi_hot": {"sizes": [3], "distribution": "pareto", "collect_frequencies": True},
    }


def test_the_projection_and_the_flags_of_2022_are_understood() -> None:
    sizes = ("--interaction_branch1_layer_sizes", "128,64", "--interaction_branch2_layer_sizes", "32,192")
    model = dlrm("--interaction_type", "projection", *sizes)["model"]
    assert (model["name"], model["branch1_mlp"], model["branch2_mlp"]) == ("projection", [128, 64], [32, 192])
    rate = ("--learning_rate", "12", "--multi_hot_size", "4")
    config = dlrm("--change_lr", "--lr_change_point", "0.65", "--lr_after_change_point", "3", *rate)
    assert config["optim"]["schedule"] == {"name": "step", "step_size": "65%", "gamma": 0.25}
    assert config["data"]["multi_hot"]["sizes"] == [4]
    assert "an --lr_change_point between 0.5 and 1" in problem("--change_lr", "--lr_change_point", "0.4")


def test_mlperf_s_fork_logs_for_mlperf_and_stops_at_a_target() -> None:
    flags = ("--interaction_type", "dcn", "--validation_auroc", "0.80275", "--validation_freq_within_epoch", "9")
    config = dlrm(*flags, program="mlcommons/dlrm_main.py")
    assert config["observe"] == {"mlperf": True}
    assert config["eval"] == {"global_batch_size": 32, "every_steps": 9, "target_auroc": 0.80275, "each_epoch": False}
    assert "observe" not in dlrm(*flags)


def test_polaris_names_the_run_directory() -> None:
    plan = plan_like("polaris/dlrm_main.py", ["--output_dir", "results/7"])
    assert plan.steps[-1].arguments["run"] == "results/7"
    assert plan.steps[0].arguments["output"].startswith("results/dlrm_main-data-")


def test_unknown_flags_and_programs_and_bad_values_are_named_with_what_was_meant() -> None:
    assert problem("--batchsize", "3") == "dlrm_main.py has no flag '--batchsize'. Did you mean '--batch_size'?"
    assert "has no flag '--warp'. docs/coming-from.md lists" in problem("--warp=9")
    assert "argument --epochs: invalid int value: 'x'" in problem("--epochs", "x")
    assert "unknown program 'dlrm_min'. Did you mean 'dlrm_main'?" in problem(program="dlrm_min.py")
    assert "unknown program '4_train'. Did you mean '3_train'?" in problem(program="./4_train.sh")
    assert "the last of two layers or more must be 1" in problem("--over_arch_layer_sizes", "8,2")
    assert "give one of them" in problem(
        "--in_memory_binary_criteo_path", "a", "--synthetic_multi_hot_criteo_path", "b"
    )
    assert "takes 26 numbers from 1 on" in problem("--num_embeddings_per_feature", "3,4")
    assert "argument --output_dir: expected a value" in problem("--output_dir=--")
    assert "model.bottom_mlp ends with 64, but model.embedding_dim is 32" in problem("--embedding_dim", "32")


def test_defects_that_change_a_result_are_noted() -> None:
    kaggle = plan_like("dlrm_main.py", ["--dataset_name", "criteo_kaggle", "--in_memory_binary_criteo_path", "/npy"])
    assert any("tests on rows that it trains on" in note for note in kaggle.notes)
    shuffled = plan_like("dlrm_main.py", ["--shuffle_training_set", "--seed", "1"])
    assert any("share one permutation" in note for note in shuffled.notes)
    assert not any("no --seed" in note for note in shuffled.notes)


def test_what_is_shown_is_what_is_run() -> None:
    plan = plan_like("dlrm_main.py", ["--batch_size", "8"], procs=2)
    script = plan.as_script()
    file, _, rest = script.partition("cat > ")[2].partition(" <<'END'\n")
    toml, _, end = rest.partition("END\n")
    assert tomllib.loads(toml) == trained_config(plan)
    run = plan.steps[-1].arguments["run"]
    assert end.splitlines()[0] == f"recmill train {file} --run {run} --procs 2"
    assert plan.notes == [line.removeprefix("# ") for line in end.splitlines()[1:]]


def write_npy_days(path: Path, rows: int, largest_id: int) -> dict[str, np.ndarray]:
    """Write two days in TorchRec's layout, and return their ids by day."""
    path.mkdir()
    generator = np.random.default_rng(3)
    ids = {f"day_{day}": generator.integers(0, largest_id, (rows, 26)) for day in range(2)}
    for day, found in ids.items():
        np.save(path / f"{day}_dense.npy", generator.standard_normal((rows, 13)).astype(np.float32))
        np.save(path / f"{day}_sparse.npy", found)
        np.save(path / f"{day}_labels.npy", generator.integers(0, 2, (rows, 1)).astype(np.int32))
    return ids


def test_ids_are_taken_modulo_and_the_files_of_others_are_left_alone(tmp_path: Path) -> None:
    ids = write_npy_days(tmp_path / "npy", 50, 2**40)
    before = sorted(tmp_path.joinpath("npy").iterdir())
    sizes = [*range(3, 29)]
    recmill.adopt(tmp_path / "npy", table_size=sizes, modulo=True, output=str(tmp_path / "view"))
    assert sorted(tmp_path.joinpath("npy").iterdir()) == before
    dataset = open_dataset(tmp_path / "view")
    for day, stored in ids.items():
        np.testing.assert_array_equal(StoredDay(dataset, day).take(slice(0, 50)).ids, stored % sizes)
        np.testing.assert_array_equal(StoredDay(dataset, day).take(np.array([7, 2])).ids, stored[[7, 2]] % sizes)
    with pytest.raises(ConfigError, match="--modulo needs --table-size"):
        recmill.adopt(tmp_path / "npy", modulo=True)
    write_npy_days(tmp_path / "other", 50, 9)
    with pytest.raises(DataError, match="is not a link to"):
        recmill.adopt(tmp_path / "other", output=str(tmp_path / "view"))


@pytest.mark.parametrize("rows", [103, 82, 80, 25])
def test_each_process_gets_the_batches_of_torchrec_s_loader(rows: int, tmp_path: Path) -> None:
    pytest.importorskip("iopath", reason="TorchRec's reader needs iopath")
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    sizes = [*range(3, 29)]
    write_npy_days(tmp_path / "npy", rows, 2**40)
    flags = ["--in_memory_binary_criteo_path", str(tmp_path / "npy"), "--batch_size", "10"]
    flags += ["--num_embeddings_per_feature", ",".join(map(str, sizes))]
    plan = plan_like("dlrm_main.py", flags, run=str(tmp_path / "run"), procs=4)
    recmill.adopt(**plan.steps[0].arguments)
    config = load_config(trained_config(plan))
    dataset = open_dataset(config.settings.data.path)
    for rank in range(4):
        files = [[str(tmp_path / "npy" / f"day_0_{part}.npy")] for part in ("dense", "sparse", "labels")]
        theirs = InMemoryBinaryCriteoIterDataPipe("train", *files, batch_size=10, rank=rank, world_size=4, hashes=sizes)
        ours = build_source(config, dataset, rank, 4).train_batches(0, 0)
        for expected, found in zip(theirs, ours, strict=True):
            real = int(found.weight())
            assert real == len(expected.labels)
            assert found.dense_BF[:real].tolist() == expected.dense_features.tolist()
            assert found.labels_B[:real].tolist() == expected.labels.tolist()
            ids = found.sparse.values().reshape(26, -1)[:, :real]
            assert ids.tolist() == expected.sparse_features.values().reshape(26, -1).tolist()


def test_files_that_are_adopted_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_npy_days(tmp_path / "npy", 60, 2**31)
    small = "--num_embeddings 40 --dense_arch_layer_sizes 8,4 --embedding_dim 4 --over_arch_layer_sizes 8,1"
    flags = [*small.split(), "--in_memory_binary_criteo_path", str(tmp_path / "npy"), "--learning_rate", "0.1"]
    plan = plan_like("dlrm_main.py", flags)
    run_like(plan)
    results = Path(plan.steps[-1].arguments["run"]) / "results.json"
    first = results.read_bytes()
    for file in (tmp_path / "npy").iterdir():
        file.touch()
    run_like(plan_like("dlrm_main.py", flags))
    assert results.read_bytes() == first


def words(program: str, *arguments: str) -> list[str]:
    return plan_like(program, arguments).steps[0].words[1:]


def test_torchrec_s_data_scripts_are_ways_to_prepare_criteo() -> None:
    fixed = ["--compat", "torchrec-fixed"]
    paths = ["--input_dir", "a", "--output_dir", "b"]
    prepared = ["prepare", "criteo", "--input", "a", "--output", "b", *fixed]
    assert words("npy_preproc_criteo", *paths) == [*prepared, "--ids", "mod", "--source", "1tb"]
    kaggle = words("npy_preproc_criteo", *paths, "--dataset_name", "criteo_kaggle")
    assert kaggle == [*prepared, "--ids", "mod", "--source", "kaggle"]
    contiguous = words("contiguous_preproc_criteo", *paths, "--frequency_threshold", "3")
    assert contiguous == [*prepared, "--min-frequency", "3"]
    shuffled = ["--input_dir_labels_and_dense", "a", "--input_dir_sparse", "c", "--output_dir_shuffled", "b"]
    expected = [*prepared, "--sparse-input", "c", "--ids", "mod", "--shuffle", "global", "--seed", "5"]
    assert words("shuffle_preproc_criteo", *shuffled, "--random_seed", "5") == expected
    refused = problem(*shuffled, "--output_dir_full_set", "d", program="shuffle_preproc_criteo")
    assert refused.startswith(
        "shuffle_preproc_criteo.py: --output_dir_full_set is not offered: it holds ids as float32"
    )
    assert "the following arguments are required: --output_dir" in problem(*paths[:2], program="npy_preproc_criteo")
    at_once = words("process_Criteo_1TB_Click_Logs_dataset.sh", "a", "tmp", "b")
    assert at_once == [*prepared, "--min-frequency", "0", "--shuffle", "global"]


def test_what_is_shown_are_commands_that_exist(run_cli: RunCli) -> None:
    sizes = ",".join(["9"] * 26)
    arguments = ["--in_memory_binary_criteo_path", "a", "--output_path", "b", "--multi_hot_sizes", sizes]
    flags = [*arguments, "--num_embeddings_per_feature", sizes, "--multi_hot_distribution_type", "pareto"]
    shown = words("materialize_synthetic_multihot_dataset", *flags)
    assert shown[-6:] == ["--table-size", sizes, "--multi-hot", sizes, "--multi-hot-distribution", "pareto"]
    assert "a: no such file or directory. --input is where" in run_cli(*shown).stderr  # it was parsed


def test_polaris_scripts_read_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words("./1_split_dataset.sh", "a", "b") == [
        "split",
        "--input",
        "a/day_0",
        "--output",
        "b",
        "--lines",
        "5000000",
    ]
    assert "the variable DATASET_DIR is not set" in problem(program="2_preprocess_dataset.sh")
    monkeypatch.setenv("DATASET_DIR", str(tmp_path))
    assert words("2_preprocess_dataset.sh")[3:6] == [str(tmp_path), "--output", str(tmp_path / "criteo1tb_final")]
    (tmp_path / "criteo1tb_split").mkdir()
    assert words("2_preprocess_dataset.sh")[3] == str(tmp_path / "criteo1tb_split")
    monkeypatch.setenv("WORKDIR", "/w")
    monkeypatch.setenv("PBS_JOBID", "12.polaris-pbs")
    monkeypatch.setenv("LEARNING_RATE", "0.5")
    plan = plan_like("3_train.sh", [], procs=4)
    config = trained_config(Plan(plan.steps[:2]))
    assert plan.steps[1].arguments["run"] == "/w/dlrm/results/12"
    assert plan.steps[2].words == ["recmill", "trace", "/w/dlrm/results/12"]
    assert (config["train"]["global_batch_size"], config["train"]["num_epochs"]) == (4 * 8192, 3)
    assert (config["optim"]["dense"]["lr"], config["data"]["order"]) == (0.5, "batch")
    assert (config["model"]["embedding_dim"], config["model"]["top_mlp"]) == (128, [1024, 1024, 512, 256])
    monkeypatch.setenv("EPOCHS", "many")
    assert "EPOCHS=many is not a number" in problem(program="3_train.sh")
