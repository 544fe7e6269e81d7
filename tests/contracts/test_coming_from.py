"""The page for those who come from other scripts has all their flags, and names nothing of ours that is not there."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from recmill import registry
from recmill.config import RunSections, load_config
from recmill.config.sections import Section

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
HEADINGS = {"dlrm_main.py": "## `dlrm_main.py`", "dlrm_train_eval.py": "## `dlrm_train_eval.py`"}
FLAGS = {
    "dlrm_main.py": """
        epochs batch_size drop_last_training_batch test_batch_size limit_train_batches limit_val_batches
        limit_test_batches dataset_name num_embeddings num_embeddings_per_feature dense_arch_layer_sizes
        over_arch_layer_sizes embedding_dim interaction_type interaction_branch1_layer_sizes
        interaction_branch2_layer_sizes dcn_num_layers dcn_low_rank_dim undersampling_rate seed pin_memory mmap_mode
        in_memory_binary_criteo_path synthetic_multi_hot_criteo_path learning_rate eps adagrad shuffle_batches
        shuffle_training_set validation_freq_within_epoch validation_auroc evaluate_on_epoch_end
        evaluate_on_training_end collect_multi_hot_freqs_stats multi_hot_sizes multi_hot_distribution_type
        multi_hot_size multi_hot_min_table_size lr_warmup_steps lr_decay_start lr_decay_steps change_lr
        lr_change_point lr_after_change_point print_lr allow_tf32 print_sharding_plan print_progress output_dir""",
    "dlrm_train_eval.py": """
        data_dir persistent_path table_size_array store_type cache_memory_budget_mb one_embedding_key_type
        embedding_vec_size bottom_mlp top_mlp disable_fusedmlp disable_interaction_padding
        disable_dense_input_padding interaction_itself train_batch_size train_batches learning_rate warmup_batches
        decay_start decay_batches loss_print_interval eval_interval eval_batches eval_batch_size model_load_dir
        model_save_dir save_model_after_each_eval save_initial_model amp loss_scale_policy
        input_dir output_dir spark_tmp_dir spark_driver_memory_gb mod_idx num_test_examples export_dataset_info""",
}


def chapter(script: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(HEADINGS[script])[1].split("\n## ")[0]


@pytest.mark.parametrize("script", FLAGS)
def test_every_flag_has_its_line(script: str) -> None:
    first_cells = re.findall(r"^\| (`--[^|]*) \|", chapter(script), flags=re.M)
    found = [flag for cell in first_cells for flag in re.findall(r"`--(\w+)`", cell)]
    assert sorted(found) == sorted(FLAGS[script].split())


def keys(section: type[Section], prefix: str) -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= keys(kind, f"{prefix}{name}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def test_every_key_exists_and_takes_the_value_that_is_named() -> None:
    known = keys(RunSections, "") | {"model.name"}
    for model in registry.MODELS:
        known |= keys(registry.load(registry.MODELS, model, "model").Config, "model.")
    sections = "|".join(["model", *RunSections.model_fields])
    named = re.findall(rf"`((?:{sections})\.[\w.]+)( = [^`]+)?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [key for key, _ in named if key not in known] == []
    for key, value in named:
        if value:
            needs = ["optim.schedule.step_size=9"] if value == ' = "step"' else []
            config = load_config({"data": {"path": "d"}, "model": {"name": "dlrm"}}, [*needs, f"{key}{value}"])
            found = config.as_dict()
            for part in key.split("."):
                found = found[part]
            assert found == tomllib.loads(f"value{value}")["value"]


@cache
def help_of(*command: str) -> str:
    program = str(Path(sys.executable).parent / "recmill")
    return subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True).stdout


def test_every_option_of_a_command_exists() -> None:
    named = re.findall(r"`recmill (prepare [\w-]+|[a-z]+)([^`]*)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    for command, rest in named:
        text = help_of(*command.split())
        assert [option for option in re.findall(r"--[\w-]+", rest) if option not in text] == []
