"""Small real datasets and configs that many tests share."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from recmill import errors, failpoints, prepare
from recmill.observe import log

if TYPE_CHECKING:
    from .mixed_precision import MixedPrecision

REPO = Path(__file__).parent.parent
REAL_DATA_MISSING = re.compile(r"^no real ")  # in the reason for which a test of real data is skipped

Config = dict[str, Any]
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


def flip_bit(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--two-backends",
        action="store_true",
        help="run groups of processes as on GPUs: with a backend for CUDA beside that for CPU tensors",
    )


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the groups of `group.in_group` a backend for CUDA beside that for CPU tensors, as on GPUs."""
    from . import group  # imports torch

    monkeypatch.setattr(group, "backend", group.TWO_BACKENDS)


@pytest.fixture(autouse=True)
def _two_backends_if_chosen(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--two-backends"):
        request.getfixturevalue("two_backends")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that ran in this process did to its logging."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("recmill", *log._NOISY)}
    yield
    root.removeFilter(log._is_error)
    for handler in [handler for handler in root.handlers if isinstance(handler, log._ConsoleHandler)]:
        root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,002 rows (1,501 for training), 4 tables; sizes chosen so that nothing divides evenly."""
    path = tmp_path_factory.mktemp("data") / "clicks"
    prepare("synthetic-clicks", path, rows=2002, days=4, dense=3, tables=[5, 50, 300, 2000])
    return path


@pytest.fixture(scope="session")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 users, 200 items."""
    path = tmp_path_factory.mktemp("data") / "histories"
    prepare("synthetic-histories", path, users=101, items=200, interactions=1500)
    return path


@pytest.fixture
def dlrm(clicks: Path) -> Config:
    """13 batches an epoch, the last one of 1 row: fewer than any world has ranks."""
    return {
        "data": {"path": str(clicks)},
        "model": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [16, 8], "top_mlp": [16]},
        "train": {"device": "cpu", "global_batch_size": 125, "log_every_steps": 1},
        "eval": {"global_batch_size": 300, "every_steps": 5},
        "checkpoint": {"every_steps": 5},
    }


@pytest.fixture
def dcnv2(dlrm: Config) -> Config:
    return dlrm | {"model": dlrm["model"] | {"name": "dcnv2", "num_cross_layers": 2, "cross_rank": 4}}


@pytest.fixture
def projection(dlrm: Config) -> Config:
    return dlrm | {"model": dlrm["model"] | {"name": "projection", "branch1_mlp": [16], "branch2_mlp": [24]}}


@pytest.fixture
def two_tower(dlrm: Config) -> Config:
    return dlrm | {"model": {"name": "two_tower", "item_id": "C3", "item_features": ["C2", "I1"]}}


@pytest.fixture
def bert4rec(histories: Path) -> Config:
    return {
        "data": {"path": str(histories)},
        "model": {"name": "bert4rec", "embedding_dim": 32, "num_layers": 1, "max_length": 10},
        "train": {"device": "cpu", "global_batch_size": 25, "log_every_steps": 1},
        "eval": {"global_batch_size": 40, "ks": [1, 10]},
        "checkpoint": {"every_steps": 3},
    }


@pytest.fixture
def sasrec(bert4rec: Config) -> Config:
    """With all that it can have."""
    model = {"name": "sasrec", "head": "tied", "label_smoothing": 0.1}
    return bert4rec | {"model": bert4rec["model"] | model}


@pytest.fixture
def gsasrec(bert4rec: Config) -> Config:
    model = {"name": "sasrec", "head": "tied", "loss": "gbce", "num_negatives": 20}
    return bert4rec | {"model": bert4rec["model"] | model}


@pytest.fixture
def esasrec(gsasrec: Config) -> Config:
    return gsasrec | {"model": gsasrec["model"] | {"loss": "sampled_softmax", "block": "ligr"}}


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """The installed command, in a directory of its own."""

    def run(*arguments: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
        command = [str(Path(sys.executable).parent / "recmill"), *map(str, arguments)]
        options = {"cwd": tmp_path, "timeout": 200, **options}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCli:
    """The command in this process, where it starts at once: for many cases of one fact."""
    from recmill import cli

    def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(errors, "names_flags", True)
        capfd.readouterr()
        words = [*map(str, arguments)]
        code = cli._run(words)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def no_failure_is_left() -> Iterator[None]:
    """Forget the failures that a test requested in this process: they are read from the environment once."""
    yield
    failpoints.active_failures.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def known_environment() -> None:
    """No launcher's variables (the commands would act as its workers), and one thread a process: tests share cores."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def mixed(record_property: Callable[[str, object], None]) -> "MixedPrecision":
    """bfloat16 and float16, in child processes."""
    from .mixed_precision import MixedPrecision  # loads torch, which most tests of data do without

    return MixedPrecision(record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests of mixed precision found on this CPU, and how many tests had no real data."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", [])]
    for line in sorted({str(value) for name, value in properties if name == "mixed precision"}):
        terminalreporter.write_line(f"mixed precision here: {line}")
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    if missing := [reason for reason in reasons if REAL_DATA_MISSING.search(reason.removeprefix("Skipped: "))]:
        tests = "test" if len(missing) == 1 else "tests"
        line = f"real data not found beside this checkout: {len(missing)} {tests} skipped"
        terminalreporter.write_line(line, yellow=True, bold=True)
