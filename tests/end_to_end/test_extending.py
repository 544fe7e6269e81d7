"""The examples of docs/own-model.md and docs/extending.md work as they are written."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from recmill import registry
from recmill.data.opening import open_dataset

from ..conftest import REPO, RunCli
from .test_documents import assert_equal, block_with, blocks

PAGE = REPO / "docs" / "own-model.md"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The current directory of the commands, with the files of both pages."""
    (tmp_path / "my_models").mkdir()
    for page in (PAGE, REPO / "docs" / "extending.md"):
        for block in blocks(page, "python"):
            name = block.splitlines()[0].removeprefix("# ")
            (tmp_path / "my_models" / Path(name).name).write_text(block, encoding="utf-8")
    (tmp_path / "fm.toml").write_text(block_with(PAGE, 'name = "my_models.fm"'), encoding="utf-8")
    return tmp_path


def ran(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_model_and_the_metric_of_the_page_keep_their_contracts_and_train(
    examples: Path, run_cli: RunCli, clicks: Path
) -> None:
    """Where the module is in the current directory, also in the processes that are started; elsewhere it is missing."""
    assert len(re.findall(r"\S.*\n", block_with(PAGE, "class FM"))) <= 31  # lines of code, comments and docstring
    (examples / "data").mkdir()
    (examples / "data" / "clicks").symlink_to(clicks)
    assert_equal(block_with(PAGE, "it and its task have"), ran(run_cli("check-plugin", "my_models.fm")))
    assert "FAIL" not in ran(run_cli("check-plugin", "my_models.accuracy"))
    assert "9 checks: 9 passed" in ran(run_cli("check-plugin", "my_models.fm_with_dropout"))
    few = ("--set", "train.max_steps=4", "--set", "train.device=cpu")
    ran(run_cli("train", "fm.toml", "--run", "runs/fm", "--procs", "2", *few))
    plugins = json.loads((examples / "runs" / "fm" / "env.json").read_text())["plugins"]
    assert plugins == {"my_models.fm": str(examples / "my_models" / "fm.py")}
    values = json.loads(ran(run_cli("evaluate", "runs/fm", "--metrics", "my_models.accuracy", "--json")))
    assert 0 < values["accuracy"] < 1
    assert values["accuracy"] * values["rows"] == pytest.approx(round(values["accuracy"] * values["rows"]))
    elsewhere = run_cli("evaluate", examples / "runs" / "fm", cwd="/")
    assert elsewhere.returncode == 2
    assert "runs/fm/config.toml: 'model.name': model 'my_models.fm': no module 'my_models'" in elsewhere.stderr
    (report,) = json.loads(ran(run_cli("results", examples / "runs" / "fm", "--json", cwd="/")))
    assert (report["model"], report["state"], report["tested_step"]) == ("my_models.fm", "done", values["step"])
    for command in ("list", "verify", "inspect"):
        ran(run_cli("checkpoint", command, examples / "runs" / "fm", cwd="/"))


def test_the_dataset_is_prepared_by_its_path_and_keeps_its_contract(examples: Path, run_cli: RunCli) -> None:
    assert "--items" in ran(run_cli("prepare", "my_models.cycles", "--help"))
    prepare = ("prepare", "my_models.cycles", "--output", "d", "--users", "7", "--items", "5")
    assert "7 users, 5 items, 56 interactions" in ran(run_cli(*prepare))
    assert "nothing to do" in run_cli(*prepare).stderr
    items = open_dataset(examples / "d", verify="digests").array("items.npy").reshape(7, 8)
    assert items[1].tolist() == [2, 3, 4, 5, 1, 2, 3, 4]
    checked = ran(run_cli("check-plugin", "my_models.cycles", "--set", "users=7", "--set", "items=5"))
    assert "6 checks: 6 passed, 0 failed" in checked


def test_the_groups_of_entry_points_are_those_that_the_page_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"recmill.{what}s" in text for what in registry.PARTS)
