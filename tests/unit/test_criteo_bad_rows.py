"""Raw Criteo logs as they really come: every value is right, or the file, row and column at fault are named."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill import prepare
from recmill.errors import DataError

from ..conftest import RunCli
from ..criteo_raw import Row, contents, random_rows, read_plainly, to_text, write_rows, write_text

ROWS = random_rows(30, 7, smallest=-1, missing=0.1)
OTHERS = random_rows(20, 8, smallest=-1)
for _row in ROWS:
    _row[-1] = _row[-1] or "0a0b0c0d"  # so that the last field of the log is there
RAW_IDS: dict[str, Any] = {"compat": "torchrec", "ids": "mod"}  # nothing is changed: what was read can be compared


def with_field(number: int, column: int, value: str, rows: list[Row] = ROWS) -> bytes:
    """The log with one field changed: of row `number` (the first is 1)."""
    changed = [list(row) for row in rows]
    changed[number - 1][column] = value
    return to_text(changed)


def two_days(tmp_path: Path, text: bytes, name: str = "day_0") -> Path:
    write_rows(tmp_path / "raw" / "day_1", OTHERS)
    write_text(tmp_path / "raw" / name, text)
    return tmp_path / "raw"


def assert_refused(tmp_path: Path, raw: Path, *facts: str, **options: Any) -> None:
    """With all these facts, and nothing is left behind."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(DataError) as caught:
        prepare("criteo", tmp_path / "d", input=raw, **options)
    for fact in facts:
        assert fact in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("column", "value", "facts"),
    [
        (0, "2", "column label: '2' is not a label, which is 0 or 1"),
        (0, "", "column label: '' is not a label"),
        (0, "-1", "column label: '-1' is not a label"),
        (0, "01", "column label: '01' is not a label"),
        (1, "12x", "column I1: '12x' is not a whole number"),
        (5, "1.5", "column I5: '1.5' is not a whole number"),
        (5, "1e3", "column I5: '1e3' is not a whole number"),
        (13, "-", "column I13: '-' is not a whole number"),
        (13, "--1", "column I13: '--1' is not a whole number"),
        (13, "+1", "column I13: '+1' is not a whole number"),
        (13, " 1", "column I13: ' 1' is not a whole number"),
        (13, "NULL", "column I13: 'NULL' is not a whole number"),
        (2, "2147483648", "column I2: '2147483648' does not fit in 32 bits"),
        (2, "-2147483649", "column I2: '-2147483649' does not fit in 32 bits"),
        (2, "18446744073709551617", "column I2: '18446744073709551617' does not fit in 32 bits"),
        (2, "9" * 60, f"column I2: '{'9' * 60}' does not fit in 32 bits"),
        (14, "123456789", "column C1: '123456789' does not fit in 32 bits"),
        (39, "0123456789abcdef0", "column C26: '0123456789abcdef0' does not fit in 32 bits"),
        (20, "abcdefgh", "column C7: 'abcdefgh' is not a hexadecimal id"),
        (20, "0x12", "column C7: '0x12' is not a hexadecimal id"),
        (20, "-1", "column C7: '-1' is not a hexadecimal id"),
        (39, "1234567 ", "column C26: '1234567 ' is not a hexadecimal id"),
        (20, '"abc', "column C7: '\"abc' is not a hexadecimal id"),
        (20, 'abc"', "column C7: 'abc\"' is not a hexadecimal id"),
        (20, '12"34567', "column C7: '12\"34567' is not a hexadecimal id"),
        (3, '"', "column I3: '\"' is not a whole number"),
        (0, '"1', "column label: '\"1' is not a label"),
        (20, "ab\0cd", "column C7: 'ab\\x00cd' is not a hexadecimal id"),
        (6, "\0", "column I6: '\\x00' is not a whole number"),
        (30, "ab\rcd", "column C17: 'ab\\rcd' is not a hexadecimal id"),
        (9, "٣", "column I9: '٣' is not a whole number"),
    ],
)
def test_a_bad_value_is_named_with_its_file_row_and_column(column: int, value: str, facts: str, tmp_path: Path) -> None:
    for number in (1, 17, 30):
        raw = two_days(tmp_path, with_field(number, column, value))
        assert_refused(tmp_path, raw, f"{raw / 'day_0'}: row {number}, {facts}", "--on-bad-row skip")


def test_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    raw = two_days(tmp_path, with_field(4, 22, "@@@@").replace(b"@@@@", b"\xff\xfe12"))
    assert_refused(tmp_path, raw, f"{raw / 'day_0'}: row 4, column C9: '\\xff\\xfe12' is not a hexadecimal id")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda row: row[:39], f"expected 40 fields, got 39, the last is {ROWS[2][38]!r}"),
        (lambda row: row[:3], f"expected 40 fields, got 3, the last is {ROWS[2][2]!r}"),
        (lambda row: [""], "expected 40 fields, got 1, the last is ''"),
        (lambda row: [*row, ""], "expected 40 fields, got 41, the last is ''"),
        (lambda row: [*row, *row], f"expected 40 fields, got 80, the last is {ROWS[2][39]!r}"),
        (lambda row: [" ".join(row)], "expected 40 fields, got 1"),
        (lambda row: row[1:], "expected 40 fields, got 39"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_row_of_another_length_is_named(suffix: str, change: Any, facts: str, tmp_path: Path) -> None:
    rows = [*ROWS[:2], change(ROWS[2]), *ROWS[3:]]
    raw = two_days(tmp_path, to_text(rows), f"day_0{suffix}")
    assert_refused(tmp_path, raw, f"{raw / f'day_0{suffix}'}: row 3: {facts}")


def test_the_row_is_counted_through_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recmill.datasets.criteo import steps as criteo

    real = criteo.parse_log
    monkeypatch.setattr(criteo, "parse_log", lambda *a, **k: real(*a, **{**k, "chunk_bytes": 3000}))
    rows = random_rows(1300, 3)
    raw = two_days(tmp_path, with_field(1234, 9, "x", rows))
    assert_refused(tmp_path, raw, "day_0: row 1,234, column I9: 'x' is not a whole number")
    description = prepare("criteo", tmp_path / "d", input=raw, on_bad_row="skip")
    assert description["source"][0]["rows"] == 1299


LAST_ROW = len("\t".join(ROWS[-1]))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kept", [1, 2, 5, LAST_ROW // 3, LAST_ROW // 2, LAST_ROW - 8, LAST_ROW - 1])
def test_a_file_that_ends_in_the_middle_of_a_row_is_refused_even_when_skipping(
    kept: int, suffix: str, tmp_path: Path
) -> None:
    text = to_text(ROWS[:-1]) + "\t".join(ROWS[-1]).encode()[:kept]
    raw = two_days(tmp_path, text, f"day_0{suffix}")
    for options in ({}, {"on_bad_row": "skip"}):
        assert_refused(tmp_path, raw, f"day_0{suffix}: ", "ends in the middle of its last row", **options)


def test_a_file_that_ends_after_its_last_but_one_field_is_refused_even_when_skipping(tmp_path: Path) -> None:
    raw = two_days(tmp_path, to_text(ROWS[:-1]) + "\t".join(ROWS[-1][:39]).encode())
    assert len(ROWS[-1][38]) == 8
    assert_refused(tmp_path, raw, "ends in the middle of its last row", on_bad_row="skip")


def test_a_last_row_without_its_line_break_is_read(tmp_path: Path) -> None:
    for name, text in (("whole", to_text(ROWS)), ("bare", to_text(ROWS)[:-1]), ("crlf", to_text(ROWS)[:-1] + b"\r")):
        write_text(tmp_path / name / "day_0", text)
        prepare("criteo", tmp_path / f"{name}-out", input=tmp_path / name, **RAW_IDS)
    assert data(tmp_path / "bare-out") == data(tmp_path / "whole-out") == data(tmp_path / "crlf-out")


def data(directory: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(directory).items() if name.endswith(".npy")}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("text", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(text: bytes, suffix: str, tmp_path: Path) -> None:
    raw = two_days(tmp_path, text, f"day_0{suffix}")
    for options in ({}, {"on_bad_row": "skip"}):
        assert_refused(tmp_path, raw, f"day_0{suffix}: the file is empty", **options)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_of_no_bytes_is_refused(suffix: str, tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"")
    (raw / "day_0").rename(raw / f"day_0{suffix}")
    assert_refused(tmp_path, raw, f"day_0{suffix}: the file is empty")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.999])
def test_a_compressed_file_that_is_cut_short_is_refused(kept: float, suffix: str, tmp_path: Path) -> None:
    raw = two_days(tmp_path, to_text(ROWS), f"day_0{suffix}")
    file = raw / f"day_0{suffix}"
    whole = file.read_bytes()
    file.write_bytes(whole[: min(int(len(whole) * kept), len(whole) - 1)])
    for options in ({}, {"on_bad_row": "skip"}):
        assert_refused(tmp_path, raw, f"{file}: ", "cut short", "Get the file again", **options)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_what_its_name_says_is_refused(suffix: str, tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"")
    (raw / "day_0").unlink()
    (raw / f"day_0{suffix}").write_bytes(to_text(ROWS))
    assert_refused(tmp_path, raw, f"day_0{suffix}: ", "damaged", "Get the file again")


def test_a_compressed_file_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    raw = two_days(tmp_path, to_text(ROWS), "day_0.gz")
    whole = bytearray((raw / "day_0.gz").read_bytes())
    whole[-6] ^= 1  # of the checksum
    (raw / "day_0.gz").write_bytes(whole)
    assert_refused(tmp_path, raw, "day_0.gz: ", "damaged")


def test_compressed_files_of_several_pieces_are_read_whole(tmp_path: Path) -> None:
    import zstandard

    halves = [to_text(ROWS[:11]), to_text(ROWS[11:])]
    write_text(tmp_path / "plain" / "day_0", b"".join(halves))
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)):
        (tmp_path / suffix).mkdir()
        (tmp_path / suffix / f"day_0{suffix}").write_bytes(b"".join(compress(half) for half in halves))
        prepare("criteo", tmp_path / f"out{suffix}", input=tmp_path / suffix, **RAW_IDS)
    prepare("criteo", tmp_path / "out", input=tmp_path / "plain", **RAW_IDS)
    assert data(tmp_path / "out") == data(tmp_path / "out.gz") == data(tmp_path / "out.zst")


def test_a_file_without_line_breaks_is_refused(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"\t".join([b"1"] * 1_500_000))
    assert_refused(tmp_path, raw, "day_0: ")
    raw = two_days(tmp_path, to_text(ROWS).replace(b"\n", b"\r"))
    assert_refused(tmp_path, raw, "day_0: ")


def test_missing_and_doubled_days_are_named(tmp_path: Path) -> None:
    for day in (0, 2, 5):
        write_rows(tmp_path / "gap" / f"day_{day}", ROWS)
    assert_refused(tmp_path, tmp_path / "gap", "day_1, day_3, day_4 missing, though day_5 is there")
    for name in ("day_0", "day_0.gz", "day_1"):
        write_rows(tmp_path / "twice" / name, ROWS)
    assert_refused(tmp_path, tmp_path / "twice", "day 0 is there twice, day_0 and day_0.gz")
    for name in ("train.txt", "train.txt.zst"):
        write_rows(tmp_path / "kaggle" / name, ROWS)
    assert_refused(tmp_path, tmp_path / "kaggle", "train.txt is there twice, train.txt and train.txt.zst")


def test_a_directory_without_logs_or_of_both_kinds_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path, tmp_path / "nowhere", "nowhere: no such file or directory")
    write_rows(tmp_path / "other" / "clicks.csv", ROWS)
    assert_refused(tmp_path, tmp_path / "other", "no day_0, day_1, ... (nor with .gz or .zst); it holds clicks.csv")
    for name in ("train.txt", "day_0"):
        write_rows(tmp_path / "both" / name, ROWS)
    assert_refused(tmp_path, tmp_path / "both", "holds both day_0 and train.txt. Say which with --source")
    assert prepare("criteo", tmp_path / "k", input=tmp_path / "both", source="kaggle")["recipe"]["files"].keys() == {
        "train"
    }
    write_rows(tmp_path / "unlabelled" / "test.txt", [row[1:] for row in ROWS])
    assert_refused(tmp_path, tmp_path / "unlabelled", "test.txt without train.txt")


def test_labels_in_kaggles_test_file_are_a_field_too_many(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw" / "train.txt", ROWS)
    write_rows(tmp_path / "raw" / "test.txt", ROWS)
    assert_refused(tmp_path, tmp_path / "raw", "test.txt: row 1: expected 39 fields, got 40")
    write_text(tmp_path / "raw" / "test.txt", to_text([row[1:] for row in ROWS]).replace(b"\t", b"\tx", 1))
    assert_refused(tmp_path, tmp_path / "raw", "test.txt: row 1, column I2: 'x")


@pytest.mark.parametrize(("rule", "least"), [("log3", -2), ("log2", -1)])
def test_a_number_too_small_for_the_logarithm_is_a_bad_value(rule: str, least: int, tmp_path: Path) -> None:
    raw = two_days(tmp_path, with_field(6, 4, str(least - 1)))
    assert_refused(tmp_path, raw, f"row 6, column I4: '{least - 1}' is too small", "log-min and log1-clip", dense=rule)
    prepare("criteo", tmp_path / "clip", input=raw, dense="log1-clip")
    two_days(tmp_path, with_field(6, 4, str(least)))
    prepare("criteo", tmp_path / "d", input=raw, dense=rule)
    assert np.load(tmp_path / "d" / "day_0_dense.npy")[5, 3] == 0.0


# Files that are merely written in another way


def quoted(rows: list[Row]) -> bytes:
    return to_text([[f'"{value}"' for value in row] for row in rows])


@pytest.mark.parametrize(
    "text",
    [
        to_text(ROWS).replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + to_text(ROWS),
        quoted(ROWS),
        b"\xef\xbb\xbf" + quoted(ROWS).replace(b"\n", b"\r\n"),
        to_text([[*row[:14], *(value.upper() for value in row[14:])] for row in ROWS]),
    ],
    ids=["crlf", "bom", "quoted", "all of them", "upper case"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_other_ways_of_writing_give_the_same_bytes(suffix: str, text: bytes, tmp_path: Path) -> None:
    write_text(tmp_path / "clean" / "day_0", to_text(ROWS))
    write_text(tmp_path / "raw" / f"day_0{suffix}", text)
    prepare("criteo", tmp_path / "expected", input=tmp_path / "clean", shuffle="global")
    prepare("criteo", tmp_path / "d", input=tmp_path / "raw", shuffle="global")
    assert data(tmp_path / "d") == data(tmp_path / "expected")


# Skipping


def test_skipped_rows_are_counted_and_told_and_the_good_ones_kept(tmp_path: Path) -> None:
    lines = to_text(ROWS).splitlines(keepends=True)
    lines[3] = b"1\t2\n"
    lines[10] = lines[10].replace(b"\t", b"\t@", 1)
    two_days(tmp_path, b"".join(lines))
    write_text(tmp_path / "raw" / "day_1", b"\n" + to_text(OTHERS))
    description = prepare("criteo", tmp_path / "d", input=tmp_path / "raw", on_bad_row="skip")
    write_rows(tmp_path / "good" / "day_0", ROWS[:3] + ROWS[4:10] + ROWS[11:])
    write_rows(tmp_path / "good" / "day_1", OTHERS)
    prepare("criteo", tmp_path / "expected", input=tmp_path / "good")
    assert data(tmp_path / "d") == data(tmp_path / "expected")
    assert [(source["rows"], source["bad_rows"]) for source in description["source"]] == [(28, 2), (20, 1)]
    for fact in ("day_0: row 4: expected 40 fields, got 2", "day_0: row 11, column I1: '@", "day_1: row 1: expected"):
        assert any(fact in note for note in description["notes"])


def test_skipped_rows_are_told_alike_wherever_the_log_is(tmp_path: Path) -> None:
    for place in ("here", "there"):
        write_text(tmp_path / place / "day_0", b"?\n" + to_text(ROWS))
        prepare("criteo", tmp_path / f"{place}-out", input=tmp_path / place, on_bad_row="skip")
    assert contents(tmp_path / "here-out") == contents(tmp_path / "there-out")


def test_more_bad_rows_than_allowed_are_an_error_counted_over_all_files(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"\n\n" + to_text(ROWS))
    write_text(raw / "day_1", b"\n" + to_text(OTHERS))
    options: dict[str, Any] = {"input": raw, "on_bad_row": "skip"}
    assert_refused(tmp_path, raw, "day_1: row 1: expected", "--max-bad-rows", on_bad_row="skip", max_bad_rows=2)
    assert_refused(tmp_path, raw, "day_0: row 1: expected", "--max-bad-rows", on_bad_row="skip", max_bad_rows=0)
    description = prepare("criteo", tmp_path / "d", max_bad_rows=3, **options)
    assert sum(source["bad_rows"] for source in description["source"]) == 3


def test_many_bad_rows_are_counted_but_only_the_first_are_told(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"?\n" * 200 + to_text(ROWS))
    description = prepare("criteo", tmp_path / "d", input=raw, on_bad_row="skip")
    assert description["source"][0]["bad_rows"] == 200
    assert len(description["notes"]) == 10


def test_the_default_limit_is_1000(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"?\n" * 1001 + to_text(ROWS))
    assert_refused(tmp_path, raw, "row 1,001", "--max-bad-rows", on_bad_row="skip")


def test_a_file_of_bad_rows_alone_is_refused(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"a,b,c\n1,2,3\n")
    assert_refused(tmp_path, raw, "day_0: none of its 2 rows is good", "expected 40 fields", on_bad_row="skip")


# Anything at all

BREAKS = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("delete"), st.floats(0, 1), st.integers(1, 12)),
    st.tuples(
        st.just("insert"),
        st.floats(0, 1),
        st.sampled_from([b"\t", b'"', b"\0", b"\n", b"\r", b"\r\n", b"-", b"0", b"f", b" ", b"\xff", b'""', b"\t\t"]),
    ),
    st.tuples(st.just("cut"), st.floats(0, 1), st.none()),
    st.tuples(st.just("quote"), st.floats(0, 1), st.none()),
)


def broken(text: bytes, breaks: list[tuple[str, float, Any]]) -> bytes:
    for kind, place, what in breaks:
        at = min(int(place * len(text)), max(len(text) - 1, 0))
        if kind == "flip":
            text = text[:at] + bytes([text[at] ^ what]) + text[at + 1 :] if text else text
        elif kind == "delete":
            text = text[:at] + text[at + what :]
        elif kind == "insert":
            text = text[:at] + what + text[at:]
        elif kind == "quote":  # the field at this place, properly
            start = max(text.rfind(b"\t", 0, at), text.rfind(b"\n", 0, at)) + 1
            ends = [end for end in (text.find(b"\t", start), text.find(b"\n", start)) if end >= 0]
            text = text[:start] + b'"' + text[start : min(ends)] + b'"' + text[min(ends) :] if ends else text
        else:
            text = text[:at]
    return text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(BREAKS, min_size=1, max_size=4), st.sampled_from(["fail", "skip"]), st.sampled_from(["", ".gz"]))
def test_a_broken_log_is_refused_or_read_exactly_as_it_stands(
    breaks: list[tuple[str, float, Any]], on_bad_row: str, suffix: str
) -> None:
    text = broken(to_text(ROWS[:6]), breaks)
    with tempfile.TemporaryDirectory() as folder:
        raw = write_text(Path(folder) / f"day_0{suffix}", text)
        expected = read_plainly(text, smallest=-(2**31) + 1)
        ends_well = text.endswith(b"\n")
        options = {**RAW_IDS, "last_day": "none", "on_bad_row": on_bad_row}
        try:
            description = prepare("criteo", Path(folder) / "d", input=raw, **options)
        except DataError as error:
            assert str(raw) in str(error)
            # It is refused for a reason: a bad row, a last line without its end, or nothing to read.
            reasons = [not ends_well, not expected.rows, bool(expected.bad_lines) and on_bad_row == "fail"]
            assert any(reasons), str(error)
            return
        assert on_bad_row == "skip" or not expected.bad_lines
        assert description["source"][0]["bad_rows"] == len(expected.bad_lines)
        found = {part: np.load(Path(folder) / "d" / f"day_0_{part}.npy") for part in ("labels", "dense", "sparse")}
        assert found["labels"].ravel().tolist() == [row[0] for row in expected.rows]
        assert found["sparse"].tolist() == [[value or 0 for value in row[14:]] for row in expected.rows]
        numbers = np.array([[value or 0 for value in row[1:14]] for row in expected.rows])
        np.testing.assert_allclose(found["dense"], np.log(numbers - numbers.min() + 2.0), rtol=3e-7)


# Through the command


def test_the_command_ends_with_3_for_data_and_2_for_options(run_cli: RunCli, tmp_path: Path) -> None:
    raw = two_days(tmp_path, with_field(2, 15, "zz"))
    done = run_cli("prepare", "criteo", "--input", raw, "--output", "d")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert "day_0: row 2, column C2: 'zz' is not a hexadecimal id" in done.stderr
    done = run_cli("prepare", "criteo", "--input", raw, "--output", "d", "--ids", "mod")
    assert (done.returncode, "--ids mod needs --table-size" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    done = run_cli("prepare", "criteo", "--input", raw, "--output", "d", "--on-bad-row", "skip", "--max-bad-rows", "1")
    assert done.returncode == 0, done.stderr
    assert "rows train 29, val 10, test 10" in done.stdout
    assert "1 bad rows skipped" in done.stderr
    assert json.loads((tmp_path / "d" / "dataset.json").read_text())["source"][0]["bad_rows"] == 1
