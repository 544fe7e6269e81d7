"""Plug-ins that are not built in: how they are found, and what is said about those that cannot be used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recmill import registry
from recmill.config import load_config
from recmill.errors import ConfigError
from recmill.metrics.binary import BinaryMetrics
from recmill.world import joined_world

MODEL = """
from recmill.config import Section
TASK, KIND = "ctr", "clicks"
class Config(Section):
    width: int = 4
def tables(config, description): return []
def build(config, description, device): ...
"""


def problem(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        registry.load(registry.MODELS, name, "model")
    return str(caught.value)


def test_a_module_in_the_current_directory_is_found_and_its_directory_is_searched_last(folder: Path) -> None:
    (folder / "my_models" / "fm.py").write_text(MODEL)
    (folder / "json.py").write_text("raise SystemExit('this hides the json of Python')")
    before = [*sys.path]
    config = load_config({"data": {"path": "d"}, "model": {"name": "my_models.fm", "width": 8}})
    assert config.as_dict()["model"] == {"name": "my_models.fm", "width": 8}
    assert sys.path == [*before, str(folder)]
    assert registry.plugin_files() == {"my_models.fm": str(folder / "my_models" / "fm.py")}
    assert registry.plugin_directories() == [str(folder)]


def test_the_current_directory_is_not_searched_for_built_in_and_for_installed_modules(folder: Path) -> None:
    (folder / "json").mkdir()
    before = [*sys.path]
    registry.load(registry.MODELS, "dlrm", "model")
    assert f"json has no module 'fm'. It hides json in {folder}: rename that." in problem("json.fm")
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", "model 'my_models.fm' cannot be imported: ZeroDivisionError: division by zero."),
        ("def (", "cannot be imported: SyntaxError: "),
        ("import absent_package", "cannot be imported: ModuleNotFoundError: No module named 'absent_package'."),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3."),
        ("", "a model needs TASK, KIND, Config, tables, build, and this one lacks TASK, KIND, Config, tables, build."),
        (MODEL.replace("def build", "def built"), "and this one lacks build."),
        (MODEL.replace("(Section)", ""), "Config is not a class derived from recmill.config.Section."),
        (MODEL + "tables = []", "tables is not a function."),
        (MODEL.replace("width", "name"), "Config has a key 'name', which model.name would set."),
        (MODEL.replace('"ctr"', '"crt"'), "TASK: unknown task 'crt'. Did you mean 'ctr'?"),
        (MODEL.replace('"clicks"', '"views"'), "KIND is 'views', but TASK = 'ctr' learns from clicks."),
        (MODEL.replace('"ctr", "clicks"', '"next_item", "histories"'), "and this one lacks window_rules."),
    ],
)
def test_a_module_that_is_no_model_is_an_error_that_says_what_is_wrong(text: str, expected: str, folder: Path) -> None:
    (folder / "my_models" / "fm.py").write_text(text)
    assert expected in problem("my_models.fm")
    assert registry.plugin_files() == {}


def test_a_module_that_is_missing_is_named_with_the_config_and_where_it_was_searched(folder: Path) -> None:
    (folder / "run.toml").write_text('[data]\npath = "d"\nordre = 1\n[model]\nname = "your_models.fm"\n')
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml")
    text = str(caught.value)
    assert (
        f"run.toml: 'model.name': model 'your_models.fm': no module 'your_models' is installed or in {folder}." in text
    )
    assert "Run the command where your_models is, add that directory to PYTHONPATH, or install it." in text
    assert "unknown key 'data.ordre'" in text
    assert "my_models has no module 'mf'. Correct the name." in problem("my_models.mf")


@pytest.mark.parametrize("name", ["ffm", "my_models.", ".fm", "my-models.fm", "../fm"])
def test_a_name_that_is_no_path_of_a_module_is_unknown(name: str, folder: Path) -> None:
    assert f"unknown model '{name}'." in problem(name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("my_models/fm.py", "Use 'my_models.fm'."),
        ("../my_models/fm.py", "Use 'my_models.fm'."),
        ("fm.py", "Move it to my_models/fm.py, and use 'my_models.fm'."),
    ],
)
def test_for_the_file_of_a_module_the_module_is_suggested(name: str, remedy: str, folder: Path) -> None:
    (folder / "fm.py").touch()
    assert problem(name).endswith(f"model '{name}' is a file, and the name of a module is needed. {remedy}")


def test_only_models_datasets_and_metrics_may_be_modules(folder: Path) -> None:
    (folder / "my_models" / "task.py").write_text("")
    with pytest.raises(ConfigError, match=r"unknown task 'my_models\.task'"):
        registry.load(registry.TASKS, "my_models.task", "task")


def install(folder: Path, **entry_points: str) -> dict[str, Any]:
    """Write a package as pip installs it, and return what a new process, that finds it, answers about its models."""
    for number, (name, module) in enumerate(entry_points.items()):
        metadata = folder / f"package_{number}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package-{number}\nVersion: 1.0\n")
        line = f"{name.rstrip('_')} = {module}"
        (metadata / "entry_points.txt").write_text(f"[recmill.models]\n{line}\n[recmill.datasets]\n{line}\n")
    code = """if True:
        import json, sys
        from recmill import registry
        from recmill.errors import ConfigError
        answers = {}
        for name in sys.argv[1:]:
            try:
                answers[name] = registry.load(registry.MODELS, name, "model").__name__
            except ConfigError as error:
                answers[name] = str(error)
        print(json.dumps(answers))
    """
    command = [sys.executable, "-c", code, *(name.rstrip("_") for name in entry_points)]
    done = subprocess.run(command, cwd="/", env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_entry_points_are_found_by_name_and_may_not_be_called_as_others(folder: Path) -> None:
    (folder / "my_models" / "fm.py").write_text(MODEL)
    found = install(folder, ffm="my_models.fm", dlrm="my_models.fm", two="my_models.fm", two_="my_models.other")
    assert found == {
        "ffm": "my_models.fm",
        "dlrm": "model 'dlrm' is built in, and an installed package has one, too. Use 'my_models.fm'.",
        "two": "model 'two' is in several installed packages. Use my_models.fm or my_models.other.",
    }


def test_a_broken_entry_point_does_not_keep_others_from_being_prepared(folder: Path) -> None:
    install(folder, broken="my_models.absent")
    command = [sys.executable, "-P", "-m", "recmill", "prepare"]
    options: dict[str, Any] = {"env": {"PYTHONPATH": str(folder)}, "capture_output": True, "text": True, "cwd": "/"}
    listed = subprocess.run([*command, "--help"], check=True, **options).stdout
    assert "synthetic-clicks" in listed
    assert "(cannot be used)" in listed
    done = subprocess.run([*command, "broken", "--output", "d"], check=False, **options)
    assert (done.returncode, "has no module 'absent'" in done.stderr) == (2, True)


METRIC = 'TASK = "ctr"\ndef sums(logits, labels): return [len(labels)]\ndef value(rows): return rows\n'


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ("my_models.rows", "two metrics are called 'rows'. Rename one of the modules."),
        ("my_models.count", "metric 'my_models.count' is for task 'ctr', and the model's is 'next_item'. Remove it."),
        ("my_models.absent", "'eval.metrics': metric 'my_models.absent': "),
        ("auc", "'eval.metrics': unknown metric 'auc'. None is installed; name a module, like my_package.accuracy."),
    ],
)
def test_a_metric_that_cannot_be_used_is_a_problem_of_the_config(metrics: str, expected: str, folder: Path) -> None:
    for name in ("rows", "count"):
        (folder / "my_models" / f"{name}.py").write_text(METRIC)
    values = {"data": {"path": "d"}, "model": {"name": "sasrec"}, "eval": {"metrics": [metrics]}}
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert expected in str(caught.value)


def test_the_names_that_own_metrics_may_not_have_are_those_of_the_built_in_ones() -> None:
    with joined_world("cpu") as world:
        found = BinaryMetrics().compute(world)
    assert {*found, "users"} == set(registry.METRIC_NAMES)
