import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import model_validator

from recmill.config import Section, differences, fingerprint, load_config, to_toml
from recmill.config.compare import changeable_keys
from recmill.environment import config_variables
from recmill.errors import ConfigError

GOOD: dict[str, Any] = {"data": {"path": "data/clicks"}, "model": {"name": "dlrm"}}


def schedule(**keys: Any) -> dict[str, Any]:
    return {**GOOD, "optim": {"schedule": keys}}


def problem(values: dict[str, Any], overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(values, overrides)
    return str(caught.value)


def test_three_mistakes_are_reported_at_once_with_file_key_and_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\npath = "d"\n[model]\nname = "dlmr"\n[train]\nnum_epoch = 3\nglobal_batch_size = "many"\n',
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    text = str(caught.value)
    assert text.startswith("3 problems")
    assert f"{file}: unknown key 'train.num_epoch'. Did you mean 'train.num_epochs'?" in text
    assert f"{file}: 'train.global_batch_size': should be a valid integer, got 'many'." in text
    assert f"{file}: 'model.name': unknown model 'dlmr'. Did you mean 'dlrm'?" in text


def test_mistakes_in_the_model_s_own_section_are_found_with_the_others() -> None:
    text = problem({"data": {"path": "d", "ordre": 1}, "model": {"name": "dlrm", "embeding_dim": 8}})
    assert "unknown key 'model.embeding_dim'. Did you mean 'model.embedding_dim'?" in text
    assert "unknown key 'data.ordre'. Did you mean 'data.order'?" in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": {"name": "dlrm"}}, "'data.path' is missing. Directory of the prepared dataset"),
        ({**GOOD, "tables": {"store": "device_men"}}, "unknown value 'device_men'. Did you mean 'device_mem'?"),
        ({**GOOD, "tables": {"stores": {"C1": "ssd"}}}, "'tables.stores.C1': unknown value 'ssd'"),
        ({**GOOD, "tables": {"path": "/ssd"}}, "tables.path has no meaning without a table in 'cached_ssd'"),
        (
            {**GOOD, "tables": {"cache_memory_budget_mb": 9}},
            "tables.cache_memory_budget_mb has no meaning for tables.store = 'device_mem'",
        ),
        ({**GOOD, "sharding": {"default": "rowwise"}}, "unknown value 'rowwise'. Did you mean 'row_wise'?"),
        (
            {**GOOD, "sharding": {"tables": {"C1": "rowwise"}}},
            "'sharding.tables.C1': unknown value 'rowwise'. Did you mean 'row_wise'?",
        ),
        ({**GOOD, "sharding": {"tables": {"C1": 3}}}, "'sharding.tables.C1': unknown value '3'"),
        ({**GOOD, "sharding": {"tables": "C1"}}, "'sharding.tables': should be an object, got 'C1'"),
        (
            {**GOOD, "eval": {"protocols": ["full", "pop-1"]}},
            "or uni<N> with 1 to 999,999 negatives, like 'pop100'",
        ),
        ({**GOOD, "optim": {"dense": {"lr": 0}}}, "'optim.dense.lr': should be greater than 0, got 0."),
        ({**GOOD, "optim": {"tables": {"lr": 1e308}}}, "'optim.tables.lr': should be less than or equal to 3"),
        ({**GOOD, "optim": {"dense": {"lr": "fast"}}}, "should be a valid number, got 'fast'"),
        ({**GOOD, "optim": {"dense": {"lr": float("inf")}}}, "'optim.dense.lr': should be a finite number"),
        ({**GOOD, "train": {"seed": 2**64}}, "'train.seed': should be less than"),
        ({**GOOD, "train": {"hang_seconds": 1e-320}}, "'train.hang_seconds': should be greater than or equal to 1"),
        ({**GOOD, "train": {"hang_seconds": 2**63}}, "'train.hang_seconds': should be less than or equal to 1"),
        ({**GOOD, "train": {"join_seconds": 1e300}}, "'train.join_seconds': should be less than or equal to 1"),
        ({**GOOD, "train": {"seed": True}}, "'train.seed': should be a valid integer, got True"),
        ({**GOOD, "train": 3}, "'train': should be an object, got 3"),
        (
            {"data": {"path": "d"}},
            "a [model] section with a name is missing. Known: bert4rec, dcnv2, deepfm, dlrm, finalmlp, fm, logistic, "
            "projection, sasrec, two_tower.",
        ),
        ({**GOOD, "modle": {}}, "unknown key 'modle'. Did you mean 'model'?"),
        ({**GOOD, "train": {"precision": "bf16"}}, "'train.precision': unknown value 'bf16'."),
        ({**GOOD, "train": {"loss_scale": -1}}, "'train.loss_scale': should be greater than or equal to 0, got -1"),
        ({**GOOD, "checkpoint": {"keep": 1}}, "'checkpoint.keep': should be greater than or equal to 2, got 1"),
        *(
            (
                schedule(name="linear", warmup_steps=value),
                f"warmup_steps': should be a whole number, or a share of the run like '10%', got {value!r}.",
            )
            for value in (0.1, -1, True, "0%", "101%", "10 %", "10", "1e1%", "to the end")
        ),
        ({**GOOD, "eval": {"every_steps": 0.1}}, "'eval.every_steps': should be a whole number, or a share"),
        (
            schedule(name="linear", decay_steps="the end"),
            "'optim.schedule.decay_steps': should be a whole number, or",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(values: dict[str, Any], expected: str) -> None:
    assert expected in problem(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**GOOD, "model": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [16]}}, "model.bottom_mlp ends with 16"),
        (
            {**GOOD, "model": {"name": "bert4rec", "embedding_dim": 8, "num_heads": 3}},
            "not a multiple of model.num_heads",
        ),
        ({**GOOD, "model": {"name": "bert4rec", "max_length": 5, "sliding_step": 6}}, "would never be trained on"),
        (
            {**GOOD, "model": {"name": "sasrec", "sliding_step": 2.5}},
            "model.sliding_step = 2.5 is neither a number of items nor a share below 1",
        ),
        (
            {**GOOD, "model": {"name": "bert4rec", "mask_random": 0.6, "mask_keep": 0.5}},
            "model.mask_random = 0.6 and model.mask_keep = 0.5 add up to more than",
        ),
        (
            {**GOOD, "model": {"name": "sasrec", "num_negatives": 9}},
            "model.num_negatives has no meaning for model.loss = 'softmax'. "
            "Leave it out or at its default, or use 'sampled_softmax' or",
        ),
        (
            {**GOOD, "model": {"name": "sasrec", "loss": "sampled_softmax", "gbce_t": 0.5}},
            "model.gbce_t has no meaning for model.loss = 'sampled_softmax'. "
            "Leave it out or at its default, or use 'gbce'.",
        ),
        (
            {**GOOD, "model": {"name": "sasrec", "loss": "gbce", "label_smoothing": 0.1}},
            "model.label_smoothing has no meaning for model.loss = 'gbce'",
        ),
        (
            {**GOOD, "model": {"name": "sasrec", "loss": "gbce", "exclude_seen": True}},
            "model.exclude_seen has no meaning for model.loss = 'gbce'",
        ),
        (
            {**GOOD, "model": {"name": "sasrec", "label_smoothing": 0.1, "exclude_seen": True}},
            "also to those that model.exclude_seen leaves out. Remove one of the two.",
        ),
        (
            {"data": {"path": "d", "remainder": "torchrec"}, "model": {"name": "sasrec"}},
            "data.remainder = 'torchrec' is for click logs, and 'sasrec' reads histories",
        ),
        (
            {**GOOD, "optim": {"tables": {"name": "ftrl"}}, "train": {"device": "cuda"}},
            "optim.tables.name = 'ftrl' on CUDA: FBGEMM has no FTRL",
        ),
        (
            {**GOOD, "optim": {"tables": {"name": "sgd", "weight_decay": 0.1}}, "train": {"device": "cuda"}},
            "optim.tables.weight_decay with optim.tables.name = 'sgd' on CUDA: FBGEMM decays rows only with 'adam'",
        ),
        (
            {**GOOD, "optim": {"tables": {"name": "adam", "lambda1": 0.1}}},
            "optim.tables.lambda1 has no meaning for optim.tables.name = 'adam'. Remove it.",
        ),
        (
            {"data": {"path": "d", "train_on_validation": True}, "model": {"name": "sasrec"}, "eval": {"patience": 2}},
            "data.train_on_validation with eval.patience: validation says nothing about a run",
        ),
        (
            {
                "data": {"path": "d", "train_on_validation": True},
                "model": {"name": "sasrec"},
                "optim": {"schedule": {"name": "plateau"}},
            },
            "data.train_on_validation with optim.schedule.name = 'plateau': validation says nothing about",
        ),
        (
            schedule(name="mlperf", warmup_steps=9, decay_start_step=8, decay_steps=1),
            "before the end of warmup, at step 9",
        ),
        (
            schedule(name="linear", warmup_steps="10%", decay_start_step="9.9%", decay_steps="to the end"),
            "optim.schedule.decay_start_step = 9.9% is before the end of warmup, at step 10%",
        ),
        (schedule(name="step"), "needs optim.schedule.step_size"),
        (schedule(warmup_steps=5), "warmup_steps has no meaning for optim.schedule.name = 'constant'"),
        (schedule(name="step", step_size=2, decay_steps=5), "decay_steps has no meaning for"),
        (schedule(name="oneflow", decay_start_step=5), "without optim.schedule.decay_steps does nothing"),
        (
            schedule(name="oneflow", decay_steps=5, end_lr=0.01),
            "end_lr = 0.01 is above optim.dense.lr = 0.001",
        ),
        ({**GOOD, "train": {"loss_scale": 1024}}, "loss_scale = 1024 has no meaning for train.precision = 'float32'"),
        (
            {**GOOD, "train": {"loss_scale": 8, "precision": "bfloat16"}},
            "train.precision = 'bfloat16', whose gradients do not vanish. Remove it, or use 'float16'.",
        ),
        ({**GOOD, "optim": {"dense": {"name": "sgd", "eps": 1e-8}}}, "optim.dense.eps has no meaning for"),
        ({**GOOD, "sharding": {"default": "column_wise"}}, "the run would depend on the number of processes"),
        (
            {**GOOD, "sharding": {"tables": {"C1": "grid"}}},
            "sharding.tables.C1 = 'grid' with optim.tables.name = 'rowwise_adagrad'",
        ),
        ({**GOOD, "sharding": {"mode": "ddp", "default": "row_wise"}}, "keeps every table on every process, but"),
        ({**GOOD, "sharding": {"mode": "ddp", "tables": {"C1": "data_parallel"}}}, "Remove them, or the mode"),
    ],
)
def test_contradictions_are_errors(values: dict[str, Any], expected: str) -> None:
    assert expected in problem(values)


def test_contradictions_are_reported_together_with_all_other_problems(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\npath = "d"\nordre = "file"\n'
        '[model]\nname = "bert4rec"\nnum_heads = 3\n'
        '[optim.dense]\nname = "sgd"\neps = 1e-8\nlr = "fast"\n'
        "[optim.schedule]\nwarmup_steps = 5\ngamma = 0.5\n"
        "[train]\nloss_scale = 8\n"
        "[eval]\ntarget_auroc = 0.8\ngroup = 'user'\n",
        encoding="utf-8",
    )
    expected = [
        f"{file}: unknown key 'data.ordre'. Did you mean 'data.order'?",
        f"{file}: 'optim.dense.lr': should be a valid number, got 'fast'.",
        f"{file}: optim.dense.eps has no meaning for optim.dense.name = 'sgd'.",
        f"{file}: optim.schedule.warmup_steps has no meaning for optim.schedule.name = 'constant'.",
        f"{file}: optim.schedule.gamma has no meaning for optim.schedule.name = 'constant'.",
        f"{file}: train.loss_scale = 8 has no meaning for train.precision = 'float32'",
        "--set: checkpoint.row_bits = 8 without checkpoint.full_every does nothing.",
        f"{file}: model.embedding_dim = 64 is not a multiple of model.num_heads = 3.",
        f"{file}: eval.target_auroc: model 'bert4rec' is not measured by AUROC.",
        f"{file}: eval.group: model 'bert4rec' is not measured by AUROC.",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["checkpoint.row_bits=8"])
    text = str(caught.value)
    assert text.startswith(f"{len(expected)} problems in the config:\n")
    assert [text.count(line) for line in expected] == [1] * len(expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**GOOD, "train": {"loss_scale": 8, "precision": "half"}}, "'train.precision': unknown value 'half'"),
        ({**GOOD, "train": {"loss_scale": 8, "precison": "float16"}}, "unknown key 'train.precison'"),
        ({**GOOD, "optim": {"schedule": {"name": "stepp", "step_size": 3}}}, "unknown value 'stepp'"),
    ],
)
def test_a_contradiction_with_a_key_that_has_a_problem_of_its_own_is_not_reported(
    values: dict[str, Any], expected: str
) -> None:
    text = problem(values)
    assert expected in text
    assert len(text.splitlines()) == 1


def test_a_name_that_resembles_none_gets_no_suggestion() -> None:
    text = problem({**GOOD, "optim": {"foo": 1}})
    assert text == "config: unknown key 'optim.foo'. Known: optim.dense, optim.schedule, optim.tables."


def test_an_error_of_a_model_s_own_validator_is_one_of_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    class Checked(Section):
        size: int = 1

        @model_validator(mode="after")
        def check(self) -> "Checked":
            raise ValueError("model.size is never right.")

    monkeypatch.setattr("recmill.models.dlrm.Config", Checked)
    text = problem({**GOOD, "train": {"sead": 1}})
    assert text.startswith("2 problems")
    assert "config: model.size is never right." in text


def test_a_key_of_several_types_has_one_problem() -> None:
    text = problem({**GOOD, "model": {"name": "sasrec", "sliding_step": "far"}})
    assert text.startswith("config: 'model.sliding_step': should be a valid number, got 'far'.")


def test_defaults_then_file_then_set(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\npath = "d"\n[model]\nname = "dlrm"\n[optim.dense]\nlr = 0.5\n', encoding="utf-8")
    config = load_config(file, ["optim.dense.lr=0.25", "model.top_mlp=[4, 2]", "data.order=file"])
    assert config.settings.optim.dense.lr == 0.25
    assert config.settings.optim.dense.name == "adam"  # the default
    assert config.as_dict()["model"]["top_mlp"] == [4, 2]
    assert config.settings.data.order == "file"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.dense.lr", "--set optim.dense.lr: expected key=value"),
        ("train.sead=3", "--set: unknown key 'train.sead'. Did you mean 'train.seed'?"),
        ("train={seed=3}", "'train' is a section: set its keys one by one"),
        ("train.seed=1\ntrain.num_epochs=3", "--set: 'train.seed': should be a valid integer"),
        ("a.b.c=1", "--set: unknown key 'a'"),
        ("lr=1", "--set: unknown key 'lr'. Did you mean 'optim.dense.lr' or 'optim.tables.lr'? Known: checkpoint"),
        ("optim.lr=1", "--set: unknown key 'optim.lr'. Did you mean 'optim.dense.lr' or 'optim.tables.lr'?"),
        ("batch_size=1", "Did you mean 'eval.global_batch_size' or 'train.global_batch_size'?"),
        ("embedding_dim=8", "--set: unknown key 'embedding_dim'. Did you mean 'model.embedding_dim'?"),
        ("eval.ks=[0]", "--set: 'eval.ks.0': should be greater than 0"),
        ("data.path.x=3", "'path' in '--set data.path.x=3' is a value, not a section"),
    ],
)
def test_a_wrong_set_says_so(override: str, expected: str) -> None:
    assert expected in problem(GOOD, (override,))


@pytest.mark.parametrize("text", ["[data", "\udcff", f"[train]\nseed = {'9' * 5000}"])
def test_a_file_that_is_not_toml_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(file)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    config = load_config(GOOD)
    file = tmp_path / "run.toml"
    file.write_text("\ufeff" + to_toml(config), encoding="utf-8")
    assert load_config(file) == config


def test_too_deep_nesting_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text in (f"x = {'[' * 5000}", f"{'a.' * 5000}a = 1", f"{'a.' * 50_000}a = 1"):  # the last would need 10 GB
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"run\.toml or --set: .* nested too deeply"):
            load_config(file)
        with pytest.raises(ConfigError, match=r"config or --set: .* nested too deeply"):
            load_config(GOOD, [text])


def test_only_a_regular_file_of_a_sensible_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.toml").touch()
    os.truncate(tmp_path / "large.toml", 2_000_000)
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "large.toml"):
        with pytest.raises(ConfigError, match=f"{path} is not a file of at most 1,000,000 bytes"):
            load_config(path)
    (tmp_path / "memory.toml").symlink_to("/proc/self/mem")  # a regular file whose first byte cannot be read
    with pytest.raises(ConfigError, match=rf"{tmp_path}/memory.toml: Input/output error\."):
        load_config(tmp_path / "memory.toml")


def test_a_long_value_is_cut_and_long_lists_of_problems_are_too() -> None:
    text = problem(GOOD, (f"train.seed={'9' * 5000}",))
    assert "--set: 'train.seed': should be a valid integer, got '9999999999" in text
    assert len(text) < 400
    text = problem({"model": {"name": "dlrm"}, "data": {"path": "x"}, **{f"key{number}": 1 for number in range(2000)}})
    assert text.startswith("2000 problems in the config:\n  config: unknown key 'key0'.")
    assert text.endswith("\n  and 1,990 more")
    assert len(text.splitlines()) == 12


def test_an_empty_data_path_is_a_config_error() -> None:
    assert "--set: 'data.path': String should have at least 1 character, got ''" in problem(GOOD, ("data.path=",))


def test_a_run_or_a_dataset_in_place_of_a_config_is_named_with_the_command_that_was_meant(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value).replace(str(tmp_path), "here")

    for name, files in {"a run": ["config.toml"], "plays": ["dataset.json", "users.parquet"], "other": []}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert "To resume it: recmill train 'here/a run/config.toml' --run 'here/a run';" in error(tmp_path / "a run")
    assert "recmill train own/sasrec --set data.path=here/plays --run runs/plays." in error(tmp_path / "plays")
    assert error(tmp_path / "other") == "here/other is a directory. Name the run config (.toml) itself."


def test_another_model_name_names_the_config_of_that_model_instead_of_its_nearest_key() -> None:
    def error(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config("own/dlrm", overrides)
        return str(caught.value)

    assert error("model.name=deepfm") == (
        "--set: 'model.name': 'deepfm' has no model.top_mlp, which own/dlrm has for 'dlrm'. Instead, train own/deepfm, "
        "or edit [model] in a copy: recmill configs copy own/dlrm."
    )
    both = error("model.name=deepfm", "model.deep_mpl=[8]")
    assert "train own/deepfm" in both and "Did you mean 'model.deep_mlp'?" in both
    assert load_config("own/dlrm", ["model.name=dcnv2"]).model_name == "dcnv2"


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    schema = {"label": {"column": "click"}, "feature": []}
    with pytest.raises(ConfigError, match=r"is the schema of a click log") as caught:
        load_config(schema)
    for command in (
        "recmill prepare clicks --schema config --input LOG --output data/mine;",
        "recmill train own/dlrm --set data.path=data/mine --run runs/mine.",
    ):
        assert command in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nope.toml")


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "projection"])
def test_the_dense_vector_is_as_wide_as_the_tables_unless_its_widths_are_given(name: str, tmp_path: Path) -> None:
    model = {"name": name}
    wide = load_config({**GOOD, "model": model}, ["model.embedding_dim=8"])
    assert wide.as_dict()["model"]["bottom_mlp"] == [64, 8]
    file = tmp_path / "config.toml"
    file.write_text(to_toml(wide), encoding="utf-8")
    assert load_config(file) == wide
    assert load_config({**GOOD, "model": model}).as_dict()["model"]["bottom_mlp"] == [64, 16]
    given = problem({**GOOD, "model": {**model, "bottom_mlp": [64, 16]}}, ("model.embedding_dim=8",))
    assert "model.bottom_mlp ends with 16, but model.embedding_dim is 8" in given
    other = problem({**GOOD, "model": model}, ("model.embedding_dim=8", "train.seed=x"))
    assert "bottom_mlp" not in other


@pytest.mark.parametrize(("value", "meant"), [("64,32", "[64, 32]"), ("64", "[64]"), ("a,b", '["a", "b"]')])
def test_a_list_without_brackets_is_shown_with_them(value: str, meant: str) -> None:
    found = problem(GOOD, (f"model.bottom_mlp={value}",))
    assert f"--set: 'model.bottom_mlp' is a list: write 'model.bottom_mlp={meant}'. Layer widths" in found


def test_the_written_config_is_read_back_the_same(tmp_path: Path) -> None:
    config = load_config(GOOD, ["train.seed=7", "model.bottom_mlp=[32, 16]"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file) == config


def test_the_keys_that_may_change_on_resume_are_these() -> None:
    assert changeable_keys() == {
        "data.path",
        "data.limit_val_batches",
        "data.limit_test_batches",
        "data.prefetch",
        "data.multi_hot.collect_frequencies",
        "tables.store",
        "tables.cache_memory_budget_mb",
        "tables.path",
        "tables.disk_budget_gb",
        "tables.lookahead",
        "tables.stores",
        "tables.dynamic.*.max_rows",
        "sharding",
        "train.device",
        "train.kernels",
        "train.num_epochs",
        "train.max_steps",
        "train.log_every_steps",
        "train.check_replicas_every",
        "train.stop_signals",
        "train.max_restarts",
        "train.hang_seconds",
        "train.join_seconds",
        "eval",
        "checkpoint",
        "observe",
    }


def test_a_config_whose_changes_are_allowed_on_resume_is_the_same_run() -> None:
    old = load_config(GOOD)
    allowed = ["train.num_epochs=9", "sharding.default=row_wise", "sharding.tables.C1=table_wise", "eval.ks=[3]"]
    new = load_config(GOOD, allowed)
    assert differences(old, new) == []
    assert fingerprint(old) == fingerprint(new)


def test_a_config_with_any_other_change_is_another_run() -> None:
    old = load_config(GOOD)
    new = load_config(GOOD, ["train.seed=9", "train.num_epochs=9"])
    assert differences(old, new) == ["train.seed: 1 -> 9"]
    assert fingerprint(old) != fingerprint(new)


def test_the_fingerprint_of_a_config_stays_the_same_from_version_to_version() -> None:
    """Checkpoints hold it: another value would refuse to resume them."""
    assert fingerprint(load_config(GOOD)) == "1eb0dc88389baf6d"
    assert fingerprint(load_config(GOOD, ["train.seed=3"])) == "2ef9a1c628ebcbf1"


def test_the_rules_of_a_dynamic_table_are_part_of_a_run_but_not_its_room() -> None:
    of_c1 = "tables.dynamic.C1."
    old = load_config(GOOD, [f"{of_c1}max_rows=9", f"{of_c1}min_count=2"])
    larger = load_config(GOOD, [f"{of_c1}max_rows=10", f"{of_c1}min_count=2"])
    assert differences(old, larger) == [] and fingerprint(old) == fingerprint(larger) != fingerprint(load_config(GOOD))
    other = load_config(GOOD, [f"{of_c1}max_rows=10", f"{of_c1}min_count=3"])
    assert differences(old, other) == ["tables.dynamic.C1.min_count: 2 -> 3"]


def test_all_that_dynamic_tables_cannot_do_is_reported_at_once() -> None:
    text = problem(
        {
            "data": {"path": "d"},
            "model": {"name": "sasrec"},
            "tables": {"dynamic": {"all": {"max_rows": 5, "min_count": 2, "admit_probability": 0.5}}},
            "sharding": {"default": "column_wise", "tables": {"item": "data_parallel"}},
            "train": {"device": "cuda", "kernels": "torch"},
            "checkpoint": {"full_every": 2, "row_bits": 8},
        }
    )
    for fact in (
        "tables.dynamic.all.min_count with tables.dynamic.all.admit_probability: ids are admitted by one of them",
        "sharding.default = 'column_wise' with tables.dynamic.all",
        "sharding.tables.item = 'data_parallel' with tables.dynamic.all",
        "tables.dynamic.all with train.device = 'cuda': ids are looked up in host memory",
        "train.kernels = 'torch': it is one of our own kernels",
        "checkpoint.row_bits = 8: such rows are saved exactly",
        "tables.dynamic: the items of model 'sasrec' must be known in advance",
    ):
        assert fact in text
    beside = {"store": "cached_ssd", "cache_memory_budget_mb": 9, "stores": {"C1": "device_mem"}}
    text = problem({**GOOD, "tables": {**beside, "dynamic": {"all": {"max_rows": 5}}}})
    assert "dynamic tables beside tables of another store are not supported" in text
    text = problem({**GOOD, "tables": {"dynamic": {"C1": {"min_cuont": 2}}}})
    assert "unknown key 'tables.dynamic.C1.min_cuont'. Did you mean 'tables.dynamic.C1.min_count'?" in text
    assert "'tables.dynamic.C1.max_rows' is missing" in text


def test_all_that_cached_ssd_cannot_do_is_reported_at_once() -> None:
    text = problem(
        {
            "data": {"path": "d"},
            "model": {"name": "sasrec", "head": "tied"},
            "tables": {"store": "cached_ssd"},
            "sharding": {"default": "column_wise", "tables": {"item": "data_parallel"}},
            "train": {"device": "cuda", "kernels": "torch"},
            "checkpoint": {"full_every": 2, "row_bits": 8},
        }
    )
    for fact in (
        "tables.store = 'cached_ssd' needs tables.cache_memory_budget_mb",
        "sharding.default = 'column_wise' with tables.store = 'cached_ssd'",
        "sharding.tables.item = 'data_parallel' with tables.store = 'cached_ssd'",
        "train.device = 'cuda': it would need FBGEMM's SSD operators, which no published FBGEMM has",
        "train.kernels = 'torch': it is one of our own kernels",
        "checkpoint.row_bits = 8: such rows are saved exactly",
        "model.head = 'tied' with tables.store = 'cached_ssd': it needs all rows",
    ):
        assert fact in text
    in_memory = {"tables": {"item": "data_parallel"}}
    load_config(
        {
            **GOOD,
            "tables": {"store": "cached_ssd", "cache_memory_budget_mb": 9, "stores": {"item": "device_mem"}},
            "sharding": in_memory,
        }
    )


def test_a_limit_of_many_digits_is_printed_as_a_short_number() -> None:
    with pytest.raises(ConfigError, match=r"should be less than or equal to 3e\+38, got") as caught:
        load_config({"data": {"path": "d"}, "model": {"name": "dlrm"}, "optim": {"dense": {"lr": 1e39}}})
    assert "000000" not in str(caught.value)


def test_variables_come_after_the_file_and_before_set() -> None:
    variables = {
        "RECMILL__TRAIN__SEED": "7",
        "RECMILL__OPTIM__DENSE__LR": "0.5",
        "RECMILL__MODEL__TOP_MLP": "[4, 2]",
        "RECMILL__SHARDING__TABLES__C3": "row_wise",
    }
    in_file = {**GOOD, "train": {"seed": 5, "num_epochs": 3}}
    config = load_config(in_file, ["optim.dense.lr=0.25"], variables)
    train = config.settings.train
    assert (train.seed, train.num_epochs, config.settings.optim.dense.lr) == (7, 3, 0.25)
    assert config.as_dict()["model"]["top_mlp"] == [4, 2]
    assert config.settings.sharding.tables == {"C3": "row_wise"}


def test_an_error_names_the_variable_that_caused_it() -> None:
    variables = {"RECMILL__TRAIN__SEDE": "1", "RECMILL__OPTIM": "2", "RECMILL__EVAL__PATIENCE": "x"}
    with pytest.raises(ConfigError) as caught:
        load_config({**GOOD, "optim": {"dense": {"lr": 0.1}}}, ["checkpoint.keep=0"], variables)
    for line in (
        "RECMILL__TRAIN__SEDE: unknown key 'train.sede'. Did you mean 'train.seed'?",
        "RECMILL__OPTIM=2: 'optim' is a section: set its keys one by one.",
        "RECMILL__EVAL__PATIENCE: 'eval.patience': should be a whole number, or a share of the run like '10%'",
        "--set: 'checkpoint.keep': should be greater than",
    ):
        assert line in str(caught.value)


def test_only_doubled_underscores_set_keys_and_none_in_a_job_script_whose_config_has_them() -> None:
    variables = {"RECMILL__TRAIN__SEED": "1", "RECMILL_NODES": "2", "RECMILL_FAIL": "x", "PATH": "/"}
    assert config_variables(variables) == {"RECMILL__TRAIN__SEED": "1"}
    assert config_variables(variables | {"RECMILL_ERRORS": "/jobs/1.errors"}) == {}
