"""`recmill explain`: planted features are found, whatever the seeds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

import recmill
from recmill.cli import commands
from recmill.commands import train
from recmill.commands.explain import explanation
from recmill.config import load_config
from recmill.errors import ConfigError
from recmill.launch.signals import StopRequest
from recmill.world import joined_world

SCHEMA = """
[label]
column = "click"
[split]
by = "rows"
val = 0.25
test = 0.25
[[feature]]
column = "useless"
type = "categorical"
[[feature]]
column = "weak"
type = "categorical"
[[feature]]
column = "number"
type = "numeric"
[[feature]]
column = "leak"
type = "categorical"
"""


def write_log(path: Path, seed: int, rows: int = 4000) -> None:
    """Write a log in which 'leak' says 95 % of the clicks, 'weak' and 'number' say something, 'useless' nothing."""
    draw = np.random.default_rng(seed)
    click = draw.integers(0, 2, rows)
    weak = np.where(draw.random(rows) < 0.7, click, draw.integers(0, 2, rows))
    leak = np.where(draw.random(rows) < 0.9, click, draw.integers(0, 2, rows))
    frame = {
        "useless": draw.integers(0, 5, rows),
        "weak": weak,
        "number": click + draw.normal(0, 1, rows),
        "leak": leak,
    }
    pl.DataFrame({**frame, "click": click, "w": draw.choice([0.0, 1.0, 5.0], rows)}).write_csv(path)


def trained(folder: Path, seed: int, keep: str = "") -> Path:
    """Train in this process, which takes a tenth of the time of starting another."""
    write_log(folder / "log.csv", seed)
    (folder / "clicks.toml").write_text(SCHEMA + keep)
    recmill.prepare("clicks", folder / "data", input=str(folder / "log.csv"), schema_file=str(folder / "clicks.toml"))
    config = load_config("own/dlrm").as_dict()
    config["data"]["path"] = str(folder / "data")
    config["train"] |= {"num_epochs": 6, "global_batch_size": 128, "seed": seed}
    run = folder / "run"
    run.mkdir()
    options = train.Options(run=str(run)).model_dump()
    with joined_world("cpu") as world:
        train.work(world, config, options, StopRequest())
    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep threads from waiting for each other: batches are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_leak_is_first_and_a_useless_feature_last(seed: int, tmp_path: Path) -> None:
    found = recmill.explain(trained(tmp_path, seed), seed=seed)
    assert found["feature"].to_list()[0] == "leak"
    assert found["feature"].to_list()[-1] == "useless"
    assert abs(found["drop"][-1]) < 0.01 < found["drop"][1]


def test_drops_are_those_of_scores_of_shuffled_rows(tmp_path: Path) -> None:
    """Of one repeat, by scoring raw rows whose column is shuffled in the same order, and scikit-learn."""
    run = trained(tmp_path, 3)
    found = explanation(run, repeats=1, seed=7, group=["both=weak,leak"])
    log = pl.read_csv(tmp_path / "log.csv")
    rows = log[2000:3000]
    opened = recmill.open_run(run)

    def area(frame: pl.DataFrame) -> float:
        return float(roc_auc_score(rows["click"], opened.predict(frame)["logit"]))

    assert found["auroc"] == pytest.approx(area(rows), abs=1e-9)
    assert found["auroc"] == pytest.approx(recmill.evaluate(run, split="val")["auroc"], abs=1e-6)
    drops = {feature["feature"]: feature["drop"] for feature in found["features"]}
    names = ["number", "useless", "weak", "leak"]  # as the network reads them: numbers first
    for index, columns in enumerate([["number"], ["useless"], ["weak"], ["leak"], ["weak", "leak"]]):
        order = np.random.default_rng([7, index, 0]).permutation(1000)
        shuffled = rows.with_columns(rows[order][name] for name in columns)
        assert drops[[*names, "both"][index]] == pytest.approx(area(rows) - area(shuffled), abs=1e-9)
    assert drops["both"] > drops["leak"] > drops["weak"]
    again = explanation(run, repeats=1, seed=7, group=["both=weak,leak"])
    assert again == found, "the same seed gives the same numbers"
    printed = CliRunner().invoke(commands, f"explain {run} --repeats 1 --rows 500 --group both=weak,leak")
    assert printed.output.startswith("AUROC 0.") and "500 rows" in printed.output
    as_json = CliRunner().invoke(commands, f"explain {run} --repeats 1 --json")
    assert {feature["unseen"] for feature in json.loads(as_json.stdout)["features"]} == {0.0, None}
    with pytest.raises(ConfigError, match="another group is called 'a'"):
        recmill.explain(run, group=["a=weak", "a=leak"])
    for group, text in {
        "both": "give a name and features",
        "b=lek": "Did you mean 'leak'",
        "weak=leak": "is a feature",
    }.items():
        with pytest.raises(ConfigError, match=text):
            recmill.explain(run, group=[group])
    with pytest.raises(ConfigError, match="--history is for sequence models"):
        recmill.explain(run, history="1,2")


def test_options_of_click_models_are_no_options_of_sequence_models(sasrec: dict[str, Any], tmp_path: Path) -> None:
    recmill.train(sasrec, tmp_path / "run", overrides=["train.max_steps=1"])
    with pytest.raises(ConfigError, match="sequence model, and --group is for click models"):
        recmill.explain(tmp_path / "run", history="1,2", group=["both=a,b"])


def test_rows_count_with_their_weights(tmp_path: Path) -> None:
    run = trained(tmp_path, 4, '[keep]\nweight = "w"')
    rows = pl.read_csv(tmp_path / "log.csv")[2000:3000]
    logits = recmill.open_run(run).predict(rows)["logit"]
    found = explanation(run, repeats=1)["auroc"]
    assert found == pytest.approx(roc_auc_score(rows["click"], logits, sample_weight=rows["w"]), abs=1e-9)
    assert abs(found - roc_auc_score(rows["click"], logits)) > 1e-4
    assert found == pytest.approx(recmill.evaluate(run, split="val")["auroc"], abs=1e-6)
