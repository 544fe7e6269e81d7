"""Interactions -> histories: order, filters, interruption. Expectations are worked out by hand."""

import os
import shutil
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill import prepare
from recmill.data.opening import open_dataset
from recmill.datasets.histories import interactions
from recmill.datasets.inputs import text
from recmill.errors import ConfigError, DataError, ResourceError, UserError

from ..conftest import RunCli
from ..histories_raw import COLUMNS, KEEP_ALL, histories_of, prepared, write_csv

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_histories_are_in_order_of_time_and_ties_in_order_of_the_file(tmp_path: Path) -> None:
    rows = [("b", "x", 3), ("a", "z", 5), ("b", "y", 1), ("a", "y", 5), ("a", "x", -2), ("b", "z", 3)]
    assert prepared(tmp_path, rows, **KEEP_ALL) == {"a": ["x", "z", "y"], "b": ["y", "x", "z"]}
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [-2, 5, 5, 1, 3, 3]
    assert open_dataset(tmp_path / "d", verify="digests").description.notes == []


@pytest.mark.parametrize("time_column", ["when", None])
def test_many_ties_stay_in_order_of_the_file(
    tmp_path: Path, time_column: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough of them that a sort which is not stable would show; dealt to several buckets."""
    monkeypatch.setattr(interactions, "_BUCKET_ROWS", 5_000)
    generator = np.random.default_rng(7)
    users, times = generator.integers(100, 140, 20_000).tolist(), generator.integers(0, 3, 20_000).tolist()
    rows = [(user, item, time) for item, (user, time) in enumerate(zip(users, times, strict=True))]
    found = prepared(tmp_path, rows, time_column=time_column, **KEEP_ALL)
    for user in range(100, 140):
        own = [(time if time_column else 0, item) for who, item, time in rows if who == user]
        assert found[str(user)] == [str(item) for _, item in sorted(own)]


def test_without_a_time_the_order_of_the_file_is_kept(tmp_path: Path) -> None:
    rows = [("a", "z", 5), ("b", "x", 3), ("a", "y", 4), ("b", "z", 3), ("a", "x", 1), ("b", "y", 1)]
    assert prepared(tmp_path, rows, time_column=None, **KEEP_ALL) == {"a": ["z", "y", "x"], "b": ["x", "z", "y"]}
    assert not (tmp_path / "d" / "timestamps.npy").exists()


@pytest.mark.parametrize(
    ("repeats", "history"),
    [("first", ["x", "y", "z"]), ("last", ["y", "z", "x"]), ("keep", ["x", "y", "x", "z", "x"])],
)
def test_a_repeated_item_is_kept_as_repeats_says(tmp_path: Path, repeats: str, history: list[str]) -> None:
    rows = [("a", "x", 1), ("a", "y", 2), ("a", "x", 3), ("a", "z", 4), ("a", "x", 5)]
    assert prepared(tmp_path, rows, repeats=repeats, **KEEP_ALL) == {"a": history}
    notes = open_dataset(tmp_path / "d").description.notes
    assert notes == (
        [] if repeats == "keep" else [f"--repeats {repeats}: 2 interactions dropped; --repeats keep keeps them"]
    )


def test_items_are_filtered_before_users_and_once(tmp_path: Path) -> None:
    """Items: w, x, y 3 times, v, s twice, z and r once, and go. That leaves a 4 of its 5, b and c 5; a goes."""
    rows = [(user, item, 0) for user, items in (("a", "wxysz"), ("b", "xywvsr"), ("c", "wxyv")) for item in items]
    rows += [("c", "t", 0), ("b", "t", 0)]
    # Without a, item s is left with one interaction; it stays, as items are looked at once.
    assert prepared(tmp_path, rows, min_item_count=2, min_user_count=5) == {"b": list("xywvst"), "c": list("wxyvt")}
    assert open_dataset(tmp_path / "d").description.notes == [
        "--min-item-count 2: 2 interactions dropped (0 users, 2 items)",
        "users of fewer than 5 interactions: 4 interactions dropped (1 users, 0 items)",
    ]


def test_users_with_fewer_than_three_items_are_always_dropped_and_counted(tmp_path: Path) -> None:
    rows = [("a", item, 0) for item in "xyz"] + [("one", "x", 0), ("two", "x", 0), ("two", "y", 0)]
    assert list(prepared(tmp_path, rows, **KEEP_ALL)) == ["a"]
    assert open_dataset(tmp_path / "d").description.notes == [
        "users of fewer than 3 interactions: 3 interactions dropped (2 users, 0 items)"
    ]


def k_core(rows: list[tuple[str, str]], k: int) -> list[tuple[str, str]]:
    """Plainly, with dictionaries."""
    while True:
        users, items = Counter(user for user, _ in rows), Counter(item for _, item in rows)
        left = [(u, i) for u, i in rows if users[u] >= max(k, 3) and items[i] >= k]
        if left == rows:
            return rows
        rows = left


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("qrstuvwxyz"), st.integers(-3, 3)), max_size=120),
    st.integers(0, 4),
    st.sampled_from([2, 7, 1 << 22]),
)
def test_k_core_order_and_buckets_agree_with_a_plain_reading(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, int]], k: int, bucket_rows: int
) -> None:
    seen, expected = set(), []
    for user, item, _ in sorted(rows, key=lambda row: (row[0], row[2])):
        if (user, item) not in seen:
            expected.append((user, item))
        seen.add((user, item))
    expected = k_core(expected, k) if k else [p for p in expected if Counter(u for u, _ in expected)[p[0]] >= 3]
    directory = tmp_path_factory.mktemp("core")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interactions, "_BUCKET_ROWS", bucket_rows)
        patch.setattr(interactions, "_PART_ROWS", bucket_rows)
        patch.setattr(text, "BLOCK_BYTES", 8 * bucket_rows)
        if not expected:
            with pytest.raises(UserError, match=r"none of .* is left|no rows"):
                prepared(directory, rows, k_core=k, **KEEP_ALL)
            return
        found = prepared(directory, rows, k_core=k, **KEEP_ALL)
    assert [(user, item) for user, items in found.items() for item in items] == expected


def test_if_nothing_is_left_the_error_lists_what_each_filter_dropped(tmp_path: Path) -> None:
    rows = [("a", "x", 0), ("a", "y", 0), ("b", "x", 0)]
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path, rows, min_item_count=2, min_user_count=0)
    assert "none of 3 interactions is left:\n  --min-item-count 2: 1 interactions dropped (0 users, 1 items)" in str(
        caught.value
    )
    assert "users of fewer than 3 interactions: 2 interactions dropped (2 users, 1 items)" in str(caught.value)
    with pytest.raises(DataError, match="none of 3 interactions is left"):  # nobody chose these filters
        prepared(tmp_path, rows)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.csv"]


@pytest.mark.parametrize(("suffix", "time_column", "row_bytes"), [("csv", "when", 52), ("parquet", None, 28)])
def test_too_little_disk_is_an_error_with_both_numbers_before_anything_is_written(
    tmp_path: Path, suffix: str, time_column: str | None, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_csv(tmp_path / "raw.csv", [(user, item, 1) for user in range(100, 200) for item in range(10, 20)])
    if suffix == "parquet":
        pl.read_csv(raw).write_parquet(tmp_path / "raw.parquet")
    options = {"input": tmp_path / f"raw.{suffix}", **COLUMNS, "time_column": time_column}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 12_345, 12_345))
    with pytest.raises(ResourceError, match="12,345 are free") as caught:
        prepare("histories", tmp_path / "d", **options)
    needed = int(str(caught.value).split("about ")[1].split(" bytes")[0].replace(",", ""))
    assert needed == pytest.approx(1000 * row_bytes, rel=0.02)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted({".csv", f".{suffix}"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 54_000, 54_000))
    prepare("histories", tmp_path / "d", **options)


@pytest.mark.parametrize("time_column", ["when", None])
def test_the_forecast_of_disk_space_is_not_exceeded(
    tmp_path: Path, time_column: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for names of users and items: nobody knows beforehand how many there are."""
    generator = np.random.default_rng(1)
    rows = generator.integers(10**9, 10**10, (20_000, 3))
    rows[:, 0] = rows[:, 0] % 1000 + 10**9
    raw = write_csv(tmp_path / "raw.csv", rows.tolist())
    pl.read_csv(raw).write_parquet(tmp_path / "raw.parquet")
    used: list[int] = []

    def measured(directory: Path, *_: Any) -> None:
        write_arrays(directory, *_)
        used.append(sum(path.stat().st_size for path in directory.parent.rglob("*") if path.is_file()))

    write_arrays = interactions._write_arrays
    monkeypatch.setattr(interactions, "_write_arrays", measured)
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **COLUMNS, time_column=time_column, **KEEP_ALL)
    assert 0.6 < used[0] / (20_000 * (52 if time_column else 28)) < 1.02


def test_duplicate_rows_count_once_and_a_user_of_one_event_is_dropped(tmp_path: Path) -> None:
    rows = [("a", "x", 1), ("a", "x", 1), ("a", "y", 2), ("a", "z", 2), ("a", "z", 2), ("one", "x", 1), ("one", "x", 1)]
    assert prepared(tmp_path, rows, **KEEP_ALL) == {"a": ["x", "y", "z"]}
    assert open_dataset(tmp_path / "d").description.notes == [
        "--repeats first: 3 interactions dropped; --repeats keep keeps them",
        "users of fewer than 3 interactions: 1 interactions dropped (1 users, 0 items)",
    ]
    assert prepared(tmp_path, rows, repeats="keep", **KEEP_ALL) == {"a": ["x", "x", "y", "z", "z"]}


def test_a_changed_file_is_another_dataset(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyz"])
    first = prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **KEEP_ALL)
    assert prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **KEEP_ALL) == first
    write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyzv"])
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **KEEP_ALL)


def test_interrupted_after_reading_it_resumes_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyz"])
    with monkeypatch.context() as patch:
        patch.setattr(interactions, "_write_arrays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **KEEP_ALL)
    monkeypatch.setattr(interactions, "_store_rows", None)  # would fail if it were called again
    prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **KEEP_ALL)
    assert histories_of(tmp_path / "d") == {"a": ["x", "y", "z"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "raw.csv"]


def test_the_result_does_not_depend_on_the_number_of_cores(tmp_path: Path, run_cli: RunCli) -> None:
    generator = np.random.default_rng(1)
    rows = zip(
        generator.integers(0, 300, 9000), generator.integers(0, 500, 9000), generator.integers(0, 9, 9000), strict=True
    )
    raw = write_csv(tmp_path / "raw.csv", list(rows))
    for threads in ("1", "2"):
        command = ["prepare", "histories", "--input", raw, "--output", tmp_path / threads, "--k-core", "4"]
        options = ["--user-column", "who", "--item-column", "what", "--time-column", "when"]
        done = run_cli(*command, *options, env={**os.environ, "POLARS_MAX_THREADS": threads})
        assert done.returncode == 0, done.stderr
    files = [file for file in (tmp_path / "1").iterdir() if file.name != "preparation.json"]
    assert len(files) > 3
    for file in files:
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes(), file.name
