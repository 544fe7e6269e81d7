"""The pages list every option of the programs they translate, and only keys and options of ours that exist."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from recmill import registry
from recmill.compat import PROGRAMS, find_program
from recmill.config import Settings, load_config

from ..compat_page import PAGES, with_current_tables
from ..config_page import fields

DOCS = Path(__file__).parents[2] / "docs"
HEADINGS = {
    "dlrm_main.py": ("coming-from.md", "## `dlrm_main.py`"),
    "dlrm_train_eval.py": ("coming-from.md", "## `dlrm_train_eval.py`"),
    "bert4rec_main.py": ("sequences.md", "## Coming from TorchRec's BERT4Rec"),
    "config.toml": ("sequences.md", "## Coming from tdfo"),
}
THEIR_FLAGS = tomllib.loads(Path(__file__).with_name("their_flags.toml").read_text(encoding="utf-8"))
OPTIONS = {name: [*flags] for name, flags in THEIR_FLAGS.items() if name in HEADINGS}
OPTIONS["dlrm_train_eval.py"] += THEIR_FLAGS["criteo1t_parquet.py"]  # in the same chapter


def chapter(script: str) -> str:
    page, heading = HEADINGS[script]
    return (DOCS / page).read_text(encoding="utf-8").split(heading)[1].split("\n## ")[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_flags_and_the_defaults_of_the_original(name: str) -> None:
    program = find_program(name)
    place = "config.toml" if name.startswith("tdfo/") else name
    expected = THEIR_FLAGS[place if place in THEIR_FLAGS else place.partition("/")[2]]
    found = {}
    for flag in program.variables or program.flags:  # 3_train.sh sets the flags of dlrm_main.py by variables
        values = flag.default if isinstance(flag.default, list) else [flag.default]
        found[flag.dest] = "" if values == [None] else ",".join(map(str, values))
    assert found == expected


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_flags_are_those_of_the_code(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert with_current_tables(page, text) == text, "run: python -m tests.compat_page"


@pytest.mark.parametrize("script", OPTIONS)
def test_every_option_of_the_other_program_has_a_row(script: str) -> None:
    dashes = "" if script.endswith(".toml") else "--"
    first_cells = re.findall(rf"^\| (`{dashes}\w[^|]*`) \|", chapter(script), flags=re.M)
    found = [option for cell in first_cells for option in re.findall(rf"`{dashes}(\w+)`", cell)]
    assert sorted(found) == sorted(OPTIONS[script])


@pytest.mark.parametrize(("page", "model", "least"), [("coming-from.md", "dlrm", 60), ("sequences.md", "bert4rec", 60)])
def test_every_key_exists_and_accepts_the_value_that_is_named(page: str, model: str, least: int) -> None:
    shared = {*fields(Settings), "model.name"}
    by_model = {
        name: set(fields(registry.load(registry.MODELS, name, "model").Config, "model.")) for name in registry.MODELS
    }
    known = shared.union(*by_model.values())
    sections = "|".join(["model", *Settings.model_fields])
    named = re.findall(rf"`((?:{sections})\.[\w.]+)( = [^`]+)?`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > least
    assert [key for key, _ in named if key not in known] == []
    for key, value in named:
        if value:
            needs = ["optim.schedule.step_size=9"] if value == ' = "step"' else []
            name = next(name for name in [model, *by_model] if key in shared | by_model[name])
            config = load_config({"data": {"path": "d"}, "model": {"name": name}}, [*needs, f"{key}{value}"])
            found = config.as_dict()
            for part in key.split("."):
                found = found[part]
            assert found == tomllib.loads(f"value{value}")["value"]


@cache
def help_of(*command: str) -> str:
    program = str(Path(sys.executable).parent / "recmill")
    return subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("page", "least"), [("coming-from.md", 15), ("sequences.md", 9)])
def test_every_option_of_a_command_exists(page: str, least: int) -> None:
    named = re.findall(r"`recmill (prepare [\w-]+|[a-z-]+)([^`]*)`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > least
    for command, rest in named:
        text = help_of(*command.split())
        assert [option for option in re.findall(r"--[\w-]+", rest) if option not in text] == []
