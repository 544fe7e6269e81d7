"""`recmill tune`: finds planted values, never reads the test split, survives kills and failed trials."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import recmill
from recmill.config import load_config
from recmill.errors import ConfigError, ResourceError, UserError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a config whose dataset has an unreadable test split."""
    data = tmp_path / "data"
    recmill.prepare("synthetic-clicks", data, rows=2000, days=3, dense=2, tables=[5, 20], seed=3)
    description = json.loads((data / "dataset.json").read_text())
    ranges = {split: {part["day"] for part in parts} for split, parts in description["splits"].items()}
    (test_day,) = ranges["test"]
    if test_day in ranges["val"]:  # both halves of one day: spoil the rows of the test
        start, stop = next((part["start"], part["stop"]) for part in description["splits"]["test"])
        labels = data / f"{test_day}_labels.npy"
        content = bytearray(labels.read_bytes())
        header = len(content) - 4 * description["files"][labels.name]["rows"]
        content[header + 4 * start : header + 4 * stop] = b"\x7f" * (4 * (stop - start))
        labels.write_bytes(content)
    text = f"""
[model]
name = "dlrm"
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [8]
[data]
path = "{data}"
[train]
num_epochs = 1
global_batch_size = 64
"""
    (tmp_path / "config.toml").write_text(text)
    return tmp_path / "config.toml"


def write_space(folder: Path, text: str) -> Path:
    (folder / "space.toml").write_text(text)
    return folder / "space.toml"


def test_the_best_trial_wins_without_a_look_at_the_test_split(config: Path, tmp_path: Path) -> None:
    space = write_space(tmp_path, '"optim.dense.lr" = {choices = [1e-9, 0.05]}\n[train]\nseed = {low = 1, high = 3}\n')
    found = recmill.tune(config, space, tmp_path / "study", trials=4, jobs=2, seed=5)
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 4
    best = max(found["trials"], key=lambda trial: trial["value"])
    assert found["best"] == best["number"]
    assert load_config(found["config"]).settings.optim.dense.lr == best["values"]["optim.dense.lr"]
    assert load_config(found["config"]).settings.eval.test, "the best config is tested when it is trained"
    results = [json.loads((Path(trial["run"]) / "results.json").read_text()) for trial in found["trials"]]
    assert all({*result} == {"val", "timing"} for result in results)
    assert [result["val"]["auroc"] for result in results] == [trial["value"] for trial in found["trials"]]
    with pytest.raises(recmill.errors.DataError, match="label"):  # so it is the test split that is spoiled
        recmill.evaluate(best["run"], split="test", verify=False)
    again = recmill.tune(config, space, tmp_path / "study", trials=4)
    assert again == found, "nothing is left to do"


def test_trials_that_are_added_do_not_repeat_earlier_ones(config: Path, tmp_path: Path) -> None:
    space = write_space(tmp_path, '"optim.dense.lr" = {low = 0.001, high = 0.1, log = true}\n')
    recmill.tune(config, space, tmp_path / "study", trials=1)
    found = recmill.tune(config, space, tmp_path / "study", trials=2)
    first, second = (trial["values"]["optim.dense.lr"] for trial in found["trials"])
    assert first != second


def test_the_space_of_the_docs_can_be_searched(config: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    space = write_space(tmp_path, page.split("```toml\n")[1].split("```")[0])
    small = {"data.path": str(tmp_path / "data"), "train.max_steps": 12}
    found = recmill.tune("own/dlrm", space, tmp_path / "study", trials=1, overrides=small)
    assert [trial["state"] for trial in found["trials"]] == ["complete"], found
    widths = {trial["values"]["model.embedding_dim"] for trial in found["trials"]}
    assert widths - {16}, "a width that is not the config's was tried"
    assert load_config(found["config"]).as_dict()["model"]["embedding_dim"] in widths


def test_a_study_that_is_killed_resumes_and_a_failed_trial_does_not_end_it(config: Path, tmp_path: Path) -> None:
    space = write_space(tmp_path, '"optim.dense.lr" = {low = 0.001, high = 0.1, log = true}\n')
    words = ["tune", config, "--space", space, "--output", tmp_path / "study", "--jobs", "2"]
    words += ["--set", "train.num_epochs=5", "--trials", "2"]
    command = [sys.executable, "-m", "recmill", *map(str, words)]
    killed = subprocess.Popen(command, env=os.environ | {"RECMILL_FAIL": "train.step:slow"})
    for trial in ("0000", "0001"):  # both at the same time: no step of them ends soon
        status = tmp_path / "study" / "trials" / trial / "status.json"
        while not status.is_file() or json.loads(status.read_text())["state"] != "running":
            assert killed.poll() is None
            time.sleep(0.05)
    states = [json.loads(path.read_text())["state"] for path in tmp_path.glob("study/trials/*/status.json")]
    assert states == ["running"] * 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = subprocess.run([*command, "--json"], capture_output=True, check=True)
    found = json.loads(resumed.stdout)
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 2
    first = json.loads((tmp_path / "study" / "trials" / "0000" / "results.json").read_text())
    assert first["val"]["auroc"] == found["trials"][0]["value"]
    failing = subprocess.run(
        [*command[:-1], "3"], env=os.environ | {"RECMILL_FAIL": "train.begin:raise"}, capture_output=True, check=True
    )
    assert b"failed" in failing.stdout and b"next: recmill train" in failing.stdout


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ('"optim.dense.lrr" = {low = 0.1, high = 0.2}', "unknown key 'optim.dense.lrr'. Did you mean"),
        ('"optim.dense.lr" = {low = 0.2, high = 0.1}', "low = 0.2 is not below high = 0.1"),
        ('"optim.dense.lr" = {low = 0.0, high = 0.1, log = true}', "log = true needs a low above 0"),
        ('"optim.dense.lr" = {low = 0.1}', "give low and high, or choices"),
        ('"optim.dense.lr" = {low = 0.1, hihg = 0.2}', "unknown key 'optim.dense.lr.hihg'. Did you mean"),
        ('"optim.dense.lr" = {low = "0.1", high = 0.2}', "'optim.dense.lr.low': should be a valid number, got '0.1'"),
        ('"train.seed" = {low = 1, high = 3, step = 5}', "step = 5 is not between 0 and high - low = 2"),
        ('"data.path" = {choices = ["gone"]}', "'data.path': gone: no such directory"),
        ('"model.pooling.C9" = {choices = ["mean"]}', "the dataset has no feature 'C9'"),
        ('"eval.test" = {choices = [true, false]}', "'eval.test': trials never read the test split"),
        ('"optim.dense.lr" = 3', "give a table like"),
        (
            '"model.embedding_dim" = {choices = [8]}',
            r"1 problem in the space:\n  'model.embedding_dim': model.bottom_mlp",
        ),
        ('"train.precision" = {choices = ["float32", "int3"]}', "unknown value 'int3'"),
        ("", "no keys"),
    ],
)
def test_a_wrong_space_is_one_error_before_any_work(space: str, text: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        recmill.tune(config, write_space(tmp_path, space), tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"data.path": "gone"}, "gone: no such directory"),
        ({"model.pooling.C9": "mean"}, "the dataset has no feature 'C9'"),
        ({"data.train_on_validation": True}, "trials are compared by their validation, so they must not train on it"),
    ],
)
def test_a_config_whose_trials_would_all_fail_or_mislead_is_one_error(
    keys: dict[str, Any], text: str, config: Path, tmp_path: Path
) -> None:
    space = write_space(tmp_path, '"train.seed" = {low = 1, high = 3}')
    with pytest.raises(UserError, match=text):
        recmill.tune(config, space, tmp_path / "study", overrides=keys)
    assert not (tmp_path / "study").exists()


def test_other_studies_and_a_missing_package_are_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = write_space(tmp_path, '"train.seed" = {low = 1, high = 3}')
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "x").touch()
    with pytest.raises(ConfigError, match="holds x, and is no study"):
        recmill.tune(config, space, tmp_path / "study")
    (tmp_path / "study" / "x").unlink()
    (tmp_path / "study" / "study.json").write_text('{"config": {}, "space": {}}')
    with pytest.raises(ConfigError, match="a study of another config or space"):
        recmill.tune(config, space, tmp_path / "study")
    modules: dict[str, Any] = {"optuna": None}
    monkeypatch.setitem(sys.modules, "optuna", modules["optuna"])
    with pytest.raises(ResourceError, match=r"pip install 'recmill\[tune\]'"):
        recmill.tune(config, space, tmp_path / "study")
