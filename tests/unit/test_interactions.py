"""Anybody's interactions -> histories: order, filters, what is refused. Expectations are worked out by hand."""

import gzip
import logging
import os
import shutil
from collections import Counter, namedtuple
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill import prepare
from recmill.datasets.histories import delimited, interactions
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.schema import open_dataset

from ..conftest import RunCli
from ..histories_raw import histories_of

COLUMNS: dict[str, Any] = {"user_column": "who", "item_column": "what"}
ALL: dict[str, Any] = {"min_user_count": 0, "min_item_count": 0}
Usage = namedtuple("Usage", ["total", "used", "free"])


def write_csv(path: Path, rows: Sequence[Sequence[Any]], header: str = "who,what,when") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def prepared(tmp_path: Path, rows: Sequence[Sequence[Any]], **options: Any) -> dict[str, list[str]]:
    raw = write_csv(tmp_path / "raw.csv", rows)
    prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **{"time_column": "when", **options}, overwrite=True)
    return histories_of(tmp_path / "d")


def test_histories_are_in_order_of_time_and_ties_in_order_of_the_file(tmp_path: Path) -> None:
    rows = [("b", "x", 3), ("a", "z", 5), ("b", "y", 1), ("a", "y", 5), ("a", "x", -2), ("b", "z", 3)]
    assert prepared(tmp_path, rows, **ALL) == {"a": ["x", "z", "y"], "b": ["y", "x", "z"]}
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
    found = prepared(tmp_path, rows, time_column=time_column, **ALL)
    for user in range(100, 140):
        own = [(time if time_column else 0, item) for who, item, time in rows if who == user]
        assert found[str(user)] == [str(item) for _, item in sorted(own)]


def test_without_a_time_the_order_of_the_file_is_kept(tmp_path: Path) -> None:
    rows = [("a", "z", 5), ("b", "x", 3), ("a", "y", 4), ("b", "z", 3), ("a", "x", 1), ("b", "y", 1)]
    assert prepared(tmp_path, rows, time_column=None, **ALL) == {"a": ["z", "y", "x"], "b": ["x", "z", "y"]}
    assert not (tmp_path / "d" / "timestamps.npy").exists()


@pytest.mark.parametrize(
    ("repeats", "history"),
    [("first", ["x", "y", "z"]), ("last", ["y", "z", "x"]), ("keep", ["x", "y", "x", "z", "x"])],
)
def test_an_item_met_again_is_kept_once_unless_told_otherwise(tmp_path: Path, repeats: str, history: list[str]) -> None:
    rows = [("a", "x", 1), ("a", "y", 2), ("a", "x", 3), ("a", "z", 4), ("a", "x", 5)]
    assert prepared(tmp_path, rows, repeats=repeats, **ALL) == {"a": history}
    notes = open_dataset(tmp_path / "d").description.notes
    assert notes == ([] if repeats == "keep" else [f"--repeats {repeats}: 2 interactions dropped"])


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
    assert list(prepared(tmp_path, rows, **ALL)) == ["a"]
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
        patch.setattr(delimited, "_BLOCK_BYTES", 8 * bucket_rows)
        if not expected:
            with pytest.raises(DataError, match=r"none of .* is left|no rows"):
                prepared(directory, rows, k_core=k, **ALL)
            return
        found = prepared(directory, rows, k_core=k, **ALL)
    assert [(user, item) for user, items in found.items() for item in items] == expected


def test_nothing_left_says_which_filter_took_what(tmp_path: Path) -> None:
    rows = [("a", "x", 0), ("a", "y", 0), ("b", "x", 0)]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, rows, min_item_count=2, min_user_count=0)
    assert "none of 3 interactions is left:\n  --min-item-count 2: 1 interactions dropped (0 users, 1 items)" in str(
        caught.value
    )
    assert "users of fewer than 3 interactions: 2 interactions dropped (2 users, 1 items)" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.csv"]


@pytest.mark.parametrize(("suffix", "time_column", "row_bytes"), [("csv", "when", 52), ("parquet", None, 28)])
def test_too_little_disk_is_told_with_both_numbers_before_anything_is_written(
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
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **COLUMNS, time_column=time_column, **ALL)
    assert 0.65 < used[0] / (20_000 * (52 if time_column else 28)) < 1.02


def test_rows_that_are_there_twice_count_once_and_a_user_of_one_event_goes(tmp_path: Path) -> None:
    rows = [("a", "x", 1), ("a", "x", 1), ("a", "y", 2), ("a", "z", 2), ("a", "z", 2), ("one", "x", 1), ("one", "x", 1)]
    assert prepared(tmp_path, rows, **ALL) == {"a": ["x", "y", "z"]}
    assert open_dataset(tmp_path / "d").description.notes == [
        "--repeats first: 3 interactions dropped",
        "users of fewer than 3 interactions: 1 interactions dropped (1 users, 0 items)",
    ]
    assert prepared(tmp_path, rows, repeats="keep", **ALL) == {"a": ["x", "x", "y", "z", "z"]}


GOOD = "a,x,1\na,y,2\na,z,3\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("who,what,when\n" + GOOD + "b,x\n", "raw.csv: row 4: expected 3 fields, got 2, the last is 'x'. Fix"),
        ("who,what,when\n" + GOOD + "b,x,4,5\n", "row 4: expected 3 fields, got 4, the last is '5'"),
        ("who,what,when\n" + GOOD + "b\nb,x,1,1,1\n", "row 4: expected 3 fields, got 1"),
        ("who,what,when\n" + GOOD + "\nb,x,4\n", "row 4: expected 3 fields, got a blank line"),
        ("who,what,when\n" + GOOD + "b,x,noon\n", "row 4, column when: 'noon' is not a whole number"),
        ("who,what,when\n" + GOOD + "b,x,1.5\n", "row 4, column when: '1.5' is not a whole number"),
        ("who,what,when\n" + GOOD + "b,x,\n", "row 4, column when: '' is not a whole number"),
        ("who,what,when\n" + GOOD + "b,x,99999999999999999999\n", "'99999999999999999999' is not a whole number"),
        ("who,what,when\n" + GOOD + ",x,4\n", "row 4, column who: '' is empty"),
        ("who,what,when\n" + GOOD + 'b,"x\n' + "b,x,1\n" * 200_000, "Is a quote not closed"),
        ("who,what,when\na,x,2020-01-01\na,y,soon\n", "row 2, column when: 'soon' is not a date"),
        ("who,what\n" + "a,x\n", "no column 'when' in its first row, which has: who, what"),
        ("who,what,when,when\n" + "a,x,1,1\n", "two columns 'when'"),
        ("who,what,when\n", "no rows"),
        ("", "no column 'who' in its first row, which has: nothing"),
    ],
)
def test_a_bad_row_is_one_error_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "raw.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, time_column="when", **ALL)
    assert message in str(caught.value)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 24])
def test_rows_are_numbered_through_all_blocks(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", block_bytes)
    with pytest.raises(DataError, match="row 41, column when: 'x'"):
        prepared(tmp_path, [("a", n, n) for n in range(40)] + [("a", "y", "x")], **ALL)
    assert prepared(tmp_path, [("a", n, -n) for n in range(5)], **ALL) == {"a": ["4", "3", "2", "1", "0"]}


def test_quotes_windows_line_ends_bom_and_compression_are_read_as_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 16)
    text = '\ufeffwhen,what,who\r\n3,"a, b","Ann ""A"""\r\n2,"two\nlines","Ann ""A"""\r\n1,c,"Ann ""A"""\r\n\r\n'
    (tmp_path / "raw.csv.gz").write_bytes(gzip.compress(text.encode()))
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv.gz", **COLUMNS, time_column="when", **ALL)
    assert histories_of(tmp_path / "d") == {'Ann "A"': ["c", "two\nlines", "a, b"]}


def test_a_file_cut_short_is_an_error_and_a_missing_line_end_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = gzip.compress(b"who,what\n" + b"a,x\na,y\na,z\n" * 100)
    (tmp_path / "raw.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError, match="cut short or damaged"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv.gz", **COLUMNS, **ALL)
    (tmp_path / "raw.csv").write_text("who,what\na,x\na,y\na,z")
    with caplog.at_level(logging.WARNING):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, **ALL)
    assert "the last row has no line end" in caplog.text
    assert histories_of(tmp_path / "d") == {"a": ["x", "y", "z"]}


def test_dates_become_microseconds(tmp_path: Path) -> None:
    rows = [("a", "x", "1970-01-02 00:00:01"), ("a", "y", "1970-01-01 00:00:00.5"), ("a", "z", "1970-01-03 00:00:00")]
    assert prepared(tmp_path, rows, **ALL) == {"a": ["y", "x", "z"]}
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [500_000, 86_401_000_000, 172_800_000_000]


def test_parquet_gives_what_csv_gives_and_numbers_are_in_order_of_number(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": [10, 9, 10, 9, 10, 9], "what": ["x", "x", "y", "y", "z", "z"], "when": [3, 2, 1] * 2})
    frame.write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, "time_column": "when", **ALL}
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **options)
    # 10: x 3, y 1, z 2; 9: x 2, y 3, z 1. As numbers 9 comes before 10; as text, of a CSV, after it.
    assert list(histories_of(tmp_path / "d").items()) == [("9", ["z", "x", "y"]), ("10", ["y", "z", "x"])]
    frame.write_csv(tmp_path / "raw.csv")
    prepare("histories", tmp_path / "csv", input=tmp_path / "raw.csv", **options)
    assert list(histories_of(tmp_path / "csv").items()) == [("10", ["y", "z", "x"]), ("9", ["z", "x", "y"])]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"who": ["a", None], "what": ["x", "y"]}, "row 2, column who: missing"),
        ({"who": ["a", "b"]}, "no column 'what'; it has: who"),
        ({"who": ["a", "b"], "what": [1.5, 2.5]}, "column 'what' is Float64, not text or whole numbers"),
        ({"who": ["a"], "what": ["x"], "when": ["noon"]}, "column 'when' is String, not whole numbers, dates"),
        ({"who": ["a"], "what": pl.Series([2**64 - 1], dtype=pl.UInt64)}, "after row 0: conversion"),
        ({"who": pl.Series([], dtype=pl.String), "what": pl.Series([], dtype=pl.Int8)}, "no rows"),
    ],
)
def test_parquet_that_does_not_fit_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    pl.DataFrame(columns).write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, **({"time_column": "when"} if "when" in columns else {}), **ALL}
    with pytest.raises(DataError, match=message):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **options)


def test_a_rating_of_parquet_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Polars holds that NaN is at least 3."""
    pl.DataFrame({"who": "a", "what": ["x", "y"], "stars": [4.0, float("nan")]}).write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, "rating_column": "stars", "min_rating": 3, **ALL}
    with pytest.raises(DataError, match="row 2, column stars: nan is not a number"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **options)


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_bytes("who,what\na,café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"rows 1 to 1: one of them cannot be read .*not UTF-8"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, **ALL)


def test_datetimes_of_parquet_are_times(tmp_path: Path) -> None:
    when = [datetime(1970, 1, 1, 0, 0, 2), datetime(1970, 1, 1, 0, 0, 1), datetime(1970, 1, 1, 0, 0, 3)]
    pl.DataFrame({"who": "a", "what": ["x", "y", "z"], "when": when}).write_parquet(tmp_path / "raw.parquet")
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **COLUMNS, time_column="when", **ALL)
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [1_000_000, 2_000_000, 3_000_000]


def test_options_that_do_not_fit_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--min-rating and --rating-column go together"):
        prepare("histories", tmp_path / "d", input="x.csv", **COLUMNS, min_rating=3)
    with pytest.raises(DataError, match=r"x\.csv: no such file"):
        prepare("histories", tmp_path / "d", input=tmp_path / "x.csv", **COLUMNS)
    (tmp_path / "x.xlsx").touch()
    with pytest.raises(DataError, match=r"'\.xlsx' is none of"):
        prepare("histories", tmp_path / "d", input=tmp_path / "x.xlsx", **COLUMNS)


def test_a_changed_file_is_another_dataset(tmp_path: Path) -> None:
    raw = write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyz"])
    first = prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **ALL)
    assert prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **ALL) == first
    write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyzv"])
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **ALL)


def test_killed_after_reading_it_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_csv(tmp_path / "raw.csv", [("a", item, 0) for item in "xyz"])
    with monkeypatch.context() as patch:
        patch.setattr(interactions, "_write_arrays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **ALL)
    monkeypatch.setattr(interactions, "_store_rows", None)  # would fail if it were called again
    prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **ALL)
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
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes(), file.name
