"""What the documents tell a reader to type works, and what they point to is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recmill import registry
from recmill.commands import doctor

REPO = Path(__file__).parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def commands(document: Path) -> list[list[str]]:
    """Lines `$ ...` of ```console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.S)
    return [
        shlex.split(line[2:], comments=True) for block in blocks for line in block.splitlines() if line.startswith("$ ")
    ]


def test_every_command_of_the_readme_runs_in_order(tmp_path: Path) -> None:
    """As written, on the shipped configs cut to their first steps."""
    for file in (REPO / "configs").rglob("*.toml"):
        copy = tmp_path / file.relative_to(REPO)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            file.read_text(encoding="utf-8").replace("[train]", "[train]\nmax_steps = 40"), encoding="utf-8"
        )
    for command in commands(REPO / "README.md"):
        if command[0] == "make":  # what they do is the rest of this test, and the tests themselves
            assert f"\n{command[1]}:" in (REPO / "Makefile").read_text(encoding="utf-8")
            continue
        assert command[0] == "recmill", command
        program = str(Path(sys.executable).parent / "recmill")
        done = subprocess.run(
            [program, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    assert (tmp_path / "runs" / "bert4rec" / "results.json").is_file()


def test_the_readme_shows_what_make_quickstart_runs() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    recipe = [shlex.split(line) for line in re.findall(r"\t@?\$\(BIN\)/(recmill .*)", makefile)]
    assert len(recipe) >= 7
    shown = commands(REPO / "README.md")
    assert [command for command in recipe if command not in shown] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_and_options_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (document.parent / target).exists(), target
    for command in commands(document):
        if command[0] != "recmill":
            continue
        depth = 3 if command[1] == "prepare" else 2
        help_text = subprocess.run(
            [str(Path(sys.executable).parent / "recmill"), *command[1:depth], "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for option in (word for word in command if word.startswith("--")):
            assert option in help_text, f"{' '.join(command)}: {option}"


def test_every_dataset_is_documented() -> None:
    page = (REPO / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in registry.DATASETS if f"`{name}`" not in page] == []


def test_doctor_asks_for_the_versions_that_are_pinned() -> None:
    pins = "".join((REPO / "requirements" / name).read_text() for name in ("cpu.txt", "cuda.txt", "torchrec.txt"))
    project = (REPO / "pyproject.toml").read_text()
    for pin in (f"torch=={doctor.TORCH}", f"fbgemm-gpu-cpu=={doctor.FBGEMM}", f"fbgemm-gpu=={doctor.FBGEMM}"):
        assert pin in pins.splitlines()
        assert f'"{pin}"' in project
    assert f"torchrec=={doctor.TORCHREC}" in pins.splitlines()
    assert "torchrec==" not in project  # it must never be resolved with its dependencies
