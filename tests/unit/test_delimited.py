"""Reading delimited text: what is accepted, and the error for each kind of bad row."""

import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare
from recmill.datasets.inputs import text as text_module
from recmill.errors import DataError

from ..histories_raw import COLUMNS, KEEP_ALL, histories_of, prepared

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
        (
            "who,what,when\n" + GOOD + ",x,4\n",
            "column who: '' is empty. Fix the file, or get it again. To skip such rows: --on-bad-row skip.",
        ),
        (
            "who,what,when\n" + GOOD + 'b,"x\n' + "b,x,1\n" * 200_000,
            "row 4: a quote is opened and not closed. Close it, or ignore quotes (--no-quotes)",
        ),
        ("who,what,when\na,x,2020-01-01\na,y,soon\n", "row 2, column when: 'soon' is not a date"),
        ("who,what\n" + "a,x\n", "no column 'when' in its first row, which has: who, what"),
        ("who,what,when,when\n" + "a,x,1,1\n", "two columns 'when'"),
        ("who,what,when\n", "no rows"),
        ("", "raw.csv: no rows"),
        ("who,what,when_at\na,x,1\n", "which has: who, what, when_at. Did you mean 'when_at'?"),
    ],
)
def test_a_bad_row_is_one_error_with_file_row_and_value(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "raw.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, time_column="when", **KEEP_ALL)
    assert message in str(caught.value)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 24])
def test_rows_are_numbered_through_all_blocks(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block_bytes)
    with pytest.raises(DataError, match="row 41, column when: 'x'"):
        prepared(tmp_path, [("a", n, n) for n in range(40)] + [("a", "y", "x")], **KEEP_ALL)
    assert prepared(tmp_path, [("a", n, -n) for n in range(5)], **KEEP_ALL) == {"a": ["4", "3", "2", "1", "0"]}


def test_quotes_windows_line_ends_a_bom_and_compression_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 16)
    text = '\ufeffwhen,what,who\r\n3,"a, b","Ann ""A"""\r\n2,"two\nlines","Ann ""A"""\r\n1,c,"Ann ""A"""\r\n\r\n'
    (tmp_path / "raw.csv.gz").write_bytes(gzip.compress(text.encode()))
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv.gz", **COLUMNS, time_column="when", **KEEP_ALL)
    assert histories_of(tmp_path / "d") == {'Ann "A"': ["c", "two\nlines", "a, b"]}


def test_an_incomplete_gzip_file_is_an_error_and_a_missing_line_end_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = gzip.compress(b"who,what\n" + b"a,x\na,y\na,z\n" * 100)
    (tmp_path / "raw.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError, match="cut short or corrupt"):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv.gz", **COLUMNS, **KEEP_ALL)
    (tmp_path / "raw.csv").write_text("who,what\na,x\na,y\na,z")
    with caplog.at_level(logging.WARNING):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, **KEEP_ALL)
    assert caplog.text.count("the last row has no line end") == 1
    assert histories_of(tmp_path / "d") == {"a": ["x", "y", "z"]}


def test_dates_become_microseconds(tmp_path: Path) -> None:
    rows = [("a", "x", "1970-01-02 00:00:01"), ("a", "y", "1970-01-01 00:00:00.5"), ("a", "z", "1970-01-03 00:00:00")]
    assert prepared(tmp_path, rows, **KEEP_ALL) == {"a": ["y", "x", "z"]}
    assert np.load(tmp_path / "d" / "timestamps.npy").tolist() == [500_000, 86_401_000_000, 172_800_000_000]


def times_of(tmp_path: Path, values: list[str], **options: Any) -> list[int]:
    rows = [("a", str(number), value) for number, value in enumerate(values)]
    prepared(tmp_path, rows, **KEEP_ALL, **options)
    return [int(time) for time in np.load(tmp_path / "d" / "timestamps.npy")]


def test_dates_with_zones_become_utc_and_rows_may_differ_in_them(tmp_path: Path) -> None:
    values = ["1970-01-02T00:00:00Z", "1970-01-02T02:00:00+01:00", "1970-01-02 02:00:00+00:00", "1970-01-02 03:00"]
    assert times_of(tmp_path, values) == [(24 + hour) * 3_600_000_000 for hour in range(4)]


@pytest.mark.parametrize(
    ("values", "form", "expected"),
    [
        (["0.25", "1", "2.5"], None, [250_000, 1_000_000, 2_500_000]),
        (["soon", "0.25", "1", "2"], None, [250_000, 1_000_000, 2_000_000]),  # the first value that is a time decides
        (["soon", "7", "8", "9"], None, [7, 8, 9]),
        (["1", "2", "3"], "ms", [1000, 2000, 3000]),
        (["01.01.1970 00:01", "01.01.1970 00:02", "32.01.1970 00:03", "01.01.1970 00:04"], "%d.%m.%Y %H:%M",
         [60_000_000, 120_000_000, 240_000_000]),
    ],
)  # fmt: skip
def test_times_in_other_formats(tmp_path: Path, values: list[str], form: str | None, expected: list[int]) -> None:
    assert times_of(tmp_path, values, time_format=form, on_bad_row="skip") == expected


def test_a_time_in_another_format_than_the_named_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 2, column when: '1970-01-01' does not have the format '%d.%m.%Y'"):
        times_of(tmp_path, ["01.01.1970", "1970-01-01"], time_format="%d.%m.%Y")


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_bytes("who,what\na,café\n".encode("latin-1"))
    with pytest.raises(
        DataError, match=r"row 1: byte 15 of the text \(0xe9\) is not UTF-8. It is probably latin-1: use"
    ):
        prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **COLUMNS, **KEEP_ALL)
