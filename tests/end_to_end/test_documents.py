"""The documents tell the truth: commands run, printed output is what they print, and what is named exists.

Numbers that depend on the machine or on the length of a run may differ from a sample; its words may not.
"""

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import tomli_w

import recmill
from recmill import registry
from recmill.commands import doctor
from recmill.commands.adopt import adopt
from recmill.config import Settings
from recmill.config.shipped import shipped_configs
from recmill.errors import ConfigError

from .. import python_page
from ..config_page import fields
from ..conftest import REAL_DATA_MISSING, Config
from .test_own_clicks import write_log

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
DOCUMENTS = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    REPO / "benchmarks" / "README.md",
    *sorted(DOCS.glob("*.md")),
    DOCS / "terminal" / "README.md",
]
USER_PAGES = [document for document in DOCUMENTS if document.stem not in ("architecture", "extending", "CONTRIBUTING")]
PROGRAM = str(Path(sys.executable).parent / "recmill")
NUMBER = re.compile(r"(?<![\w@])\d+(,\d{3})*(\.\d+)?(e-?\d+)?k?\b")  # not the digits of names: hr@10, table_C1


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M)


def blocks(document: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), flags=re.S | re.M)


def block_with(document: Path, words: str) -> str:
    """Return the one fenced block of a page that contains `words`."""
    found = [block for block in blocks(document) if words in block]
    assert len(found) == 1, f"{document.name}: {len(found)} blocks contain {words!r}"
    return found[0]


def commands(document: Path) -> list[list[str]]:
    """Return the lines `$ ...` of ```console blocks."""
    lines = [line for block in blocks(document, "console") for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def run(words: list[str], directory: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    command, env = [PROGRAM, *words[1:]], {**os.environ, **variables}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=280, env=env)


def shape(line: str) -> str:
    """Return the words of a line, with N for every number and single spaces."""
    return " ".join(NUMBER.sub("N", line).split())


def assert_printed(sample: str, printed: str) -> None:
    """Assert that the lines of a sample were printed in this order, whatever their numbers.

    `...` stands for other lines. Neighbouring lines of the same shape count as one: a shorter run prints fewer.
    """
    lines = iter(printed.splitlines())
    found = ""
    for expected in sample.splitlines():
        if expected in ("", "...") or set(expected) <= set("- ") or shape(expected) == found:
            continue
        found = shape(expected)
        if not any(shape(line) == found for line in lines):
            pytest.fail(f"Not printed, or not in this order:\n  {expected}\nPrinted:\n{printed}", pytrace=False)


def assert_equal(expected: str, printed: str) -> None:
    """Assert that exactly the lines of a sample were printed."""
    if expected.splitlines() != printed.splitlines():
        pytest.fail(f"The sample says:\n{expected}\nPrinted:\n{printed}", pytrace=False)


# What the README's commands print


@dataclass
class Quickstart:
    """The directory in which the README's commands ran, and what each of them printed."""

    directory: Path
    printed: dict[str, str]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """Run every command of the README in order, as written, outside of the repository. Trainings have 40 steps."""
    directory = tmp_path_factory.mktemp("readme")
    intervals = ("TRAIN__LOG_EVERY_STEPS", "EVAL__EVERY_STEPS", "CHECKPOINT__EVERY_STEPS")
    variables = {"RECMILL__TRAIN__MAX_STEPS": "40", **{f"RECMILL__{name}": "20" for name in intervals}}
    for name in ("log.csv", "new.csv"):
        write_log(directory / name, 2000, 1)
    printed = {}
    for command in commands(REPO / "README.md"):
        if command[0] == "make":  # the recipes are the other commands, and the tests
            continue
        assert command[0] == "recmill", command
        done = run(command, directory, **variables)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
        printed[shlex.join(command)] = done.stderr + done.stdout
    return Quickstart(directory, printed)


def test_every_command_of_the_readme_runs_in_order(quickstart: Quickstart) -> None:
    assert (quickstart.directory / "runs" / "bert4rec" / "results.json").is_file()
    assert len(quickstart.printed) >= 8


def test_training_prints_the_log_that_the_readme_shows(quickstart: Quickstart) -> None:
    sample = block_with(REPO / "README.md", "saved step")
    assert_printed(sample, quickstart.printed["recmill train quickstart/dlrm --run runs/dlrm --procs 2"])


def test_training_ends_with_the_summary_that_the_page_of_training_shows(quickstart: Quickstart) -> None:
    sample = block_with(DOCS / "training.md", "next: recmill")
    assert_printed(sample, quickstart.printed["recmill train quickstart/bert4rec --run runs/bert4rec"])


def test_results_prints_the_table_that_the_readme_shows(quickstart: Quickstart) -> None:
    sample = block_with(REPO / "README.md", "best reachable")
    assert_printed(sample, quickstart.printed["recmill results runs/dlrm runs/bert4rec"])


def test_compare_prints_what_the_page_of_observing_shows(quickstart: Quickstart) -> None:
    """A copy of the run with another learning rate, lower AUROC and higher losses. Its speed is not noise but equal."""
    folder = quickstart.directory / "runs"
    shutil.copytree(folder / "dlrm", folder / "changed")
    for file, pattern, value in (
        ("config.toml", r"^lr = .*", "lr = 0.05"),
        ("results.json", r'"auroc": .*', '"auroc": 0.1,'),
        ("metrics.jsonl", r'"loss": [\d.]+', '"loss": 9.5'),
    ):
        text = (folder / "changed" / file).read_text()
        (folder / "changed" / file).write_text(re.sub(pattern, value, text, flags=re.M))
    done = run(["recmill", "compare", "runs/dlrm", "runs/changed"], quickstart.directory)
    assert done.returncode == 0, done.stderr
    assert_printed(block_with(DOCS / "observing.md", "step: loss").replace("within noise", "same"), done.stdout)


def test_training_logs_the_windows_that_the_page_of_sequences_shows(quickstart: Quickstart) -> None:
    sample = block_with(DOCS / "sequences.md", "windows: ")
    log = (quickstart.directory / "runs" / "bert4rec" / "log.txt").read_text()
    assert_printed(sample, log.replace(" INFO ", "\n"))


def test_evaluate_prints_the_table_that_the_page_of_training_shows(quickstart: Quickstart) -> None:
    sample = block_with(DOCS / "training.md", "95 % interval")
    command = "recmill evaluate runs/bert4rec --protocol full --k 10 --bootstrap 100"
    done = run(command.split(), quickstart.directory)
    assert done.returncode == 0, done.stderr
    assert_printed(sample, done.stdout)


def test_item_vectors_are_carried_over_to_newer_data_as_the_page_of_training_shows(tmp_path: Path) -> None:
    for name, items in (("june", "abcdefgh"), ("july", "Acdefghx")):
        rows = [f"u{user},{items[(user * step) % 8]},{step}\n" for user in range(40) for step in range(1, 9)]
        (tmp_path / f"{name}.csv").write_text("user,item,time\n" + "".join(rows), encoding="utf-8")
    first, last = (shlex.split(words[2:]) for words in (
        block_with(DOCS / "training.md", "--run runs/layers").splitlines()[0],
        block_with(DOCS / "training.md", "--init-from runs/start"),
    ))  # fmt: skip
    layers = shlex.split(block_with(DOCS / "training.md", "--run runs/layers").splitlines()[1][2:])
    of_june = [word.replace("june.csv,july.csv", "june.csv").replace("data/july", "data/june") for word in first]
    train_june = "recmill train own/sasrec --set data.path=data/june --set train.max_steps=5 --run runs/june"
    script = [sys.executable, "-c", block_with(DOCS / "training.md", "import_rows(")]
    few = ["--set", "train.max_steps=2"]
    for words in (of_june, train_june.split(), first, layers, script, [*last, *few]):
        done = (
            subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            if words is script
            else run(words, tmp_path)
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    vectors = {}
    for name, data in (("june", "june"), ("start", "july")):
        recmill.export_rows(tmp_path / "runs" / name, "item", tmp_path / f"{name}.rows.parquet")
        names = pl.read_parquet(tmp_path / "data" / data / "items.parquet")["original_id"]
        rows = pl.read_parquet(tmp_path / f"{name}.rows.parquet").sort("id")["row"].to_list()[1:]
        vectors[name] = dict(zip(names, rows, strict=True))
    assert len(vectors["start"]) == len("abcdefgh" + "Ax")
    assert {item: vectors["start"][item] for item in vectors["june"]} == vectors["june"]
    recmill.prepare("histories", tmp_path / "alone", input=str(tmp_path / "july.csv"), user_column="user",
                    item_column="item", time_column="time")  # fmt: skip
    message = (
        rf"ids of items stand for other values .* `recmill checkpoint rows {tmp_path}/runs/june item --output item.p"
    )
    with pytest.raises(ConfigError, match=message):
        start = tmp_path / "runs" / "june"
        recmill.train("own/sasrec", tmp_path / "no", overrides={"data.path": str(tmp_path / "alone")}, init_from=start)


# Samples that are deterministic


def test_a_wrong_key_gives_the_error_that_the_readme_shows(tmp_path: Path) -> None:
    command, expected = block_with(REPO / "README.md", "config error").split("\n", 1)
    done = run(shlex.split(command.removeprefix("$ ")), tmp_path)
    assert done.returncode == 2
    assert_equal(expected, done.stderr)


def test_an_id_beyond_its_table_gives_the_error_that_the_page_of_data_shows(
    clicks: Path, dlrm: Config, tmp_path: Path
) -> None:
    shutil.copytree(clicks, tmp_path / "data" / "clicks")
    ids = np.load(tmp_path / "data" / "clicks" / "day_0_sparse.npy", mmap_mode="r+")
    ids[42, 3] = 2000
    ids.flush()
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dlrm | {"data": {"path": "data/clicks"}}))
    done = run(["recmill", "train", "run.toml", "--run", "runs/x", "--no-verify"], tmp_path)
    expected = block_with(DOCS / "data.md", "data error").strip().removesuffix("...")
    assert done.returncode == 3
    assert done.stderr.replace(f"{tmp_path}/", "").splitlines()[-1].startswith(expected), done.stderr


def test_audit_prints_what_the_page_of_data_shows(tmp_path: Path) -> None:
    """Days whose dense values were made in two ways, and 300 rows of validation that are in training, too."""
    path = tmp_path / "data" / "mine"
    path.mkdir(parents=True)
    leaked: dict[str, np.ndarray] = {}
    for day, offset in enumerate((3, 5, 3)):
        random = np.random.default_rng(day)
        counts = np.where(random.random((2000, 2)) < 0.5, 0, random.integers(-2, 10**6, size=(2000, 2)))
        arrays = {
            "sparse": random.integers(0, [3, 40, 500], size=(2000, 3)).astype(np.int32),
            "labels": random.integers(0, 2, size=2000).astype(np.int32).reshape(-1, 1),
            "dense": np.log(counts + offset).astype(np.float32),
        }
        for name, array in arrays.items():
            if day == 0:
                leaked[name] = array[:300].copy()
            if day == 2:
                array[:300] = leaked[name]
            np.save(path / f"day_{day}_{name}.npy", array)
    adopt(path)
    command, expected = block_with(DOCS / "data.md", "$ recmill audit data/mine").split("\n", 1)
    done = run(shlex.split(command.removeprefix("$ ")), tmp_path)
    assert done.returncode == 3
    assert_equal(expected, done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("place", "mark"), [("slurm", "#SBATCH"), ("polaris", "#PBS -A"), ("kubernetes", '"apiVersion"')]
)
def test_a_dry_run_prints_the_script_that_the_page_of_launching_shows(place: str, mark: str, tmp_path: Path) -> None:
    command = next(words for words in commands(DOCS / "launching.md") if "--dry-run" in words and place in words)
    done = run([*command, "--data-elsewhere"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
    printed = re.sub(r"\S+/python[\d.]*", "python", done.stdout.replace(str(tmp_path), "/shared")).splitlines()
    sample = block_with(DOCS / "launching.md", mark).splitlines()
    gap = sample.index("...")
    assert sample[:gap] == printed[:gap]
    rest = iter(printed[gap:])
    assert [line for line in sample[gap:] if line != "..." and line not in rest] == []


def test_plan_prints_the_changes_that_the_page_of_planning_shows(tmp_path: Path) -> None:
    (command,) = [words for words in commands(DOCS / "planning.md") if "--memory-gb" in words and "25" in words]
    done = run(command, tmp_path)
    assert done.returncode == 5, done.stderr
    assert_printed(block_with(DOCS / "planning.md", "DOES NOT FIT"), done.stdout)


def test_version_prints_the_packages_that_the_page_of_installing_shows() -> None:
    sample = block_with(DOCS / "installing.md", "\ntorch 2")
    printed = run(["recmill", "--version"], REPO).stdout
    assert [line.split()[0] for line in printed.splitlines()] == [line.split()[0] for line in sample.splitlines()]


def test_the_page_of_installing_names_the_wheel_and_its_python_versions() -> None:
    page = (DOCS / "installing.md").read_text(encoding="utf-8")
    assert f"recmill-{recmill.__version__}-py3-none-any.whl" in page
    assert f"torchrec=={doctor.TORCHREC}" in page
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in page


# What the documents name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPO)))
def test_options_in_documents_exist(document: Path) -> None:
    for command in commands(document):
        if command[0] == "recmill":
            depth = 3 if command[1] in ("prepare", "checkpoint", "configs") else 2
            if command[1] == "run-like":  # the flags of other programs follow
                subprocess.run([PROGRAM, "run-like", "--show", *command[2:]], check=True, stdout=subprocess.DEVNULL)
                command = command[: command.index("--")]
            for option in (word for word in command if word.startswith("--")):
                assert option in help_of(*command[1:depth]), f"{shlex.join(command)}: {option}"


@cache
def help_of(*command: str) -> str:
    return subprocess.run([PROGRAM, *command, "--help"], capture_output=True, text=True, check=True).stdout


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(document.read_text(encoding="utf-8")), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPO)))
def test_links_in_documents_lead_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPO)))
def test_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    roots = "src|tests|benchmarks|configs|docs|requirements"
    named = set(re.findall(rf"(?<![\w/.-])(?:{roots})/[\w./*-]*\w", text))
    short = set(re.findall(r"(?<![\w/.-])(?:unit|distributed|end_to_end|contracts|architecture)/test_\w+\.py", text))
    examples = {"src/recmill/a/b.py", "tests/unit/test_b.py", "tests/unit/a/test_b.py"}  # how tests are named
    paths = named - examples | {f"tests/{path}" for path in short}
    assert [path for path in sorted(paths) if not any(REPO.glob(path.replace("NAME", "*")))] == []


@pytest.mark.parametrize("document", USER_PAGES, ids=lambda d: str(d.relative_to(REPO)))
def test_config_keys_that_documents_name_exist(document: Path) -> None:
    known = {"model.name", *fields(Settings)}
    for name in registry.MODELS:
        known.update(fields(registry.load(registry.MODELS, name, "model").Config, "model."))
    sections = "|".join(["model", *Settings.model_fields])
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)(?: = [^`]+)?`", document.read_text(encoding="utf-8"))
    files = re.compile(r"\.(py|md|txt|toml|json|npy|csv|parquet)$")
    assert sorted({key for key in named if key not in known and not files.search(key)}) == []


@pytest.mark.parametrize("document", [REPO / "README.md", DOCS / "training.md"], ids=lambda d: d.name)
def test_python_in_documents_calls_functions_that_exist_with_arguments_that_they_take(document: Path) -> None:
    """The calls are only bound to the functions' signatures: the commands that do the same are run above."""
    calls = [node for block in blocks(document, "python") for node in ast.walk(ast.parse(block))]
    checked = 0
    for call in calls:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id != "print":
            names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(getattr(recmill, call.func.id)).bind(*call.args, **names)
            checked += 1
    assert checked >= 3


def test_commands_in_documents_name_configs_as_an_installed_package_knows_them() -> None:
    words = [word for document in USER_PAGES for command in commands(document) for word in command]
    assert [word for word in words if word.startswith("configs/")] == []
    folders = {name.partition("/")[0] for name in shipped_configs()}
    named = {word for word in words if word.count("/") == 1 and word.partition("/")[0] in folders}
    assert len(named) >= 8
    assert named - {*shipped_configs()} == set()


def test_the_page_of_python_has_every_function_with_its_signature_and_an_example_that_runs(tmp_path: Path) -> None:
    text = python_page.PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^### `(.*)`$", text)) == sorted(python_page.functions())
    assert text == python_page.page(text), "run python -m tests.python_page"
    script = "\n".join(blocks(python_page.PAGE, "python"))
    called = {node.attr for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Attribute)}
    elsewhere = {"download", "tune", "write_items"}  # they need a network, Optuna, another model
    assert {name.rpartition(".")[2] for name in python_page.functions()} - called == elsewhere
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_what_make_quickstart_runs() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    recipe = [shlex.split(line) for line in re.findall(r"\t@?\$\(BIN\)/(recmill .*)", makefile)]
    assert len(recipe) >= 7
    shown = commands(REPO / "README.md")
    assert [command for command in recipe if command not in shown] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPO)))
def test_make_targets_that_documents_name_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([\w-]+)", text)) | {words[1] for words in commands(document) if words[0] == "make"}
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert named - targets == set()


def test_every_dataset_is_documented() -> None:
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    assert [name for name in registry.DATASETS if f"`{name}`" not in page] == []


def test_doctor_asks_for_the_versions_that_are_pinned() -> None:
    pins = "".join((REPO / "requirements" / name).read_text() for name in ("cpu.txt", "cuda.txt", "torchrec.txt"))
    project = (REPO / "pyproject.toml").read_text()
    for pin in (f"torch=={doctor.TORCH}", f"fbgemm-gpu-cpu=={doctor.FBGEMM}", f"fbgemm-gpu=={doctor.FBGEMM}"):
        assert pin in pins.splitlines()
        assert f'"{pin}"' in project
    assert f"torchrec=={doctor.TORCHREC}" in pins.splitlines()
    assert "torchrec==" not in project  # it must never be resolved with its dependencies


def test_tests_of_real_data_give_a_reason_that_the_summary_counts() -> None:
    """Otherwise pytest's last lines would not report that these tests were skipped."""
    for file in (REPO / "tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if '"shared" / "data"' in text and file != Path(__file__):
            reasons = re.findall(r'pytest\.skip\(f?"([^"]*)"', text)
            assert [reason for reason in reasons if REAL_DATA_MISSING.search(reason)], f"{file}: {reasons}"


def test_captures_of_terminals_are_linked_and_exist_in_both_widths_and_themes() -> None:
    folder = DOCS / "terminal"
    captures = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.svg")}
    linked = set(re.findall(r"\]\((.*?\.svg)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert linked == set(captures)
    assert {name.replace("-80", "-120") for name in captures} == {name for name in captures if "-120" in name}
    assert [name for name, text in captures.items() if "@media (prefers-color-scheme: dark)" not in text] == []
