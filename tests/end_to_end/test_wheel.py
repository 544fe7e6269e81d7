"""The wheel works where the repository is not: it holds the configs, and a model is trained with it."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import REPO

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of what it is built from: building leaves files in the directory."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "configs"):
        shutil.copytree(REPO / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", directory, source], check=True, timeout=200)
    (file,) = directory.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command of the wheel, in an environment of its own that borrows the other packages, and in a new directory.

    Python reads no .pth files in a directory that a .pth file adds: the editable installation of this checkout, which
    is one, is not visible.
    """
    directory = tmp_path_factory.mktemp("outside")
    environment = directory / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=100)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    (Path(packages) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    program = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", program, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True, timeout=100)

    def run(*arguments: str) -> str:
        command = [str(environment / "bin" / arguments[0]), *arguments[1:]]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_a_wheel_holds_every_module_kernel_and_config_once(wheel: Path) -> None:
    source = REPO / "src" / "recmill"
    expected = [
        f"recmill/{file.relative_to(source)}"
        for kind in ("*.py", "*.cpp", "*.h", "*.css", "*.md5")
        for file in source.rglob(kind)
    ]
    expected += [f"recmill/{file.relative_to(REPO)}" for file in (REPO / "configs").rglob("*.toml")]
    with zipfile.ZipFile(wheel) as file:
        found = [name for name in file.namelist() if ".dist-info/" not in name]
    assert sorted(found) == sorted([*expected, "recmill/py.typed"])


def test_the_installed_command_prepares_trains_and_evaluates_outside_the_repository(installed: Run) -> None:
    where = installed("python", "-c", "import recmill; print(recmill.__file__)")
    assert "/environment/" in where
    assert "quickstart/dlrm" in json.loads(installed("recmill", "configs", "list", "--json"))
    installed("recmill", "configs", "copy", "quickstart/dlrm", "own.toml")
    installed(
        "recmill", "prepare", "synthetic-clicks", "--output", "data/clicks", "--rows", "3000", "--tables", "20,900"
    )
    steps = ("--set", "train.max_steps=3", "--set", "train.device=cpu")
    installed("recmill", "train", "quickstart/dlrm", "--run", "runs/dlrm", *steps)
    tested = json.loads(installed("recmill", "evaluate", "runs/dlrm", "--json"))
    assert tested["rows"] > 0
    assert "runs/dlrm" in installed("recmill", "results", "runs/dlrm")


def test_python_3_12_prepares_data_with_what_the_wheel_alone_installs(wheel: Path, tmp_path: Path) -> None:
    """Without torch: its pinned build is large. `docs/installing.md` says what else was run with 3.12."""
    found = [shutil.which("python3.12"), *map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))]
    works = (path for path in found if path and not subprocess.run([path, "-V"], capture_output=True).returncode)
    if not (python := next(works, None)):
        pytest.skip("no Python 3.12 here, neither in PATH nor of pyenv")
    environment = tmp_path / "environment"
    subprocess.run([python, "-m", "venv", environment], check=True, timeout=100)
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", str(wheel)], check=True, timeout=250)

    def run(*arguments: str) -> str:
        command = [str(environment / "bin" / "recmill"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100).stdout

    assert "python 3.12" in run("--version")
    assert "quickstart/dlrm" in run("configs", "list")
    run("prepare", "synthetic-clicks", "--output", "clicks", "--rows", "300", "--tables", "20,90")
    run("audit", "clicks")
