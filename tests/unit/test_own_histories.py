"""`recmill prepare histories`: Parquet against CSV, and input that is refused."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmill import prepare
from recmill.data.opening import open_dataset
from recmill.data.recipes import features_with_other_ids
from recmill.errors import ConfigError, DataError, UserError

from ..histories_raw import COLUMNS, KEEP_ALL, histories_of


def test_parquet_gives_what_csv_gives_and_numbers_are_in_order_of_number(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": [10, 9, 10, 9, 10, 9], "what": ["x", "x", "y", "y", "z", "z"], "when": [3, 2, 1] * 2})
    frame.write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, "time_column": "when", **KEEP_ALL}
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
        ({"who": ["a", "b"]}, "no column 'what'; it has who"),
        ({"who": ["a", "b"], "what": [1.5, 2.5]}, "column 'what' is Float64, not text or whole numbers"),
        ({"who": ["a"], "what": ["x"], "when": ["noon"]}, "row 1, column when: noon is not a whole number or a date"),
        ({"who": ["a"], "what": pl.Series([2**64 - 1], dtype=pl.UInt64)}, "after row 0: conversion"),
        ({"who": pl.Series([], dtype=pl.String), "what": pl.Series([], dtype=pl.Int8)}, "no rows"),
    ],
)
def test_parquet_that_does_not_fit_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    pl.DataFrame(columns).write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, **({"time_column": "when"} if "when" in columns else {}), **KEEP_ALL}
    with pytest.raises(DataError, match=message):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **options)


def test_a_rating_of_parquet_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Polars holds that NaN is at least 3."""
    pl.DataFrame({"who": "a", "what": ["x", "y"], "stars": [4.0, float("nan")]}).write_parquet(tmp_path / "raw.parquet")
    options = {**COLUMNS, "rating_column": "stars", "min_rating": 3, **KEEP_ALL}
    with pytest.raises(DataError, match="row 2, column stars: nan is not a number"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **options)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("times", "form", "expected"),
    [
        (["1970-01-01T01:00:00+01:00", "1970-01-01", "1970-01-01T00:00:01Z"], None, [0, 0, 1_000_000]),
        ([0.5, 1.0, 2.5], None, [500_000, 1_000_000, 2_500_000]),
        ([1, 2, 3], "s", [1_000_000, 2_000_000, 3_000_000]),
        (["01.01.1970", "01.01.1970", "02.01.1970"], "%d.%m.%Y", [0, 0, 86_400_000_000]),
    ],
)
def test_texts_and_decimals_are_times_too(
    tmp_path: Path, kind: str, times: list[Any], form: str | None, expected: list[int]
) -> None:
    frame = pl.DataFrame({"who": "a", "what": ["x", "y", "z"], "when": times})
    path = tmp_path / f"raw.{kind}"
    frame.write_parquet(path) if kind == "parquet" else frame.write_ndjson(path)
    prepare("histories", tmp_path / "d", input=path, **COLUMNS, time_column="when", time_format=form, **KEEP_ALL)
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == expected


def test_datetimes_of_parquet_are_times(tmp_path: Path) -> None:
    when = [datetime(1970, 1, 1, 0, 0, 2), datetime(1970, 1, 1, 0, 0, 1), datetime(1970, 1, 1, 0, 0, 3)]
    pl.DataFrame({"who": "a", "what": ["x", "y", "z"], "when": when}).write_parquet(tmp_path / "raw.parquet")
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.parquet", **COLUMNS, time_column="when", **KEEP_ALL)
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [1_000_000, 2_000_000, 3_000_000]


@pytest.mark.parametrize(("input_ids", "suffix"), [("text", ".csv"), ("number", ".csv"), ("number", ".parquet")])
def test_items_get_the_titles_of_another_file(tmp_path: Path, input_ids: str, suffix: str) -> None:
    plays = pl.DataFrame({"who": [1] * 3 + [2] * 3, "what": [10, 9, 8] * 2})
    if input_ids == "text":
        plays.write_csv(tmp_path / "raw.csv")
    else:
        plays.write_parquet(tmp_path / "raw.parquet")
    titles = pl.DataFrame({"kind": "film", "title": ["Ran, 乱", "Alien"], "what": [9, 10]})
    titles.write_csv(tmp_path / "titles.csv") if suffix == ".csv" else titles.write_parquet(tmp_path / "titles.parquet")
    options = {**COLUMNS, **KEEP_ALL, "titles": tmp_path / f"titles{suffix}", "title_column": "title"}
    raw = tmp_path / ("raw.csv" if input_ids == "text" else "raw.parquet")
    dataset = prepare("histories", tmp_path / "d", input=raw, **options)
    items = pl.read_parquet(tmp_path / "d" / "items.parquet")
    assert dict(items.select("original_id", "title").iter_rows()) == {"10": "Alien", "9": "Ran, 乱", "8": "8"}
    assert dataset["notes"] == ["1 of 3 items have no title: their original id stands for it"]
    assert sorted(dataset["recipe"]["files"]) == sorted([raw.name, f"titles{suffix}"])


@pytest.mark.parametrize("source", ["file", "frame"])
def test_titles_may_be_a_frame(tmp_path: Path, source: str) -> None:
    plays = pl.DataFrame({"who": [1] * 3 + [2] * 3, "what": [10, 9, 8] * 2})
    plays.write_csv(tmp_path / "raw.csv")
    titles = pl.DataFrame({"what": [9, 10], "title": ["Ran", "Alien"]})
    given: Any = {"input": plays.to_pandas() if source == "frame" else tmp_path / "raw.csv"}
    options = {**given, **COLUMNS, **KEEP_ALL, "title_column": "title"}
    prepare("histories", tmp_path / "d", titles=titles.to_pandas(), **options)
    items = pl.read_parquet(tmp_path / "d" / "items.parquet")
    assert dict(items.select("original_id", "title").iter_rows()) == {"10": "Alien", "9": "Ran", "8": "8"}
    prepare("histories", tmp_path / "d", titles=titles, **options)  # the same again: nothing to do
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("histories", tmp_path / "d", titles=titles.reverse(), **options)
    with pytest.raises(DataError, match=r"titles: no column 'what'; it has id, title\n.*\(--title-id-column\)"):
        prepare("histories", tmp_path / "e", titles=titles.rename({"what": "id"}), **options)
    with pytest.raises(ConfigError, match="clicks: `schema` is a path, not a frame"):
        prepare("clicks", tmp_path / "e", input=plays, schema=plays)  # type: ignore[arg-type]


def test_the_file_of_titles_may_name_its_column_of_items_differently(tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("who,what\n" + "a,x\n" * 3)
    (tmp_path / "titles.csv").write_text("id,title\nx,Alien\n")
    options = {**COLUMNS, **KEEP_ALL, "repeats": "keep", "titles": tmp_path / "titles.csv", "title_column": "title"}
    prepare("histories", tmp_path / "d", input=raw, **options, title_id_column="id")
    assert pl.read_parquet(tmp_path / "d" / "items.parquet")["title"].to_list() == ["Alien"]
    message = r"titles\..*: no column 'what'.* id, title\.?\sName another column \(--title-id-column\)"
    with pytest.raises(DataError, match=message):
        prepare("histories", tmp_path / "e", input=raw, **options)
    (tmp_path / "near.csv").write_text("what_id,title\nx,Alien\n")
    with pytest.raises(DataError, match=r"Did you mean 'what_id'\? Name another column \(--title-id-column\)"):
        prepare("histories", tmp_path / "e", input=raw, **options | {"titles": tmp_path / "near.csv"})
    pl.read_csv(tmp_path / "titles.csv").write_parquet(tmp_path / "titles.parquet")
    with pytest.raises(DataError, match=message):
        prepare("histories", tmp_path / "e", input=raw, **options | {"titles": tmp_path / "titles.parquet"})
    with pytest.raises(DataError, match=r"no column 'nobody'.* Name another column \(--user-column\)"):
        prepare("histories", tmp_path / "e", input=raw, **options | {"title_id_column": "id", "user_column": "nobody"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"title_id_column": "id"}, "--title-id-column needs --titles."),
        ({"titles": "t.csv"}, "--title-column is missing: name the column of titles. t.csv has: what, title."),
        ({"min_rating": 3}, "--rating-column is missing: name the column of ratings. raw.csv has: who, what."),
        ({"min_rating": 3, "layout": "lines"}, "--min-rating is for rows with columns"),
        ({"rating_column": "what"}, "--rating-column needs --min-rating"),
        (
            {"time_column": "what"},
            "row 1, column what: 'x' is neither a whole number nor an ISO date. Give the right --time-format, name",
        ),
        (
            {"time_column": "what", "time_format": "iso8601"},
            "--time-format is 'iso8601'. Give 'iso' (2026-03-16T08:05:30), 's', 'ms'",
        ),
        ({"title_column": "title"}, "--title-column needs --titles"),
        (
            {"titles": "t.csv", "title_column": "name"},
            "t.csv: no column 'name' in its first row, which has: what, title",
        ),
        ({"titles": "u.csv", "title_column": "title"}, "u.csv: no column 'what'"),
        (
            {"titles": "t.csv", "title_column": "title", "title_columns": ["what", "title"]},
            "Leave --title-columns out, or remove the row.",
        ),
        ({"titles": "none.csv", "title_column": "title"}, "--titles none.csv: no such file"),
    ],
)
def test_titles_that_cannot_be_read_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw.csv").write_text("who,what\n" + "a,x\n" * 3)
    Path("t.csv").write_text("what,title\nx,X\n")
    Path("u.csv").write_text("id,title\nx,X\n")
    with pytest.raises(UserError, match=re.escape(message)):
        prepare("histories", "d", input="raw.csv", **COLUMNS | KEEP_ALL | options)
    assert not Path("d").exists()


def test_another_input_for_the_same_dataset_names_both_files(tmp_path: Path) -> None:
    for name in ("log.csv", "other.csv"):
        (tmp_path / name).write_text("who,what\n" + "a,x\na,y\na,z\n")
    prepare("histories", tmp_path / "d", input=tmp_path / "log.csv", **COLUMNS, **KEEP_ALL)
    with pytest.raises(DataError) as caught:
        prepare("histories", tmp_path / "d", input=tmp_path / "other.csv", **COLUMNS, **KEEP_ALL)
    assert str(caught.value).splitlines()[1:-1] == ["  it was made from log.csv, and now from other.csv"]


def test_contradicting_options_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.csv: no such file"):
        prepare("histories", tmp_path / "d", input=tmp_path / "x.csv", **COLUMNS)
    (tmp_path / "x.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"x\.xlsx: is no text but a zip archive or a spreadsheet"):
        prepare("histories", tmp_path / "d", input=tmp_path / "x.xlsx", **COLUMNS)


FRAME = pl.DataFrame(
    {"who": ["a", "b"] * 3, "what": [1, 1, 2, 2, 3, 3], "when": [datetime(2024, 1, d) for d in range(6, 0, -1)]}
)
FRAME_OPTIONS = {**COLUMNS, "time_column": "when", **KEEP_ALL}


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "arrow", "categories"])
def test_a_frame_gives_what_its_parquet_file_gives(tmp_path: Path, kind: str) -> None:
    frames: dict[str, Any] = {
        "polars": lambda: FRAME,
        "lazy": FRAME.lazy,
        "pandas": FRAME.to_pandas,
        "arrow": FRAME.to_arrow,
        "categories": lambda: FRAME.with_columns(pl.col("who").cast(pl.Categorical)),
    }
    prepare("histories", tmp_path / "frame", input=frames[kind](), **FRAME_OPTIONS)
    assert histories_of(tmp_path / "frame") == {"a": ["3", "2", "1"], "b": ["3", "2", "1"]}
    stamps = np.load(tmp_path / "frame/timestamps.npy")
    prepare("histories", tmp_path / "frame", input=frames[kind](), **FRAME_OPTIONS)  # the same again: nothing to do
    FRAME.write_parquet(tmp_path / "raw.parquet")
    prepare("histories", tmp_path / "file", input=tmp_path / "raw.parquet", **FRAME_OPTIONS)
    assert np.load(tmp_path / "file/timestamps.npy").tolist() == stamps.tolist()
    with pytest.raises(DataError, match="holds another dataset"):
        prepare("histories", tmp_path / "frame", input=FRAME.reverse(), **FRAME_OPTIONS)


def test_a_frame_passes_the_checks_of_a_file(tmp_path: Path) -> None:
    import pandas as pd

    for frame, message in [
        (pd.DataFrame({"who": ["a", None], "what": [1, 2]}), "input: row 2, column who: missing. Remove such rows."),
        (pd.DataFrame({"who": ["a", "b"], "what": [1, None]}), "input: row 2, column what: missing. Remove such rows."),
        (pd.DataFrame({"who": ["a", "b"], "what": [1, 2.5]}), "input: column 'what' is Float64, not text or whole"),
        (pl.DataFrame({"who": ["a"]}), "input: no column 'what'; it has who"),
        (
            pd.DataFrame({"who": ["a", 1], "what": [1, 2]}, dtype=object),
            "input: row 2, column who: int after str; it cannot",
        ),
        (pl.DataFrame({"who": [], "what": []}, schema={"who": pl.String, "what": pl.Int64}), "input: no rows"),
        (
            pd.DataFrame([["a", 1, 2]], columns=["who", "what", "what"]),
            r"input: the frame cannot be read \(.*non-unique.*\)\.$",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            prepare("histories", tmp_path / "d", input=frame, **COLUMNS, **KEEP_ALL)
    with pytest.raises(ConfigError, match="movielens: `input` is a path, not a frame"):
        prepare("movielens", tmp_path / "d", input=FRAME)
    with pytest.raises(ConfigError, match=r"input: none of 6 interactions is left"):
        prepare("histories", tmp_path / "d", input=FRAME, **COLUMNS, min_item_count=100)
    assert not list(tmp_path.iterdir()), "with other filters, the next call starts over"


BAD_CSV = b'who,what,stars\na,x,1\na,"y,\xc3\xa9",2\nb,z\na,z,many\na,,3\na,\xff,4\na,z,5\n'


def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    """Of seven rows, four are bad: too short, a rating of letters, no item, bytes that are not UTF-8."""
    (tmp_path / "raw.csv").write_bytes(BAD_CSV)
    tabs = BAD_CSV.replace(b'"y,\xc3\xa9"', b'y"\xc3\xa9').replace(b",", b"\t")
    (tmp_path / "raw.tsv").write_bytes(tabs)
    options = {**COLUMNS, "rating_column": "stars", "min_rating": 0, **KEEP_ALL}
    for suffix, item in (("csv", "y,\u00e9"), ("tsv", 'y"\u00e9')):
        raw, out = tmp_path / f"raw.{suffix}", tmp_path / suffix
        with pytest.raises(DataError, match=r"row 3: expected 3 fields, got 2"):
            prepare("histories", out, input=raw, **options)
        with pytest.raises(
            DataError, match=r"row 6: a character .* This is one bad row more than --max-bad-rows allows"
        ):
            prepare("histories", out, input=raw, on_bad_row="skip", max_bad_rows=3, **options)
        prepare("histories", out, input=raw, on_bad_row="skip", max_bad_rows=4, **options)
        assert histories_of(out) == {"a": ["x", item, "z"]}
        assert json.loads((out / "dataset.json").read_text())["notes"][:5] == [
            "4 bad rows skipped",
            f"skipped: raw.{suffix}: row 3: expected 3 fields, got 2, the last is 'z'",
            f"skipped: raw.{suffix}: row 4, column stars: 'many' is not a number",
            f"skipped: raw.{suffix}: row 5, column what: '' is empty",
            f"skipped: raw.{suffix}: row 6: a character that is not UTF-8",
        ]


def test_what_bad_rows_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text("who,what\na\nb\n")
    with pytest.raises(DataError, match=r"all of its 2 rows are bad; the first: raw.csv: row 1: expected 2 fields"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", on_bad_row="skip", **COLUMNS)
    with pytest.raises(ConfigError, match="--max-bad-rows needs --on-bad-row skip"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", max_bad_rows=3, **COLUMNS)
    for source in (tmp_path / "raw.parquet", pl.DataFrame({"who": ["a"], "what": ["x"]})):
        with pytest.raises(ConfigError, match=r"--on-bad-row skip is for .csv and .tsv"):
            prepare("histories", tmp_path / "d", input=source, on_bad_row="skip", **COLUMNS)


THREE = {"7": ["x", "y", "z"], "8": ["z", "y", "x"]}
EVENTS = [("7", "x", 1), ("8", "z", 2), ("7", "y", 3), ("8", "y", 4), ("7", "z", 5), ("8", "x", 6)]


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("raw.txt", "".join(f"{u} {i}\n" for u, i, _ in EVENTS), {"columns": ["who", "what"], **COLUMNS}),
        ("u.data", "".join(f"{u}\t{i}\t{t}\n" for u, i, t in EVENTS[::-1]),
         {"columns": ["who", "what", "when"], **COLUMNS, "time_column": "when"}),
        ("ratings.dat", "".join(f"{u}::{i}::{t}\n" for u, i, t in EVENTS),
         {"columns": ["who", "what", "when"], **COLUMNS}),
        ("raw.csv", ";who;what\n" + "".join(f'{n};"{u}";"{i}"\n' for n, (u, i, _) in enumerate(EVENTS)), COLUMNS),
        ("raw.csv", "who;what;note\n" + "".join(f'"{u}";"{i}";"a \\"b\\" c"\n' for u, i, _ in EVENTS), COLUMNS),
        ("raw.json", "".join(json.dumps({"who": int(u), "what": i, "when": t}) + "\n" for u, i, t in EVENTS[::-1]),
         {**COLUMNS, "time_column": "when"}),
        ("reviews", "".join(
            json.dumps({"who": u, "what": i, "when": f"2024-01-0{t}"}) + "\n" for u, i, t in EVENTS[::-1]
         ), {**COLUMNS, "time_column": "when", "layout": "jsonl"}),
        ("lines.txt", "7 x y z\n8 z y x \n", {"layout": "lines"}),
        ("lines.csv", "7,x,y,z\n8,z,y\n8,x\n", {"layout": "lines"}),
        ("raw.csv", "who,what,event,land\n7,a,view,NL\n7,b,buy,DE\n" + "".join(
            f"{u},{i},{'buy' if t % 2 else 'cart'},NL\n" for u, i, t in EVENTS
         ), {**COLUMNS, "only": ["event=buy,cart", "land=NL"]}),
    ],
)  # fmt: skip
def test_files_of_every_layout_give_the_same_histories(
    tmp_path: Path, name: str, content: str, options: dict[str, Any]
) -> None:
    (tmp_path / name).write_text(content)
    prepare("histories", tmp_path / "d", input=tmp_path / name, **options, **KEEP_ALL)
    assert histories_of(tmp_path / "d") == THREE


def test_lines_without_users_are_histories_of_their_own_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x y z\nz y x\n")
    (tmp_path / "b.txt").write_text("y x z\n")
    options = {"layout": "lines", "no_user": True, **KEEP_ALL}
    prepare("histories", tmp_path / "d", input=str(tmp_path / "*.txt"), **options)
    assert histories_of(tmp_path / "d") == {"1": ["x", "y", "z"], "2": ["z", "y", "x"], "3": ["y", "x", "z"]}


def test_several_files_and_parts_of_a_directory_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for number, (user, item, _) in enumerate(EVENTS):
        part = tmp_path / f"days/day={number}/part-0.parquet"
        part.parent.mkdir(parents=True)
        pl.DataFrame({"who": [user], "what": pl.Series([item], dtype=pl.Categorical)}).write_parquet(part)
    prepare("histories", tmp_path / "d", input=tmp_path / "days", **COLUMNS, **KEEP_ALL)
    assert histories_of(tmp_path / "d") == THREE
    pl.DataFrame({"who": [1], "item": [[1]]}).write_parquet(tmp_path / "days/day=1/part-0.parquet")
    with pytest.raises(DataError, match=r"day=1/part-0.parquet: no column 'what'; it has who, item"):
        prepare("histories", tmp_path / "e", input=tmp_path / "days", **COLUMNS, **KEEP_ALL)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("7 x\n8\n", {"layout": "lines"}, "row 2: a user without items: '8'"),
        ("7 x  y\n", {"layout": "lines"}, "row 1: 4 fields, of which one is empty"),
        ("7 x\n8 \xe9\n", {"layout": "lines"}, "byte 7 of the text (0xe9) is not UTF-8. It is probably latin-1"),
        ("", {"layout": "lines"}, "no rows"),
        ("7 x\n", {"layout": "lines", **COLUMNS}, "--user-column is for rows with columns; --layout lines has none"),
        ("7 x\n", {"layout": "lines", "only": ["a=b"]}, "--only is for rows with columns"),
        ("who what\n7 x\n", {"no_user": True, **COLUMNS}, "--no-user needs --layout lines"),
        ("who what\n7 x\n", {"item_column": "what"}, "raw.txt has: who, what."),
        ("who what\n7 x\n", {**COLUMNS, "only": ["event"]}, "--only 'event': give a column and its values, like"),
        ("who what\n7 x\n", {**COLUMNS, "only": ["event=a"]}, "no column 'event' in its first row, which has: who"),
        ("who what\n7 x\n", {**COLUMNS, "encoding": "utf-9"}, "--encoding is 'utf-9': no such codec"),
        ("who what\n7 x\n", {**COLUMNS, "separator": "\n"}, "--separator is '\\n': give one or more characters"),
        ('{"who": 7}\n', {**COLUMNS, "layout": "jsonl"}, "no column 'what'; it has who\nName another column"),
        ('{"who": 7, "what": 1}\n{"who": 8}\n', {**COLUMNS, "layout": "jsonl"}, "row 2, column what: missing"),
        ('{"who": 7, "what": 1, "t": "noon"}\n', {**COLUMNS, "layout": "jsonl", "time_column": "t"},
         "row 1, column t: noon is not a whole number or a date"),
    ],
)  # fmt: skip
def test_wrong_layouts_and_options_are_one_error_and_leave_nothing(
    tmp_path: Path, content: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "raw.txt").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.txt", **options, **KEEP_ALL)
    assert message in str(caught.value)
    assert caught.value.exit_code in (2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "frame"])
def test_wrong_names_of_columns_are_reported_together(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"user": ["a"], "track": ["x"], "played_at": [1]})
    source = tmp_path / f"plays.{kind}"
    if kind == "csv":
        frame.write_csv(source)
    elif kind == "parquet":
        frame.write_parquet(source)
    elif kind == "jsonl":
        frame.write_ndjson(source)
    columns: dict[str, Any] = {"user_column": "usr", "item_column": "trak", "time_column": "played_at"}
    with pytest.raises(DataError) as caught:
        prepare("histories", tmp_path / "out", input=frame if kind == "frame" else source, **columns)
    assert (
        "no columns 'usr', 'trak'; it has user, track, played_at. "
        "For 'usr': Did you mean 'user'? For 'trak': Did you mean 'track'?"
    ) in str(caught.value)
    is_file = kind != "frame"
    remedy = "Correct the options." if is_file else "Name other columns (--user-column, --item-column)."
    assert str(caught.value).endswith(f"\n{remedy}")


def test_datasets_with_other_items_of_the_same_number_are_told_apart(tmp_path: Path) -> None:
    rows = "user,item\n" + "".join(f"u{user},{item}\n" for user in range(3) for item in "xyz")
    for name, text in {"june": rows, "again": rows, "july": rows.replace("z", "new")}.items():
        (tmp_path / f"{name}.csv").write_text(text)
        options: dict[str, Any] = {"user_column": "user", "item_column": "item", **KEEP_ALL}
        prepare("histories", tmp_path / name, input=str(tmp_path / f"{name}.csv"), **options)
    for name, expected in {"again": [], "july": ["items"]}.items():
        dataset = open_dataset(tmp_path / name)
        assert features_with_other_ids(tmp_path / "run", tmp_path / "june", dataset) == expected
        assert features_with_other_ids(tmp_path / "run", tmp_path / "moved", dataset) == []
