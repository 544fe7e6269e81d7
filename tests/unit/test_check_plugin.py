"""Which contract is checked, and what is reported about a plug-in that breaks it."""

import re
from pathlib import Path

import pytest

import recmill
from recmill.commands.check_plugin import check_plugin
from recmill.config import load_config
from recmill.contracts import Broken, datasets, metrics, models
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError
from recmill.launch.failures import WorkerError

from ..conftest import REPO, RunCli
from ..end_to_end.test_documents import block_with

MEANS = 'TASK = "ctr"\ndef sums(logits, labels): return [labels.mean()]\ndef value(mean): return mean\n'
RAISES = MEANS.replace("return [labels", "raise KeyError('oops'); return [labels")


def test_each_check_of_a_metric_is_reported_with_what_is_wrong(folder: Path, run_cli: RunCli) -> None:
    (folder / "my_models" / "mean.py").write_text(MEANS)
    done = run_cli("check-plugin", "my_models.mean")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("pass", "FAIL"))] == [
        "pass  the number of its sums is always the same",
        "FAIL  its sums over parts add up to the sums over all",
        "pass  its value is a finite number",
    ]
    assert lines[3].strip() == "rule: sums() is additive, so that batches and processes do not affect the value."
    assert lines[4].endswith("return sums, not means")
    assert lines[-1] == "3 checks: 2 passed, 1 failed"


def test_every_check_of_a_contract_states_its_rule() -> None:
    for check in (*datasets.CHECKS, *metrics.CHECKS, *models.CHECKS):
        assert re.fullmatch(r"[^\n]{20,100}\.", check.__doc__ or ""), check


def test_an_error_that_a_plug_in_raises_is_a_failed_check_with_its_line(folder: Path, run_cli: RunCli) -> None:
    (folder / "my_models" / "broken.py").write_text(RAISES)
    first, *others = check_plugin("my_models.broken")
    assert first.problem == "broken.py:2: KeyError: 'oops'"
    assert [(outcome.problem, outcome.cause) for outcome in others] == [("", first.check)] * 2
    lines = run_cli("check-plugin", "my_models.broken").stdout.splitlines()
    assert [line[:4] for line in lines if line[:1] != " "] == ["FAIL", "skip", "skip", "3 ch"]
    assert [line.strip() for line in lines if "problem" in line] == [
        "problem: broken.py:2: KeyError: 'oops'",
        *["the problem of: the number of its sums is always the same"] * 2,
    ]
    assert lines[-1] == "3 checks: 0 passed, 1 failed, 2 skipped"


@pytest.mark.parametrize(
    ("old", "new", "passed", "problem"),
    [
        ("factors.sum", "factor.sum", 2, r"fm\.py:\d+: NameError: name 'factor' is not defined"),
        ("self.tables", "self.bags", 1, "The network has no attribute `tables`.* Rename `bags`"),
        (".squeeze(1) +", " +", 4, r"must return one logit per row: shape \[32\].* It returned shape \[32, 32\]"),
    ],
)
def test_each_mistake_in_a_model_is_reported_once(old: str, new: str, passed: int, problem: str, folder: Path) -> None:
    text = block_with(REPO / "docs" / "own-model.md", "class FM").replace(old, new)
    (folder / "my_models" / "fm.py").write_text(text)
    outcomes = check_plugin("my_models.fm")
    found = [outcome.problem for outcome in outcomes if outcome.problem]
    assert len(found) == 1 and re.search(problem, found[0]), found
    assert sum(not outcome.problem and not outcome.cause for outcome in outcomes) == passed, outcomes


def test_vectors_that_are_read_by_their_place_are_found(folder: Path, clicks: Path) -> None:
    text = block_with(REPO / "docs" / "own-model.md", "class FM").replace("weights.sum(1)", "weights[:, 0]")
    by_place = text.replace("in_order(self.tables(sparse), self.features)", "self.tables(sparse).values()")
    for name, module in (("by_name", text), ("by_place", by_place)):
        (folder / "my_models" / f"{name}.py").write_text(module)
    named, placed = (
        load_config({"data": {"path": str(clicks)}, "model": {"name": f"my_models.{name}"}})
        for name in ("by_name", "by_place")
    )
    models.the_output_of_its_tables_is_read_by_name(named, open_dataset(clicks))
    with pytest.raises(Broken, match="order of the features in the output of `tables`: read it by name, as `in_order`"):
        models.the_output_of_its_tables_is_read_by_name(placed, open_dataset(clicks))


@pytest.mark.parametrize(
    ("layer", "dropped", "problem"),
    [
        (
            "nn.Dropout(0.2)",
            "self.drop(dense)",
            r"`drop` is torch\.nn\.Dropout: use RowDropout of recmill\.nn\.dropout",
        ),
        ("0.2", "nn.functional.dropout(dense, 0.2)", "changes with torch.manual_seed: use RowDropout"),
    ],
)
def test_dropout_of_torch_is_named(layer: str, dropped: str, problem: str, folder: Path, clicks: Path) -> None:
    text = block_with(REPO / "docs" / "own-model.md", "class FM").replace("self.dense(dense)", f"self.dense({dropped})")
    text = text.replace("self.features =", f"self.drop = {layer}\n        self.features =")
    (folder / "my_models" / "fm.py").write_text(text)
    config = load_config({"data": {"path": str(clicks)}, "model": {"name": "my_models.fm"}})
    with pytest.raises(Broken, match=problem):
        models.random_numbers_of_torch_do_not_change_the_loss(config, open_dataset(clicks))


def test_training_names_the_line_of_a_model_that_raises(folder: Path, clicks: Path) -> None:
    text = block_with(REPO / "docs" / "own-model.md", "class FM").replace("factors.sum", "factor.sum")
    (folder / "my_models" / "fm.py").write_text(text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "factor.sum" in line)
    with pytest.raises(WorkerError, match=rf"Process 0 of the job failed: fm\.py:{line}: NameError: name 'factor'"):
        recmill.train({"data": {"path": str(clicks)}, "model": {"name": "my_models.fm"}}, folder / "run")


def test_a_dataset_without_docstring_or_with_random_values_breaks_its_contract(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "my_models" / "noise.py").write_text(
        "import numpy as np\n"
        "import polars as pl\n"
        "from recmill.config import Section\n"
        "from recmill.datasets.histories.writing import id_table, seal_histories\n"
        "from recmill.datasets.synthetic.plan import plan\n"
        "from recmill.datasets.writing import write_npy\n"
        "class Options(Section):\n"
        "    users: int = 5\n"
        "def write(plan, work):\n"
        "    users = plan.options.users\n"
        "    items = np.random.default_rng().integers(1, 9, size=4 * users)\n"
        "    write_npy(work.data / 'items.npy', items, np.int32)\n"
        "    counts = np.bincount(items, minlength=9)[1:]\n"
        "    ids = [id_table(map(str, range(n)), c, first_id=f) for n, c, f in "
        "((users, np.full(users, 4), 0), (8, counts, 1))]\n"
        "    ids[1] = ids[1].with_columns(pl.lit('a title').alias('title'))\n"
        "    return seal_histories(work.data, 'noise', plan.recipe, *ids)\n"
    )
    problems = {outcome.check: outcome.problem for outcome in check_plugin("my_models.noise", overrides=["users=50"])}
    assert len(problems) == 6
    assert "no docstring" in problems["it describes itself and its options"]
    assert "items.npy" in problems["it gives the same bytes twice and others with another seed"]
    assert "a resumed preparation differs" in problems["interrupted and resumed it gives the same bytes"]
    assert problems["its splits are disjoint and cover all rows"] == ""
    assert [path.name for path in folder.iterdir()] == ["my_models"]
    assert caplog.records == []  # of what it prepared


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dlmr", "unknown plug-in 'dlmr'. Did you mean 'dlrm'?"),
        ("my_models.empty", "'my_models.empty' is not a model, dataset or metric: a model needs TASK, KIND, Config"),
        ("my_models.half", "a metric needs TASK, sums, value, and this one lacks value."),
        ("my_models.absent", "my_models has no module 'absent'. Correct the name."),
        ("my_models.emty", "my_models has no module 'emty'. Did you mean 'empty'?"),
    ],
)
def test_what_cannot_be_checked_is_an_error(name: str, expected: str, folder: Path) -> None:
    (folder / "my_models" / "empty.py").touch()
    (folder / "my_models" / "half.py").write_text(MEANS.partition("def value")[0])
    with pytest.raises(ConfigError) as caught:
        check_plugin(name)
    assert expected in str(caught.value)
