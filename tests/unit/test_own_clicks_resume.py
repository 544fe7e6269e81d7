"""`prepare clicks` after a kill, on a full disk, beside another run, on any number of cores."""

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recmill
from recmill.datasets.inputs import text
from recmill.datasets.own_clicks import learning, steps
from recmill.datasets.writing import NpyWriter, Work
from recmill.errors import DataError, ResourceError
from recmill.failpoints import VARIABLE

from ..conftest import RunCli
from ..criteo_raw import contents

PARTS = ["read-0", "read-1", "split", "count", "learn", "write"]
SCHEMA = """
[label]
column = "click"
[time]
column = "when"
format = "s"
[split]
by = "time"
[sample]
negatives = 0.5
[keep]
columns = ["user"]
weight = "w"
[[feature]]
column = "site"
type = "categorical"
[[feature]]
column = "tags"
type = "categorical"
separator = "|"
[[feature]]
name = "hour"
type = "time"
part = "hour"
[[feature]]
name = "both"
type = "cross"
columns = ["site", "tags"]
table_size = 100
[[feature]]
column = "price"
type = "numeric"
clip = [0.1, 0.9]
[[feature]]
name = "bucket"
column = "price"
type = "bucket"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two logs, their schema, and what preparing them without interruption gives."""
    path = tmp_path_factory.mktemp("own")
    draw = np.random.default_rng(3)
    for number in (1, 2):
        lines = ["click,when,site,tags,price,user,w"]
        for row in range(600):
            tags = "|".join(f"t{tag}" for tag in draw.integers(0, 9, draw.integers(0, 4)))
            drawn = draw.integers(0, 300, 3)
            lines.append(f"{row % 2},{(number * 600 + row) * 50},s{drawn[0]},{tags},{drawn[1]},u{drawn[2]},{row % 3}")
        (path / f"{number}.csv").write_text("\n".join(lines) + "\n")
    (path / "clicks.toml").write_text(SCHEMA)
    prepare(path, path / "unbroken")
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 12)


def prepare(folder: Path, output: Path) -> None:
    recmill.prepare("clicks", output, input=f"{folder}/?.csv", schema=str(folder / "clicks.toml"))


def test_killed_after_each_part_with_more_threads_it_continues_to_the_same_bytes(
    folder: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    command = ["prepare", "clicks", "--input", f"{folder}/?.csv", "--schema", folder / "clicks.toml"]
    environment = {**os.environ, "POLARS_MAX_THREADS": "4", VARIABLE: "prepare.part@hit=2:kill"}
    for done in range(len(PARTS) - 1):  # each run completes one part, and dies at the end of the next
        killed = run_cli(*command, "--output", tmp_path / "d", env=environment)
        assert killed.returncode == -signal.SIGKILL
        notes = {path.name for path in (tmp_path / ".d.unfinished").glob("done-*.json")}
        assert notes == {f"done-{name}.json" for name in PARTS[: done + 1]}
        assert not (tmp_path / "d").exists()
    prepare(folder, tmp_path / "d")
    assert contents(tmp_path / "d") == contents(folder / "unbroken")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("cores", [1, 4])
def test_any_number_of_cores_and_sets_of_codes_give_the_same_bytes(
    cores: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(steps, "_MAX_VALUES", 300 * cores)
    monkeypatch.setattr(learning, "_MAX_COUNTS", 20 * cores)
    prepare(folder, tmp_path / "d")
    assert contents(tmp_path / "d") == contents(folder / "unbroken")


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Do something before a part."""
    real = Work.part

    def part(self: Work, at: str, make: Callable[[], Any]) -> Any:
        if at == name:
            act()
        return real(self, at, make)

    monkeypatch.setattr(Work, "part", part)


def test_a_log_that_changes_between_parts_is_an_error(folder: Path, tmp_path: Path) -> None:
    for name in ("1.csv", "2.csv", "clicks.toml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    def grow() -> None:
        with (tmp_path / "2.csv").open("a") as file:
            file.write("1,99999,s,t,1,u,1\n")

    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, "read-1", grow)
        with pytest.raises(DataError, match=r"2\.csv: it changed while it was read"):
            prepare(tmp_path, tmp_path / "d")
    assert not [path for path in tmp_path.iterdir() if "d" in path.name.split(".")]

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, "learn", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, tmp_path / "d")
    grow()
    with pytest.raises(DataError, match=r"unfinished work of another run"):
        prepare(tmp_path, tmp_path / "d")


def test_a_full_disk_keeps_the_completed_parts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: NpyWriter, rows: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(NpyWriter, "append", full)
        with pytest.raises(OSError, match="No space left"):
            prepare(folder, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    prepare(folder, tmp_path / "d")
    assert contents(tmp_path / "d") == contents(folder / "unbroken")


def test_two_runs_with_one_output_do_not_meet(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".d.unfinished").mkdir()
    with (tmp_path / ".d.unfinished" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="choose another --output"):
            prepare(folder, tmp_path / "d")
