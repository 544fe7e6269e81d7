"""`prepare criteo` after a kill, on a full disk, or beside another run: it continues, or says why not."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare
from recmill.datasets import writing
from recmill.datasets.criteo import steps
from recmill.datasets.shuffle import Buckets
from recmill.datasets.vocabularies import Counting, LogRows
from recmill.datasets.writing import NpyWriter, Work
from recmill.errors import DataError, ResourceError

from ..conftest import REPO, RunCli
from ..criteo_raw import contents, random_rows, set_limits, write_days, write_rows

FULL: dict[str, Any] = {"shuffle": "global", "seed": 5, "multi_hot": [2]}
PARQUET: dict[str, Any] = {"shuffle": "day", "format": "parquet"}
HASHED: dict[str, Any] = {"ids": "hash64"}
LITTLE = {"memory": 60_000, "chunk_bytes": 1 << 14}  # several rounds of lookups, several buckets, about 66 rows a chunk


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs") / "raw"
    write_days(directory, [260, 200, 101], distinct=1500)
    return directory


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, **LITTLE)


@pytest.fixture(scope="module")
def unbroken(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    prepare("criteo", directory / "full", input=logs, **FULL)
    prepare("criteo", directory / "parquet", input=logs, **PARQUET)
    prepare("criteo", directory / "hashed", input=logs, **HASHED)
    return directory


class InterruptionError(Exception):
    pass


def stopped(tmp_path: Path, raw: Path, name: str, moment: str = "after", **options: Any) -> None:
    """Prepare up to one part: before it is begun, or when its work is done and its note is not written."""
    real = Work.part

    def part(self: Work, at: str, make: Callable[[], Any]) -> Any:
        def fail() -> None:
            if moment == "after":
                make()
            raise InterruptionError

        return real(self, at, fail if at == name else make)

    stopped_by(Work, "part", part, tmp_path, raw, options)


def stopped_after(tmp_path: Path, raw: Path, owner: Any, function: str, calls: int, options: dict[str, Any]) -> None:
    """Prepare up to the call of a function that comes after this many."""
    real, left = getattr(owner, function), [calls]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise InterruptionError
        return real(*args)

    stopped_by(owner, function, failing, tmp_path, raw, options)


def stopped_by(
    owner: Any, function: str, failing: Callable[..., Any], tmp_path: Path, raw: Path, options: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, failing)
        with pytest.raises(InterruptionError):
            prepare("criteo", tmp_path / "d", input=raw, **options)


def record_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are made from now on."""
    made: list[str] = []
    real = Work.part

    def part(self: Work, name: str, make: Callable[[], Any]) -> Any:
        def noted() -> Any:
            made.append(name)
            return make()

        return real(self, name, noted)

    monkeypatch.setattr(Work, "part", part)
    return made


def unfinished(tmp_path: Path) -> Path:
    return tmp_path / ".d.unfinished"


def done_parts(directory: Path) -> set[str]:
    return {path.name.removeprefix("done-").removesuffix(".json") for path in directory.glob("done-*.json")}


FULL_PARTS = [
    *("read-day_0", "read-day_2", "count-C1", "count-C26", "map-0-day_0", "map-1-day_2", "scatter-day_0"),
    *("scatter-day_1", "write-day_0", "write-day_1", "write-day_2", "companions", "multi-hot-day_0"),
    "multi-hot-day_2",
]


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", FULL_PARTS)
def test_stopped_at_any_part_it_continues_to_the_same_bytes(
    name: str, moment: str, logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, logs, name, moment, **FULL)
    assert not (tmp_path / "d").exists()
    done = done_parts(unfinished(tmp_path))
    assert name not in done
    assert name.startswith("read-day_0") or "read-day_0" in done
    made = record_parts(monkeypatch)
    prepare("criteo", tmp_path / "d", input=logs, **FULL)
    assert name in made
    assert not done & set(made)
    assert contents(tmp_path / "d") == contents(unbroken / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", ["write-train-day_0", "write-train-day_1", "write-val-day_2", "write-test-day_2"])
def test_stopped_at_any_part_of_parquet_it_continues_to_the_same_bytes(
    name: str, logs: Path, unbroken: Path, tmp_path: Path
) -> None:
    stopped(tmp_path, logs, name, **PARQUET)
    prepare("criteo", tmp_path / "d", input=logs, **PARQUET)
    assert contents(tmp_path / "d") == contents(unbroken / "parquet")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("owner", "method", "calls"),
    [
        (Buckets, "add", 2),
        (Buckets, "add", 6),
        (NpyWriter, "append", 1),
        (NpyWriter, "append", 40),
        (Buckets, "rows", 1),
    ],
)
def test_stopped_in_the_middle_of_a_part_it_continues_to_the_same_bytes(
    owner: type, method: str, calls: int, logs: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Half-written files and buckets are not taken for complete ones."""
    stopped_after(tmp_path, logs, owner, method, calls, FULL)
    prepare("criteo", tmp_path / "d", input=logs, **FULL)
    assert contents(tmp_path / "d") == contents(unbroken / "full")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("calls", [1, 25])
def test_stopped_in_the_middle_of_a_day_of_hashes_only_that_day_is_read_again(
    calls: int, logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first day has four blocks in three files each: the 25th call is of the third day."""
    stopped_after(tmp_path, logs, NpyWriter, "append", calls, HASHED)
    made = record_parts(monkeypatch)
    prepare("criteo", tmp_path / "d", input=logs, **HASHED)
    assert made == [f"convert-day_{day}" for day in ((0, 1, 2) if calls == 1 else (2,))]
    assert contents(tmp_path / "d") == contents(unbroken / "hashed")


@pytest.mark.usefixtures("little_memory")
def test_stopped_before_the_description_it_continues(
    logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after(tmp_path, logs, steps, "seal_written", 0, FULL)
    before = {path.name: path.stat().st_mtime_ns for path in (unfinished(tmp_path) / "data").iterdir()}
    assert "dataset.json" not in before
    made = record_parts(monkeypatch)
    prepare("criteo", tmp_path / "d", input=logs, **FULL)
    assert made == []
    assert {name: (tmp_path / "d" / name).stat().st_mtime_ns for name in before} == before
    assert contents(tmp_path / "d") == contents(unbroken / "full")


# Killed

KILLED_AT = """
import os, signal, sys
from pytest import MonkeyPatch
from recmill import cli
from recmill.datasets import writing
from recmill.datasets.shuffle import Buckets
from tests.criteo_raw import set_limits
memory, chunk_bytes, target, calls = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1), int(sys.argv.pop(1))
set_limits(MonkeyPatch(), memory=memory, chunk_bytes=chunk_bytes)
targets = {"note": (writing, "write_json"), "bucket": (Buckets, "add"), "append": (writing.NpyWriter, "append")}
owner, name = targets[target]
real = getattr(owner, name)
def killing(*args, **options):
    global calls
    calls -= 1
    is_last = calls == 0  # before other threads count on
    result = real(*args, **options)
    if is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, killing)
cli.main()
"""


def kill(target: str, calls: int, command: list[str]) -> None:
    """Run a command that is killed after so many calls of a function, with little memory."""
    script = [sys.executable, "-c", KILLED_AT, *map(str, LITTLE.values()), target, str(calls)]
    done = subprocess.run([*script, *command], capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("target", "calls"),
    # Notes: the recipe, 3 reads, 26 counts, maps, 2 scatters, 3 writes, tables, 3 times multi-hot.
    [("note", 3), ("note", 20), ("note", 33), ("note", 43), ("bucket", 2), ("append", 30), ("append", 95)],
)
def test_killed_it_continues_to_the_same_bytes(
    target: str, calls: int, logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--shuffle", "global", "--seed", "5", "--multi-hot", "2"]
    kill(target, calls, ["prepare", "criteo", "--input", str(logs), "--output", str(tmp_path / "d"), *options])
    assert not (tmp_path / "d").exists()
    finished = done_parts(unfinished(tmp_path))
    before = {path.name: path.stat().st_mtime_ns for path in (unfinished(tmp_path) / "data").iterdir()}
    assert "dataset.json" not in before
    made = record_parts(monkeypatch)
    prepare("criteo", tmp_path / "d", input=logs, **FULL)
    assert finished
    assert not finished & set(made)
    for column in (number for number in range(1, 27) if f"count-C{number}" in finished):
        name = f"vocabulary_C{column}.npy"
        assert (tmp_path / "d" / name).stat().st_mtime_ns == before[name]
    assert contents(tmp_path / "d") == contents(unbroken / "full")


def test_a_killed_command_continues_only_with_the_same_options(run_cli: RunCli, tmp_path: Path) -> None:
    write_days(tmp_path / "raw", [260, 200, 101])
    command = ["prepare", "criteo", "--input", str(tmp_path / "raw"), "--output", str(tmp_path / "d")]
    kill("note", 2, command)  # the recipe, and that day_0 is read
    assert not (tmp_path / "d").exists()
    rows = unfinished(tmp_path) / "scratch" / "day_0.rows"
    before = rows.stat().st_mtime_ns
    changed = run_cli(*command, "--seed", "9")
    assert changed.returncode == 3
    assert "seed: was 0, is 9" in changed.stderr
    assert rows.stat().st_mtime_ns == before
    again = run_cli(*command)
    assert again.returncode == 0, again.stderr
    assert "resuming the unfinished work" in again.stderr
    prepare("criteo", tmp_path / "expected", input=tmp_path / "raw")
    assert contents(tmp_path / "d") == contents(tmp_path / "expected")


# Continued with something else


def test_other_options_or_inputs_are_named_and_the_work_is_kept(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, [40, 30])
    stopped(tmp_path, raw, "count-C5")
    done = done_parts(unfinished(tmp_path))
    for options, fact in (
        ({"min_frequency": 2}, "min_frequency: was 1, is 2"),
        ({"shuffle": "day"}, "shuffle: was none, is day"),
        ({"dense": "log1-clip"}, "dense: was log3, is log1-clip"),
    ):
        with pytest.raises(DataError, match=fact):
            prepare("criteo", tmp_path / "d", input=raw, **options)
    write_rows(raw / "day_1", random_rows(31, 77))
    with pytest.raises(
        DataError, match=r"input .*day_1: was .*\n  file day_1: was 7187 bytes, sample .*, is 7462 bytes"
    ) as caught:
        prepare("criteo", tmp_path / "d", input=raw)
    assert "start over with --overwrite" in str(caught.value)
    assert done_parts(unfinished(tmp_path)) == done
    description = prepare("criteo", tmp_path / "d", input=raw, min_frequency=2, overwrite=True)
    assert description["source"][1]["rows"] == 31
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "raw"]


def test_an_input_that_was_added_or_taken_away_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, [40, 30])
    stopped(tmp_path, raw, "count-C5")
    write_rows(raw / "day_2", random_rows(20, 1))
    with pytest.raises(DataError, match=r"day_2: was None, is \["):
        prepare("criteo", tmp_path / "d", input=raw)


BUDGETS = {"little": 60_000, "more": 120_000, "plenty": 200_000_000}


def test_budgets_differ_in_the_rounds_they_need(logs: Path, tmp_path: Path) -> None:
    rounds = {}
    for budget in BUDGETS:
        with pytest.MonkeyPatch.context() as patch:
            set_limits(patch, memory=BUDGETS[budget])
            made = record_parts(patch)
            prepare("criteo", tmp_path / budget, input=logs, **FULL)
        rounds[budget] = len([name for name in made if name.startswith("map") and name.endswith("day_0")])
    assert rounds["little"] > rounds["more"] > 1
    assert rounds["plenty"] == 0


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("map-0-day_2", "little", "more"),
        ("map-1-day_1", "little", "more"),
        ("map-1-day_1", "little", "plenty"),
        ("map-1-day_1", "more", "little"),
        ("scatter-day_0", "little", "plenty"),
        ("scatter-day_0", "plenty", "little"),
        ("scatter-day_1", "little", "more"),
        ("scatter-day_1", "plenty", "little"),
        ("write-day_1", "more", "little"),
        ("write-day_1", "plenty", "more"),
    ],
)
def test_another_memory_budget_for_the_rest_gives_the_same_bytes(
    name: str, first: str, then: str, logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is not part of the recipe: it may be changed after the system killed a run that took too much."""
    set_limits(monkeypatch, memory=BUDGETS[first])
    stopped(tmp_path, logs, name, **FULL)
    set_limits(monkeypatch, memory=BUDGETS[then])
    prepare("criteo", tmp_path / "d", input=logs, **FULL)
    assert contents(tmp_path / "d") == contents(unbroken / "full")


def test_a_memory_budget_that_was_too_small_may_be_raised(logs: Path, tmp_path: Path) -> None:
    """As the error advises."""
    options: dict[str, Any] = {"compat": "torchrec", "shuffle": "global"}
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, memory=460 * 16 - 1)
        with pytest.raises(ResourceError, match="raise --memory-budget"):
            prepare("criteo", tmp_path / "d", input=logs, **options)
    prepare("criteo", tmp_path / "d", input=logs, memory_budget="1GB", **options)
    prepare("criteo", tmp_path / "expected", input=logs, **options)
    assert contents(tmp_path / "d") == contents(tmp_path / "expected")


def test_a_memory_budget_that_was_too_large_may_be_lowered(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run that the system killed while it counted, because it took too much memory."""
    memory = []
    real = steps.write_vocabulary

    def spied(path: Path, rows: list[LogRows], column: int, max_ids: int, counting: Counting) -> int:
        memory.append(counting.memory)
        return real(path, rows, column, max_ids, counting)

    monkeypatch.setattr(steps, "write_vocabulary", spied)
    stopped(tmp_path, logs, "count-C2", memory_budget="8GB")
    memory.clear()
    prepare("criteo", tmp_path / "d", input=logs, memory_budget="512MB")
    assert max(memory) < 512_000_000


def test_the_work_may_be_moved_with_the_directory_it_is_in(logs: Path, unbroken: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    stopped(tmp_path / "old", logs, "write-day_0", **FULL)
    (tmp_path / "old").rename(tmp_path / "new")
    prepare("criteo", tmp_path / "new" / "d", input=logs, **FULL)
    assert contents(tmp_path / "new" / "d") == contents(unbroken / "full")


def test_overwrite_starts_from_the_beginning(
    logs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, logs, "write-day_0", **FULL)
    made = record_parts(monkeypatch)
    prepare("criteo", tmp_path / "d", input=logs, overwrite=True, **FULL)
    assert {"read-day_0", "read-day_1", "read-day_2", "count-C1"} <= set(made)
    assert contents(tmp_path / "d") == contents(unbroken / "full")


def test_killed_while_overwriting_leaves_the_dataset_that_was_there(logs: Path, tmp_path: Path) -> None:
    prepare("criteo", tmp_path / "d", input=logs)
    before = contents(tmp_path / "d")
    stopped(tmp_path, logs, "write-day_0", overwrite=True, min_frequency=2)
    assert contents(tmp_path / "d") == before


def test_scratch_files_of_a_finished_run_are_harmless(logs: Path, tmp_path: Path) -> None:
    """Killed after the dataset was renamed and before the scratch files were removed; then the dataset was removed."""
    real = writing.replace_directory

    def killed_after(output: Path, partial: Path) -> None:
        real(output, partial)
        raise InterruptionError

    stopped_by(writing, "replace_directory", killed_after, tmp_path, logs, {})
    finished = contents(tmp_path / "d")
    prepare("criteo", tmp_path / "d", input=logs)  # nothing to do
    shutil.rmtree(tmp_path / "d")
    prepare("criteo", tmp_path / "d", input=logs)
    assert contents(tmp_path / "d") == finished


def test_a_second_run_at_the_same_time_is_refused(logs: Path, tmp_path: Path) -> None:
    stopped(tmp_path, logs, "count-C5")
    before = contents_of_tree(unfinished(tmp_path))
    with (unfinished(tmp_path) / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another open file: as good as another process
        for overwrite in (False, True):
            with pytest.raises(ResourceError, match=r"in use by process .* Wait for that `recmill prepare`"):
                prepare("criteo", tmp_path / "d", input=logs, overwrite=overwrite)
    assert contents_of_tree(unfinished(tmp_path)) == before
    prepare("criteo", tmp_path / "d", input=logs)


def contents_of_tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_complete_dataset_is_left_alone_until_an_input_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    raw = tmp_path / "raw"
    write_days(raw, [40, 30])
    first = prepare("criteo", tmp_path / "d", input=raw)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "d").iterdir()}
    os.utime(raw / "day_0")  # a copy of the same bytes is the same input
    assert prepare("criteo", tmp_path / "d", input=raw, memory_budget="1GB") == first
    assert "is already prepared: nothing to do" in caplog.text
    text = (raw / "day_1").read_bytes()
    (raw / "day_1").write_bytes((b"1" if text[:1] == b"0" else b"0") + text[1:])  # as long as before
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("criteo", tmp_path / "d", input=raw)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "d").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "raw"]


# Full disks

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_too_little_disk_is_reported_with_both_numbers_before_anything_is_written(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """561 rows of 164 bytes, and the largest day once more as it is in the dataset (160 bytes a row)."""
    forecast = 561 * 164 + 260 * 160
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 12_345, 12_345))
    with pytest.raises(ResourceError, match="12,345 are free") as caught:
        prepare("criteo", tmp_path / "d", input=logs)
    needed = int(str(caught.value).split("about ")[1].split(" bytes")[0].replace(",", ""))
    assert needed == pytest.approx(forecast, rel=0.02)
    assert list(tmp_path.iterdir()) == []


def test_enough_disk_is_enough(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = int(1.05 * (561 * 164 + 260 * 160))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - free, free))
    description = prepare("criteo", tmp_path / "d", input=logs)
    assert [source["rows"] for source in description["source"]] == [260, 200, 101]


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "global"},
        {"shuffle": "day", "format": "parquet"},
        {"multi_hot": [20]},
        {"multi_hot": [20], "table_size": [10**6]},
        HASHED,
    ],
    ids=str,
)
def test_the_forecast_of_disk_space_is_never_exceeded(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabularies do not count: their size is not known beforehand. In a real log it is about 1 %."""
    write_days(tmp_path / "raw", [2000, 1500, 300], distinct=10**6 if "multi_hot" in options else 600)
    forecasts, used, part, check = [], [], Work.part, steps._check_disk

    def checked(*args: Any) -> int:
        forecasts.append(check(*args))
        return forecasts[-1]

    def measured(self: Work, name: str, make: Callable[[], Any]) -> Any:
        result = part(self, name, make)
        if name.startswith("count"):
            return result  # in several threads at once: files come and go
        ours = [path for path in self.directory.rglob("*") if path.is_file() and "vocabulary" not in path.name]
        used.append(sum(path.stat().st_size for path in ours if path.suffix != ".json"))
        return result

    monkeypatch.setattr(steps, "_check_disk", checked)
    monkeypatch.setattr(Work, "part", measured)
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", **options)
    assert max(used) <= forecasts[-1] * 1.01


def test_a_table_size_that_is_never_reached_needs_no_disk(logs: Path, tmp_path: Path) -> None:
    """Contiguous ids: 561 rows have at most 561 ids, however many rows a table may have."""
    description = prepare("criteo", tmp_path / "d", input=logs, multi_hot=[2], table_size=[2**32])
    assert max(feature["rows"] for feature in description["sparse"]) <= 561 + 2


@pytest.mark.parametrize("options", [FULL, PARQUET], ids=["npy", "parquet"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("target", ["scratch", "dataset"])
@pytest.mark.usefixtures("little_memory")
def test_a_disk_that_fills_up_is_reported_with_both_numbers_and_a_later_run_finishes(
    target: str, number: int, options: dict[str, Any], logs: Path, unbroken: Path, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        if target == "scratch":
            patch.setattr(Buckets, "add", full)
        elif options is FULL:
            patch.setattr(steps, "write_day", full)
        else:
            patch.setattr("recmill.datasets.clicks.write_parquet", full)
        free = shutil.disk_usage(tmp_path).free
        patch.setattr(shutil, "disk_usage", lambda path: Usage(10 * free, 9 * free, free))
        with pytest.raises(ResourceError, match="the disk is full") as caught:
            prepare("criteo", tmp_path / "d", input=logs, **options)
    assert f"{free:,} are free" in str(caught.value)
    needed = int(str(caught.value).split("full. ")[1].split(" bytes")[0].replace(",", ""))
    assert needed > 100_000
    assert not (tmp_path / "d").exists()
    prepare("criteo", tmp_path / "d", input=logs, **options)
    assert contents(tmp_path / "d") == contents(unbroken / ("full" if options is FULL else "parquet"))


def test_the_rows_that_were_prepared_are_the_rows_of_the_log(logs: Path, unbroken: Path) -> None:
    """So that two equally wrong results do not pass for right ones."""
    description = json.loads((unbroken / "full" / "dataset.json").read_text())
    labels = np.concatenate([np.load(unbroken / "full" / f"day_{day}_labels.npy") for day in range(3)])
    clicks = sum(line.startswith("1") for day in range(3) for line in (logs / f"day_{day}").read_text().splitlines())
    assert [source["rows"] for source in description["source"]] == [260, 200, 101]
    assert int(labels.sum()) == clicks
