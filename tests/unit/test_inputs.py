"""What users bring: separators, encodings, JSON lines, types of Parquet, several files; the error for what is wrong."""

import gzip
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from recmill.cli import commands
from recmill.datasets.inputs import text
from recmill.datasets.inputs.fields import Fields, series
from recmill.datasets.inputs.files import distinct_names, found_files
from recmill.datasets.inputs.reading import blocks, check_columns, frames
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.parallel import ordered
from recmill.errors import DataError, UserError

from ..histories_raw import histories_of

Rows = list[dict[str, Any]]


def rows_of(path: Path, wanted: list[str], **keys: Any) -> Rows:
    return [row for frame in frames(path, InputSection(**keys), wanted) for row in frame.to_dicts()]


TWO = [{"a": "1", "c": "é x"}, {"a": "2", "c": "y"}]


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ("a,b,c\n1,2,é x\n2,,y\n", {}),
        ("a::b::c\n1::2::é x\n2::\t::y\n", {"separator": "::"}),
        ("a || b || c\n1 || 2 || é x\n2 ||  || y\n", {"separator": " || "}),
        ("a¦b¦c\n1¦2¦é x\n2¦¦y\n", {"separator": "¦"}),
        ('a b c\n1 2 "é x"\n2  y\n', {"separator": " "}),
        ("1;2;é x\n2;;y\n", {"separator": ";", "columns": ["a", "b", "c"]}),
        ("# a note\n,a,b,c\n7,1,2,é x\n8,2,,y\n", {"skip_lines": 2, "columns": ["", "a", "b", "c"]}),
        ("a,b,c\r1,2,é x\r2,,y\r", {}),
        ("a,b,c\r\n1,2,é x\r\n2,,y\r\n\r\n", {}),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "utf-8-sig", "utf-16-be"])
@pytest.mark.parametrize("block_bytes", [25, 1 << 24])
def test_texts_with_any_separator_encoding_and_line_end_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, keys: dict[str, Any], encoding: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    (tmp_path / "log.txt").write_bytes(content.encode(encoding))
    assert rows_of(tmp_path / "log.txt", ["a", "c"], encoding=encoding, **keys) == TWO


@pytest.mark.parametrize("block_bytes", [1, 3, 8, 1 << 24])
def test_line_breaks_and_quotes_in_quotes_are_read_right_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    expected = [{"a": 'say "hi"', "b": "two\nlines;"}, {"a": "C:\\", "b": 'x"'}]
    (tmp_path / "log.txt").write_text('a;b\n"say ""hi""";"two\nlines;"\n"C:\\";"x"""\n')
    assert rows_of(tmp_path / "log.txt", ["a", "b"], separator=";") == expected
    (tmp_path / "log.txt").write_text('a;b\n"say \\"hi\\"";"two\nlines;"\n"C:\\\\";"x\\""\n')
    assert rows_of(tmp_path / "log.txt", ["a", "b"], separator=";", escape=True) == expected


PLAIN = "a,b,c\n" + "".join(f"{i % 3 or ''},é {i % 5},\t\n,, x{'y' * i}\n" for i in range(40))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", "::"])
@pytest.mark.parametrize("block_bytes", [100, 1 << 24])
def test_fields_of_a_plain_text_are_those_of_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, separator: str, line_end: str
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    (tmp_path / "log.txt").write_text(PLAIN.replace(",", separator), newline=line_end)
    section = InputSection(separator=separator)
    expected = pl.concat(frames(tmp_path / "log.txt", section, ["c", "a", "b"]))
    found: dict[str, dict[tuple[int, int], str | None]] = {"a": {}, "c": {}}  # values by their hashes
    done = 0
    for block in blocks(tmp_path / "log.txt", section, ["c", "a", "b"], plain=["c", "a"]):
        assert isinstance(block, Fields)
        rows = expected[done : done + block.height]
        assert block.others.equals(rows.select("b"))
        for place, column in enumerate(block.columns):
            assert series(block.gather(place)(np.arange(block.height))).to_list() == rows[column].to_list()
            ones, others = block.hashes_of(place)
            hashes = zip(ones.tolist(), [0] * block.height if others is None else others.tolist(), strict=True)
            for key, value in zip(hashes, rows[column], strict=True):
                assert found[column].setdefault(key, value) == value
        done += block.height
    assert done == expected.height
    assert {name: len(keys) for name, keys in found.items()} == {name: expected[name].n_unique() for name in found}


def test_from_a_quote_on_a_text_is_read_as_frames_and_a_bad_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 50)
    for number, (row, message) in enumerate(
        {'"x,"",1': "a quote", "x": "got 1", "x,\0": "NUL", "x,\udce9": "0xe9"}.items()
    ):
        path = tmp_path / f"{number}.csv"
        path.write_text("a,b\n" + "1,2\n" * 60 + '"1",2\n' * (number % 2) + row + "\n", errors="surrogateescape")
        found = blocks(path, InputSection(), ["a", "b"], plain=["a", "b"])
        assert isinstance(next(found), Fields)
        with pytest.raises(DataError, match=rf"row {61 + number % 2}.*{message}"):
            list(found)
    path.write_text("a,b\n" + "1,2\n" * 60 + '"1",2\n' + "1,2\n" * 60)
    kinds = [isinstance(block, Fields) for block in blocks(path, InputSection(), ["a", "b"], plain=["a", "b"])]
    assert kinds == sorted(kinds, reverse=True) and {*kinds} == {True, False}


@pytest.mark.parametrize(
    ("row", "message"), [("x", "row 31: expected 2 fields, got 1"), ("1,2", "row 37 has more than")]
)
def test_texts_are_read_ahead_and_the_first_bad_row_is_named(
    row: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 8)
    monkeypatch.setattr(text, "MAX_ROW_BYTES", 50)
    path = tmp_path / "log.csv"
    path.write_text("a,b\n" + "1,2\n" * 30 + f"{row}\n" + "1,2\n" * 5 + "1," + "2" * 200 + "\n")
    with ThreadPoolExecutor(2) as pool, pytest.raises(DataError, match=message):
        for block in blocks(path, InputSection(), ["a"], ["a"], partial(ordered, pool, ahead=1)):
            assert block.height


CP1251 = b"a,b\n\xcc\xee\xf1\xea\xe2\xe0,\xcf\xf0\xe8\xe2\xe5\xf2\n"  # Moscow, hello


@pytest.mark.parametrize(
    ("content", "keys", "message"),
    [
        (b"a;b;c\n1;2;3\n", {}, "no column 'b' in its first row, which has 1 field; with ';' it would be 3"),
        (b"a,b\n1,2\n3;4\n", {}, "row 2: expected 2 fields, got 1, the last is '3;4'. It has 1 field; with ';'"),
        (b"a,b\n0,1,2\n1,1,2\n", {}, "row 1: expected 2 fields, got 3, the last is '2'. Does it begin with an index"),
        (b'a,b\n1,"x \\"y\\" z"\n', {}, "row 1: a quoted field continues after its closing quote. If quotes"),
        (b'a,b\n1,2\n1,"3\n4,"x"\n', {}, "row 2: a quoted field continues after its closing quote"),
        (b"u1,i2,3\nu3,i4,5\n", {}, "its first row is 'u1,i2,3', which looks like data. Name the columns"),
        (b"1,2\n3,4\n", {}, "its first row is '1,2', which looks like data. Name the columns"),
        (b"a,b\n3,4\n", {"columns": ["a", "b"]}, "looks like names of columns, but --columns gives them. Leave"),
        (b"x,y\n3,4\n", {"columns": ["a", "b"]}, "first row is 'x,y', which looks like names of columns"),
        (b'"a","b"\n"1","2"\n', {"quotes": False}, "in its first row, whose names are in quotes. Use --quotes"),
        (b'a,b\n1,"2,3"\n', {"quotes": False}, "got 3, the last is '3\"'. Are its fields in quotes? Use --quotes"),
        (b"a,caf\xe9\n1,2\n", {}, "row: byte 6 of the text (0xe9) is not UTF-8. It is probably latin-1: use --enc"),
        (b"a,b\n1,2\n1,\x00\n", {}, "row 2: a NUL byte in '\\x00'"),
        (b"a,b\n1,caf\xe9\n", {}, "row 1: byte 10 of the text (0xe9) is not UTF-8. It is probably latin-1: use"),
        (CP1251, {}, "row 1: byte 5 of the text (0xcc) is not UTF-8. It is probably cp1251"),
        ("a,b\n1,\u5317\u4eac\u4e0a\u6d77\u624b\u673a\n".encode("gbk"), {}, "It is probably gb18030: use --enc"),
        ("a,b\n1,\u03bf\u03bd\u03bf\u03bc\u03b1\n".encode("cp1253"), {}, "not UTF-8. Name the encoding of"),
        ("a,b\n1,2\n".encode("utf-16"), {}, "it is in UTF-16, its first bytes are FF FE. Use --encoding 'utf-16'"),
        ("a,b\n1,2\n".encode("utf-16-le"), {}, "it is in UTF-16, its first bytes are 61 00. Use --encoding 'utf-16"),
        (b"a,b\n1,2\n"[:-1] + b"\x81\n", {"encoding": "cp1252"}, "byte 8 is not cp1252"),
        (b"a,b\n1,\xc3\xa9\n", {"encoding": "utf-16"}, "not utf-16. It is probably utf-8: use --encoding 'utf-8'"),
        (b'a,b\n1,2\n1,"3\n4,5\n', {}, "row 2: a quote is opened and not closed. Close it, or ignore"),
        (b"a,b\n1,2\n1," + b"x" * (1 << 20), {}, "row 2 has more than 65,536 bytes. Is a quote not closed"),
        (b"x" * (1 << 20), {}, "row 1 has more than 65,536 bytes"),
        (b"PAR1", {}, "is no text but a Parquet file. Name it .parquet"),
        (b"a,b\n", {}, "no rows"),
        (b"1,2\n1,2\n", {"columns": ["a", "c"]}, "no column 'b' in --columns, which has: a, c"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_one_error_with_place_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, keys: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(text, "MAX_ROW_BYTES", 1 << 16)
    monkeypatch.setattr("recmill.datasets.inputs.delimited.MAX_ROW_BYTES", 1 << 16)
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 16)
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(frames(tmp_path / "log.csv", InputSection(**keys), ["b"], "--"))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "log.csv"))


def test_json_lines_are_read_as_text_lists_as_lists_and_a_missing_key_is_a_missing_value(tmp_path: Path) -> None:
    lines: Rows = [
        {"id": 7, "x": 1.5, "tags": ["a", None, 3], "ok": True, "where": {"x": 1}, "s": "[no list"},
        {"id": "7", "tags": [], "s": "\u00e9 \n{"},
        {"tags": None, "x": -2},
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(content))
    assert rows_of(tmp_path / "log.jsonl.gz", ["id", "x", "tags", "ok", "s"]) == [
        {"id": "7", "x": "1.5", "tags": ["a", None, "3"], "ok": "true", "s": "[no list"},
        {"id": "7", "x": None, "tags": [], "ok": None, "s": "\u00e9 \n{"},
        {"id": None, "x": "-2", "tags": None, "ok": None, "s": None},
    ]
    with pytest.raises(DataError, match=r"column where holds objects. Write their parts to keys of their own"):
        rows_of(tmp_path / "log.jsonl.gz", ["where"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": 2\n', "row 2 is no JSON"),
        ('{"a": 1}\n[1]\n', "row 2 is no object: '[1]'"),
        ('[{"a": 1}]\n', "it is one JSON array. Write one object per line"),
        ('{"a": 1}\n{"a": [1]}\n', "row 1, column a: '1', where other rows have a list"),
        ('{"a": [1]}\n{"a": 2}\n', "row 2, column a: '2', where other rows have a list"),
        ('{"a": {"b": 1}}\n', "column a holds objects"),
        ('{"a": [[1]]}\n', "column a holds lists of lists"),
        ("", "no rows"),
    ],
)
def test_wrong_json_lines_are_one_error_with_the_row(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "log.jsonl", ["a"])
    assert message in str(caught.value)


def test_types_of_parquet_are_converted(tmp_path: Path) -> None:
    when = datetime(2024, 1, 1, 12, tzinfo=UTC)
    pl.DataFrame(
        {
            "dictionary": pl.Series(["x"], dtype=pl.Categorical),
            "price": pl.Series([Decimal("1.50")], dtype=pl.Decimal(10, 2)),
            "count": pl.Series([Decimal("7")], dtype=pl.Decimal(10, 0)),
            "when": pl.Series([when]).dt.convert_time_zone("Asia/Tokyo"),
            "nothing": pl.Series([None], dtype=pl.Null),
            "pair": pl.Series([[1, 2]], dtype=pl.Array(pl.Int32, 2)),
            "names": pl.Series([["x"]], dtype=pl.List(pl.Categorical)),
        }
    ).write_parquet(tmp_path / "log.parquet")
    columns = ["dictionary", "price", "count", "when", "nothing", "pair", "names"]
    assert rows_of(tmp_path / "log.parquet", columns) == [
        {
            "dictionary": "x", "price": 1.5, "count": 7, "when": datetime(2024, 1, 1, 12), "nothing": None,
            "pair": [1, 2], "names": ["x"],
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pl.Series("a", [{"x": 1}]), "Struct"),
        (pl.Series("a", [[[1]]]), "List(List(Int64))"),
        (pl.Series("a", [[{"key": "x", "value": 1}]]), "a map"),
        (pl.Series("a", [b"x"]), "Binary"),
        (pl.Series("a", [timedelta(1)]), "Duration"),
    ],
)
def test_types_of_parquet_that_no_feature_is_made_of_are_refused_by_name(
    tmp_path: Path, values: pl.Series, kind: str
) -> None:
    values.to_frame().write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "log.parquet", ["a"])
    assert f"log.parquet: column a holds {kind}" in str(caught.value)


def test_files_are_found_in_the_order_of_names_and_none_twice(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "days/day=2/part-0.parquet", "days/day=1/part-0.parquet", "days/_SUCCESS"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    parts = [tmp_path / "days/day=1/part-0.parquet", tmp_path / "days/day=2/part-0.parquet"]
    assert found_files(str(tmp_path / "*.csv")) == [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert found_files(str(tmp_path / "days")) == parts
    assert found_files(f"{tmp_path}/b.csv,{tmp_path}/days/day*") == [tmp_path / "b.csv", *parts]
    assert distinct_names(parts) == ["day=1/part-0.parquet", "day=2/part-0.parquet"]
    (tmp_path / "c.csv").symlink_to(tmp_path / "a.csv")
    for given in (f"{tmp_path}/a.csv,{tmp_path}/a*.csv", f"{tmp_path}/*.csv"):
        with pytest.raises(DataError, match=r"names .*a\.csv twice, also as .*[ac]\.csv. Name each file once"):
            found_files(given)
    with pytest.raises(DataError, match=r"--input .*/\*\.tsv: no such file. Give a file, a directory, or a pattern"):
        found_files(str(tmp_path / "*.tsv"))
    (tmp_path / "days/day=1/part-0.parquet").unlink()
    with pytest.raises(DataError, match=r"--input .*/days/day=1: a directory without files"):
        found_files(str(tmp_path / "days/day=1"))


def test_what_is_wrong_with_several_files_is_reported_at_once_by_file(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"a": [1], "b": ["x"], "c": [datetime(2024, 1, 1)]}
    for name, columns in {
        "1": whole,
        "2": {"a": ["1"], "b": ["x"]},
        "3": {**whole, "b": [["x"]], "c": [1]},
        "4": {**whole, "a": [{"x": 1}]},
    }.items():
        pl.DataFrame(columns).write_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError) as caught:
        check_columns(found_files(str(tmp_path)), InputSection(), ["a", "b", "c"])
    first = tmp_path / "1.parquet"
    assert str(caught.value).splitlines()[1:-1] == [
        f"  {tmp_path}/2.parquet: no column 'c'; it has a, b",
        f"  {tmp_path}/3.parquet: column b holds lists, but values in {first}",
        f"  {tmp_path}/3.parquet: column c holds values, but times in {first}",
        f"  {tmp_path}/4.parquet: column a holds Struct({{'x': Int64}}), of which no feature can be made. "
        "Leave it out, or write its parts to columns of their own.",
    ]
    pl.DataFrame({"a": [None]}).write_parquet(tmp_path / "4.parquet")
    with pytest.raises(DataError) as caught:
        check_columns(found_files(str(tmp_path)), InputSection(), ["a", "a"], copied=["a"])
    assert str(caught.value).splitlines()[1:-1] == [
        f"  {tmp_path}/2.parquet: column a holds String, but Int64 in {first}",
        f"  {tmp_path}/4.parquet: column a holds Null, but Int64 in {first}",
    ]


def test_what_occurs_twice_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError) as caught:
        check_columns(found_files(str(tmp_path / "log.csv")), InputSection(), ["a", "a"])
    assert str(caught.value).splitlines()[1:-1] == [f"  {tmp_path}/log.csv: two columns 'a'"]


def test_a_quote_that_is_not_closed_does_not_look_like_a_missing_line_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log.csv").write_text('a,b\n1,"x\n2,y\n')
    with pytest.raises(DataError, match="a quote is opened and not closed"):
        rows_of(tmp_path / "log.csv", ["a"])
    assert not caplog.messages


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 16)
    (tmp_path / "log.csv").write_text("a,b\n" + "1,2\n" * 20)
    blocks = frames(tmp_path / "log.csv", InputSection(), ["a"])
    next(blocks)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("3,4\n")
    with pytest.raises(DataError, match=r"log\.csv: it changed while it was read. Wait until it is complete"):
        list(blocks)


def test_the_commands_for_histories_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = [(user, item) for user in range(5) for item in range(5)]
    files = {
        "ml-1m.txt": "".join(f"{user} {item}\n" for user, item in events),
        "ratings.dat": "".join(f"{user}::{item}::5::{item}\n" for user, item in events),
        "movies.dat": "".join(f"{item}::Caf\xe9 {item}::Drama\n" for item in range(5)),
        "Beauty.txt": "".join(f"{user} 0 1 2 3 4\n" for user in range(5)),
        "sessions.txt": "0 1 2 3 4\n" * 5,
        "events/1.csv": "user,item,time,event\n" + "".join(f"{u},{i},{i},{'cart'}\n{u},9,9,view\n" for u, i in events),
    }
    Path("events").mkdir()
    for name, content in files.items():
        Path(name).write_bytes(content.encode("latin-1"))
    reviews = [{"reviewerID": f"A{user}", "asin": f"{item}", "unixReviewTime": item} for user, item in events]
    Path("reviews.json.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in reviews).encode()))
    page = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
    lines = [line[2:] for line in page.splitlines() if line.startswith("$ recmill prepare histories")]
    assert len(lines) == 6
    for line in lines:
        done = CliRunner().invoke(commands, shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.exception)
        histories = histories_of(Path(shlex.split(line)[-1]))
        assert [*histories.values()] == [["0", "1", "2", "3", "4"]] * 5, line
    assert pl.read_parquet("data/ml-1m/items.parquet")["title"][1] == "Caf\xe9 1"


SCHEMA = '[label]\ncolumn = "click"\n[[feature]]\ncolumn = "site"\ntype = "categorical"\n'
GOOD = "click,site\n" + "0,a\n1,b\n" * 20


@pytest.mark.parametrize(
    ("name", "content", "section", "code", "message"),
    [
        ("log.csv", GOOD.replace(",", ";").encode(), "", 3, "its first row, which has 1 field; with ';' it would be 2"),
        ("log.csv", GOOD[11:].encode(), "", 3, "no columns 'click', 'site': its first row is '0,a'"),
        ("log.csv", b"0,a,b\n1,b,a\n", "", 3, "its first row is '0,a,b', which looks like data. Name the columns (in"),
        ("log.csv", GOOD.encode(), 'columns = ["click", "site"]', 3, "but input.columns gives them. Leave"),
        ("log.csv", (GOOD + "1\n").encode(), "", 3, "log.csv: row 41: expected 2 fields, got 1"),
        ("log.csv", (GOOD + '1,"b\n').encode(), "", 3, "row 41: a quote is opened and not closed. Close it, or "
         "ignore quotes (input.quotes = false)"),
        ("log.csv", GOOD.encode() + b"1,\xe9\n", "", 3, "row 41: byte 174 of the text (0xe9) is not UTF-8. It is "
         "probably latin-1: use input.encoding = 'latin-1'"),
        ("log.csv", GOOD.encode("utf-16"), "", 3, "it is in UTF-16"),
        ("log.csv", GOOD.encode() + b"1,\0\n", "", 3, "row 41: a NUL byte"),
        ("log.jsonl", b'{"click": 1, "site": {"x": 1}}\n', "", 3, "log.jsonl: column site holds Struct"),
        ("log.jsonl", b'{"click": 1}\n', "", 3, "no column 'site'; it has click"),
        ("log.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-9], "", 3, "cut short or corrupt"),
        ("log.csv", GOOD.encode(), 'encoding = "utf-9"', 2, "input.encoding is 'utf-9': no such codec"),
        ("log.csv", GOOD.encode(), 'separator = ""', 2, "input.separator is ''"),
        ("log.csv", GOOD.encode(), 'columns = ["a", "a"]', 2, "a name occurs twice"),
        ("log.csv", GOOD.encode(), 'columns = ["a", ""]', 2, "a name is empty"),
        ("log.csv", b"", "", 3, "log.csv: no rows. Get the file again"),
        ("other.csv", GOOD.encode(), "", 3, "log.*: no such file"),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_read_ends_preparation_with_its_code_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, section: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    Path("clicks.toml").write_text(f"[input]\n{section}\n{SCHEMA}")
    words = ["prepare", "clicks", "--schema", "clicks.toml", "--input", "log.*", "--output", "data"]
    error = CliRunner().invoke(commands, words).exception
    assert isinstance(error, UserError)
    assert message in str(error)
    assert error.exit_code == code
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["clicks.toml", name])


def test_a_pipe_is_refused_because_it_can_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"log.csv: is no file, but rows are read more than once. Write them to a file"):
        found_files(str(tmp_path / "log.csv"))
