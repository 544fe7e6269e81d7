"""Every shipped config is valid, fits its data and has the published settings; every key is documented."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recmill import registry
from recmill.commands.assemble import model_module
from recmill.config import Settings, differences, load_config
from recmill.datasets.criteo.options import Options
from recmill.schema import ClicksDescription, SparseFeature
from recmill.training.advice import before_training
from recmill.training.schedule import RunSteps, learning_rate, run_steps

from .. import config_page

REPO = Path(__file__).parents[2]
CONFIGS = sorted(file for file in (REPO / "configs").rglob("*.toml") if file.parent.name != "clusters")
ANY_SIZE = ("own", "ml_1m", "criteo_kaggle")  # their schedules follow the size of the data


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: str(f.relative_to(REPO)))
def test_a_config_is_valid(file: Path) -> None:
    assert load_config(file).model_name in registry.MODELS


def test_every_model_has_a_config() -> None:
    assert {load_config(file).model_name for file in CONFIGS} == set(registry.MODELS)


def prepare_command(file: Path) -> dict[str, Any]:
    """Return the options of the command after `# Data:` in the first lines; a \\ at a line's end continues it."""
    text = file.read_text(encoding="utf-8").replace("\\\n#", " ")
    found = re.search(r"^# Data: (recmill prepare criteo .*)$", text, flags=re.M)
    assert found, "no prepare command"
    words = shlex.split(found[1])[3:]
    options: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        options[name] = [int(v) for v in value.split(",")] if name in ("table_size", "multi_hot") else value
    return options


@pytest.mark.parametrize("file", [f for f in CONFIGS if "criteo" in str(f)], ids=lambda f: str(f.relative_to(REPO)))
def test_a_network_builds_for_the_data_that_its_config_says_to_prepare(file: Path) -> None:
    """Tables are on the meta device, so they take no memory."""
    config, command = load_config(file), prepare_command(file)
    assert command.pop("output") == config.settings.data.path
    options = Options(**command)  # contradictions are errors
    found = re.search(r"^# Tables: ([\d,]+)$", file.read_text(encoding="utf-8"), flags=re.M)
    assert found, "no table sizes"
    sizes = [int(size) for size in found[1].split(",")]
    assert len(sizes) == 26
    if options.table_size:
        limits = options.table_size * (26 // len(options.table_size))
        assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    description = ClicksDescription(
        name="criteo",
        made_by="test",
        recipe={},
        files={},
        dense=[f"I{i}" for i in range(1, 14)],
        sparse=[SparseFeature(name=f"C{i}", rows=rows) for i, rows in enumerate(sizes, 1)],
        multi_hot=options.multi_hot or [],
        splits={},
    )
    network = model_module(config).build(config.model, description, torch.device("meta"))
    tables = [value for key, value in network.state_dict().items() if key.startswith("tables.")]
    assert all(table.is_meta for table in tables)
    assert sorted(len(table) for table in tables) == sorted(sizes)


HISTORIES = [f for f in CONFIGS if load_config(f).model_name in ("bert4rec", "sasrec")]


@pytest.mark.parametrize("file", HISTORIES, ids=lambda f: str(f.relative_to(REPO)))
def test_the_command_in_a_config_prepares_the_histories_that_it_reads(file: Path) -> None:
    found = re.search(r"^# Data: recmill prepare (\S+) (.*)$", file.read_text(encoding="utf-8"), flags=re.M)
    assert found, "no prepare command"
    name, words = found[1], found[2].split()
    flags = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    assert flags.pop("output") == load_config(file).settings.data.path
    assert flags.keys() <= registry.load(registry.DATASETS, name, "dataset").Options.model_fields.keys()


def rates(name: str) -> dict[int, float]:
    """Return the rate at the first step, in and after warmup, at the start and middle of the decay, and at the end."""
    settings = load_config(REPO / "configs" / "criteo_1tb" / name).settings
    optim = settings.optim
    assert (optim.tables.lr, optim.tables.name) == (optim.dense.lr, optim.dense.name)
    steps = (0, 1375, 2750, 49_315, 63_201, 74_999)
    resolved = run_steps(settings, 4_195_197_692 // settings.train.global_batch_size)
    return {step: learning_rate(optim.schedule, resolved, optim.dense.lr, step) for step in steps}


@pytest.mark.parametrize(
    ("name", "batches", "expected"),
    [
        ("sasrec.toml", 135, RunSteps(3375, 135, 200, 200, 3175, validation=675, checkpoint=675)),
        ("bert4rec.toml", 136, RunSteps(59_840, 136, 500, 500, 59_300, validation=6800, checkpoint=6800)),
    ],
)
def test_the_shares_in_a_config_are_the_steps_with_which_the_page_of_results_was_measured(
    name: str, batches: int, expected: RunSteps
) -> None:
    settings = load_config(REPO / "configs" / "ml_1m" / name).settings
    assert run_steps(settings, batches) == expected


@pytest.mark.parametrize("batches", [13, 2164])
@pytest.mark.parametrize(
    "file", [f for f in CONFIGS if f.parent.name in ANY_SIZE], ids=lambda f: str(f.relative_to(REPO))
)
def test_a_config_for_any_data_has_no_warning_whatever_the_number_of_steps(file: Path, batches: int) -> None:
    """13 batches of 64 are the small MovieLens, 2,164 are MovieLens 20M."""
    settings = load_config(file).settings
    assert [*before_training(settings, run_steps(settings, batches))] == []


def test_the_first_mlperf_dlrm_has_the_published_rates() -> None:
    """24 at batch 55,296: linear warmup over 2,750 steps, quadratic decay over 27,772 steps from step 49,315 on."""
    found = rates("dlrm_mlperf.toml")
    assert found[0] == 0
    assert (found[1375], found[2750], found[49_315], found[63_201]) == pytest.approx((12, 24, 24, 6))
    assert found[74_999] == pytest.approx(24 * (2088 / 27_772) ** 2)  # 2,088 steps of the decay are left
    train = load_config(REPO / "configs" / "criteo_1tb" / "dlrm_mlperf.toml").settings.train
    assert 4_195_197_692 / train.global_batch_size * 0.98 < train.max_steps < 4_195_197_692 / train.global_batch_size


def test_the_second_mlperf_dlrm_has_the_published_rate_and_target() -> None:
    assert set(rates("dcnv2_mlperf_v2.toml").values()) == {0.004}
    run = load_config(REPO / "configs" / "criteo_1tb" / "dcnv2_mlperf_v2.toml").settings
    assert (run.optim.dense.name, run.optim.dense.eps, run.optim.tables.eps) == ("adagrad", 1e-8, 1e-8)
    assert (run.train.global_batch_size, run.eval.target_auroc) == (65_536, 0.80275)


def test_the_page_has_every_key_with_its_default_and_help() -> None:
    page = config_page.PAGE.read_text(encoding="utf-8")
    expected = config_page.with_current_tables(page)
    outdated = [line for line in expected.splitlines() if line not in page.splitlines()]
    if page != expected:
        message = "docs/configs.md is outdated. Run `python -m tests.config_page`; it should say:\n"
        pytest.fail(message + "\n".join(outdated), pytrace=False)


def with_another_value(section: Any, key: str) -> Any:
    """Return a copy in which `key` has a value that no default equals; it need not be valid."""
    name, _, rest = key.partition(".")
    if isinstance(section, dict):  # of sections by name
        return section | {name: with_another_value(section[name], rest)}
    value = with_another_value(getattr(section, name), rest) if rest else "another value"
    return section.model_copy(update={name: value})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_page_lists_the_keys_that_may_change_on_resume() -> None:
    chapter = config_page.PAGE.read_text(encoding="utf-8").split("## What may change when a run is resumed")[1]
    listed = re.findall(r"`\[?(\w[\w.]+)\]?`", chapter.split("- ", 1)[1])
    expected = [
        key for key in config_page.fields(Settings) if f"{key}.".startswith(tuple(f"{name}." for name in listed))
    ]
    dynamic = {"NAME": {"max_rows": 5}}
    config = load_config({"data": {"path": "d"}, "model": {"name": "dlrm"}, "tables": {"dynamic": dynamic}})
    changeable = [
        key
        for key in config_page.fields(Settings)
        if not differences(config, replace(config, settings=with_another_value(config.settings, key)))
    ]
    assert changeable == expected
