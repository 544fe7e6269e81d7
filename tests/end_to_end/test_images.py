"""The Dockerfile and conda's environment.yml install what `make setup` installs, from the same files of pins."""

import re
import shlex
import tomllib

import yaml  # type: ignore[import-untyped]

from ..conftest import REPO


def pip_installs(text: str) -> list[list[str]]:
    """The arguments of every `pip install` in a text, without those that only concern speed and output."""
    ignored = {"--quiet", "--no-cache-dir", "--editable"}
    lines = re.findall(r"pip install (.*?)(?: +# .*)?$", text, re.MULTILINE)
    return [[word for word in shlex.split(line) if word not in ignored] for line in lines]


def setup_steps() -> list[list[str]]:
    makefile = (REPO / "Makefile").read_text()
    recipe = re.search(r"^\$\(VENV\)/\.installed-\$\(SETUP\):.*?(?=\n\n)", makefile, re.MULTILINE | re.DOTALL)
    assert recipe
    return pip_installs(recipe[0].replace("$(SETUP)", "${SETUP}"))


def test_the_dockerfile_installs_as_make_setup_does() -> None:
    text = (REPO / "Dockerfile").read_text()
    steps = setup_steps()
    assert pip_installs(text) == steps
    assert [step[-1] for step in steps] == ["requirements/${SETUP}.txt", "requirements/torchrec.txt", "."]
    assert "ARG SETUP=cpu\n" in text
    for setup in re.findall(r"SETUP=(\w+)", text):
        assert (REPO / "requirements" / f"{setup}.txt").is_file()


def test_the_dockerfile_copies_what_it_installs_and_nothing_else_is_sent() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (REPO / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert all((REPO / name).exists() for name in names)
    assert (REPO / ".dockerignore").read_text().splitlines() == [
        "*",
        *(f"!{name}" for name in dict.fromkeys(" ".join(copied).split())),
    ]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert {"src", "configs", project["readme"]} <= names


def test_conda_s_environment_and_the_steps_after_it_install_the_same() -> None:
    text = (REPO / "environment.yml").read_text()
    dependencies = yaml.safe_load(text)["dependencies"]
    (from_pip,) = [part["pip"] for part in dependencies if isinstance(part, dict)]
    steps = [line.split() for line in from_pip] + pip_installs(text)
    assert steps == [[word.replace("${SETUP}", "cpu") for word in step] for step in setup_steps()]


def test_both_have_the_python_of_the_tests_and_a_compiler() -> None:
    docker, conda = (REPO / "Dockerfile").read_text(), (REPO / "environment.yml").read_text()
    assert "FROM python:3.11-" in docker
    assert "python=3.11" in yaml.safe_load(conda)["dependencies"]
    assert "python3.11" in (REPO / "Makefile").read_text()
    assert "g++" in docker
    assert "gxx" in yaml.safe_load(conda)["dependencies"]
