"""Which contract is checked, and what is reported about a plug-in that breaks it."""

import re
from pathlib import Path

import pytest

from recmill.commands.check_plugin import check_plugin
from recmill.contracts import datasets, metrics, models
from recmill.errors import ConfigError

from ..conftest import RunCli

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
    assert {outcome.problem for outcome in check_plugin("my_models.broken")} == {"broken.py:2: KeyError: 'oops'"}
    problems = re.findall("problem: (.*)", run_cli("check-plugin", "my_models.broken").stdout)
    assert problems[0] == "broken.py:2: KeyError: 'oops'"
    assert problems[1:] == ["the same as in: the number of its sums is always the same"] * 2


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
