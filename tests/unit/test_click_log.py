"""Parsing click logs as they really come: every value is right, or the error names file, row and column."""

import gzip
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill import prepare
from recmill.datasets.click_log import LogFormat, parse_log
from recmill.errors import DataError

from ..conftest import RunCli
from ..criteo_raw import (
    Row,
    contents,
    day_rows,
    ids_of,
    labels_of,
    random_rows,
    read_plainly,
    set_limits,
    stored,
    to_text,
    write_rows,
    write_text,
)

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


def test_rows_are_counted_over_all_chunks_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, chunk_bytes=3000)
    rows = random_rows(1300, 3)
    raw = two_days(tmp_path, with_field(1234, 9, "x", rows))
    assert_refused(tmp_path, raw, "day_0: row 1,234, column I9: 'x' is not a whole number")
    description = prepare("criteo", tmp_path / "d", input=raw, on_bad_row="skip")
    assert description["source"][0]["rows"] == 1299


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 255, 5000, 1 << 24])
def test_chunks_of_any_size_give_the_same_rows(
    suffix: str, chunk_bytes: int, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may end before, in or after a line break."""
    raw = write_text(tmp_path / f"day_0{suffix}", to_text(day_rows(logs, 0)[:40]))
    set_limits(monkeypatch, chunk_bytes=chunk_bytes)
    prepare("criteo", tmp_path / "d", input=raw, ids="mod", compat="torchrec")
    expected = [[raw_id or 0 for raw_id in row] for row in ids_of(day_rows(logs, 0)[:40])]
    assert stored(tmp_path / "d", "day_0_sparse").tolist() == expected
    assert stored(tmp_path / "d", "day_0_labels").ravel().tolist() == labels_of(day_rows(logs, 0)[:40]).tolist()


def test_the_parser_takes_other_column_counts(tmp_path: Path) -> None:
    text = b"1\t-5\t7\tff\t\n0\t\t2\t\t0000000a\n1\t2\t3\tff\n"
    raw = write_text(tmp_path / "log", text)
    seen: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        parsed = parse_log(
            raw, tmp_path / "rows", LogFormat(2, 2), bad_rows_allowed=1, pool=pool, chunk_bytes=20, progress=seen.append
        )
    assert (parsed.rows, parsed.smallest_dense, parsed.bad_rows) == (2, -5, 1)
    assert sum(seen) == 2
    assert parsed.first_bad == ["log: row 3: expected 5 fields, got 4, the last is 'ff'"]
    blocks = [parsed.read_block(first, rows) for first, rows in parsed.blocks()]
    assert np.concatenate([block.labels for block in blocks]).tolist() == [1, 0]
    assert np.concatenate([block.dense for block in blocks]).tolist() == [[-5, 7], [0, 2]]
    assert np.concatenate([block.ids for block in blocks], axis=1).tolist() == [[255, 0], [0, 10]]
    assert np.concatenate([block.is_missing for block in blocks], axis=1).tolist() == [[False, True], [True, False]]
    column = [ids.tolist() for _, ids, _ in parsed.read_column(1, 0, 2)]
    assert [raw_id for ids in column for raw_id in ids] == [0, 10]


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
    for name, text in (("ended", to_text(ROWS)), ("bare", to_text(ROWS)[:-1]), ("crlf", to_text(ROWS)[:-1] + b"\r")):
        write_text(tmp_path / name / "day_0", text)
        prepare("criteo", tmp_path / f"{name}-out", input=tmp_path / name, **RAW_IDS)
    assert data(tmp_path / "bare-out") == data(tmp_path / "ended-out") == data(tmp_path / "crlf-out")


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
        assert_refused(tmp_path, raw, f"{file}: ", "cut short", "Download the file again", **options)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_what_its_name_says_is_refused(suffix: str, tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"")
    (raw / "day_0").unlink()
    (raw / f"day_0{suffix}").write_bytes(to_text(ROWS))
    assert_refused(tmp_path, raw, f"day_0{suffix}: ", "corrupt", "Download the file again")


def test_a_compressed_file_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    raw = two_days(tmp_path, to_text(ROWS), "day_0.gz")
    whole = bytearray((raw / "day_0.gz").read_bytes())
    whole[-6] ^= 1  # of the checksum
    (raw / "day_0.gz").write_bytes(whole)
    assert_refused(tmp_path, raw, "day_0.gz: ", "corrupt")


def test_compressed_files_of_several_frames_are_read_to_the_end(tmp_path: Path) -> None:
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
    assert_refused(tmp_path, raw, "day_0: the file ends in the middle of its last row")
    raw = two_days(tmp_path, b"\t".join([b"1"] * 15_000_000))
    assert_refused(tmp_path, raw, "day_0: a row has more than 1,048,576 bytes")
    raw = two_days(tmp_path, to_text(ROWS).replace(b"\n", b"\r"))
    assert_refused(tmp_path, raw, f"day_0: row 1: expected 40 fields, got {30 * 39 + 1}")


def test_labels_in_kaggles_test_file_are_a_field_too_many(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw" / "train.txt", ROWS)
    write_rows(tmp_path / "raw" / "test.txt", ROWS)
    assert_refused(tmp_path, tmp_path / "raw", "test.txt: row 1: expected 39 fields, got 40")
    write_text(tmp_path / "raw" / "test.txt", to_text([row[1:] for row in ROWS]).replace(b"\t", b"\tx", 1))
    assert_refused(tmp_path, tmp_path / "raw", "test.txt: row 1, column I2: 'x")


@pytest.mark.parametrize(("rule", "least"), [("log3", -2), ("log2", -1)])
def test_a_number_too_small_for_the_logarithm_is_a_bad_value(rule: Any, least: int, tmp_path: Path) -> None:
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


def test_skipped_rows_are_counted_and_reported_and_the_good_ones_kept(tmp_path: Path) -> None:
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


def test_notes_on_skipped_rows_do_not_depend_on_the_directory(tmp_path: Path) -> None:
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


def test_many_bad_rows_are_counted_but_only_the_first_are_reported(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"?\n" * 200 + to_text(ROWS))
    description = prepare("criteo", tmp_path / "d", input=raw, on_bad_row="skip")
    assert description["source"][0]["bad_rows"] == 200
    assert len(description["notes"]) == 10


def test_the_default_limit_is_1000(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"?\n" * 1001 + to_text(ROWS))
    assert_refused(tmp_path, raw, "row 1,001", "--max-bad-rows", on_bad_row="skip")


def test_a_file_of_bad_rows_alone_is_refused(tmp_path: Path) -> None:
    raw = two_days(tmp_path, b"a,b,c\n1,2,3\n")
    assert_refused(tmp_path, raw, "day_0: all of its 2 rows are bad", "expected 40 fields", on_bad_row="skip")


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


def ends_in_the_middle_of_a_row(text: bytes) -> bool:
    """Whether the last line has no line break, and no last id of 8 digits that would show that it is complete."""
    fields = text.rpartition(b"\n")[2].split(b"\t")
    return fields != [b""] and (len(fields) < 40 or len(fields[-1].strip(b'"\r')) != 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(BREAKS, min_size=1, max_size=4), st.sampled_from(["fail", "skip"]), st.sampled_from(["", ".gz"]))
def test_a_broken_log_is_refused_if_it_must_be_and_else_read_exactly_as_it_stands(
    breaks: list[tuple[str, float, Any]], on_bad_row: str, suffix: str
) -> None:
    text = broken(to_text(ROWS[:6]), breaks)
    expected = read_plainly(text, smallest=-(2**31) + 1)
    is_refused = (
        not expected.rows or (bool(expected.bad_lines) and on_bad_row == "fail") or ends_in_the_middle_of_a_row(text)
    )
    with tempfile.TemporaryDirectory() as folder:
        raw = write_text(Path(folder) / f"day_0{suffix}", text)
        options = {**RAW_IDS, "last_day": "none", "on_bad_row": on_bad_row}
        if is_refused:
            with pytest.raises(DataError, match=re.escape(str(raw))):
                prepare("criteo", Path(folder) / "d", input=raw, **options)
            return
        description = prepare("criteo", Path(folder) / "d", input=raw, **options)
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
