"""Raw Criteo logs (tab-separated text) -> whole numbers, checked field by field, in blocks on disk.

The text is read by a compiled kernel: Polars takes a row that is too short, or a file that was cut, for missing values
without a word, and in Criteo a missing value is legal.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recmill.datasets.compressed import SUFFIXES, read_blocks
from recmill.datasets.parallel import compiled, ordered
from recmill.errors import DataError

NUM_DENSE, NUM_SPARSE = 13, 26
COLUMNS = ["label", *(f"I{i + 1}" for i in range(NUM_DENSE)), *(f"C{i + 1}" for i in range(NUM_SPARSE))]
BYTES_PER_ROW = 4 * (1 + NUM_DENSE + 1 + NUM_SPARSE)  # of a parsed log
_BOM = b"\xef\xbb\xbf"
_LONGEST_ROW = 1 << 20
_SHOWN = 10  # bad rows that are told one by one

_TAB, _LINE, _RETURN, _QUOTE, _MINUS = 9, 10, 13, 34, 45
_NOT_A_LABEL, _NOT_AN_INTEGER, _NOT_AN_ID, _TOO_LARGE, _TOO_SMALL = 1, 2, 3, 4, 5
_FACTS = {
    _NOT_A_LABEL: "is not a label, which is 0 or 1",
    _NOT_AN_INTEGER: "is not a whole number",
    _NOT_AN_ID: "is not a hexadecimal id",
    _TOO_LARGE: "does not fit in 32 bits",
    _TOO_SMALL: "is too small for the logarithm that --dense asks for (log-min and log1-clip take any value)",
}
_HEX = np.full(256, 255, dtype=np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[np.frombuffer(_digits, dtype=np.uint8)] = np.arange(16)


@dataclass(frozen=True)
class LogBlock:
    """Consecutive rows: labels int32 [n], dense int32 [n, 13] (missing: 0), ids uint32 [26, n] (missing: 0).

    Bit c of `missing` [n] says that column c has no id.
    """

    labels: np.ndarray
    dense: np.ndarray
    missing: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class BadRow:
    row: int  # the first is 1
    text: str


@dataclass
class ParsedLog:
    """A log that was read: its rows stand in `path` as blocks, each of 41 runs of 32-bit words."""

    path: Path
    block_rows: list[int] = field(default_factory=list)
    smallest_dense: int = 2**31 - 1
    bad_rows: int = 0
    first_bad: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.block_rows)

    def saved(self) -> dict[str, Any]:
        """What ParsedLog(path, **saved) needs."""
        return {name: value for name, value in asdict(self).items() if name != "path"}

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first row, number of rows) of each block."""
        first = 0
        for rows in self.block_rows:
            yield first, rows
            first += rows

    def read_block(self, first: int, rows: int) -> LogBlock:
        words = np.fromfile(self.path, np.uint32, rows * BYTES_PER_ROW // 4, offset=first * BYTES_PER_ROW)
        labels, dense, missing, ids = np.split(words, np.cumsum([rows, rows * NUM_DENSE, rows]))
        return LogBlock(
            labels.view(np.int32), dense.view(np.int32).reshape(rows, NUM_DENSE), missing, ids.reshape(NUM_SPARSE, rows)
        )

    def read_column(self, column: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first row, ids, bits of what is missing) for rows start..stop of one id column, block by block."""
        with self.path.open("rb", buffering=0) as file:
            for first, rows in self.blocks():
                low, high = max(start - first, 0), min(stop - first, rows)
                if low >= high:
                    continue
                words = first * BYTES_PER_ROW // 4
                ids_at = words + rows * (2 + NUM_DENSE + column)
                ids = np.fromfile(file, np.uint32, high - low, offset=4 * (ids_at + low) - file.tell())
                missing_at = words + rows * (1 + NUM_DENSE) + low
                missing = np.fromfile(file, np.uint32, high - low, offset=4 * missing_at - file.tell())
                yield first + low, ids, missing


def parse_log(
    source: Path,
    target: Path,
    *,
    has_labels: bool,
    smallest: int,
    bad_rows_allowed: int | None,
    pool: Executor,
    chunk_bytes: int,
    progress: Callable[[int, int], None],
) -> ParsedLog:
    """Read a whole log. `bad_rows_allowed` None: the first bad row is an error; else they are skipped, up to so many.

    A dense value below `smallest` makes a row bad. `progress` is told bytes of text and rows after each block.
    """
    log, line = ParsedLog(target), 0
    with target.open("wb") as file:
        chunks = _chunks(source, chunk_bytes, len(COLUMNS) - (not has_labels))
        for text, block, lines, bad in ordered(pool, lambda c: _parse_chunk(c, has_labels, smallest), chunks, ahead=4):
            for bad_row in bad:
                _count_bad(log, source, BadRow(line + bad_row.row, bad_row.text), bad_rows_allowed)
            line += lines
            if len(block):
                for part in (block.labels, block.dense, block.missing, block.ids):
                    file.write(np.ascontiguousarray(part).data)
                log.block_rows.append(len(block))
                log.smallest_dense = min(log.smallest_dense, int(block.dense.min()))
            progress(text, len(block))
    if line == 0:
        raise DataError(f"{source}: the file is empty. Get it again, or take it out of --input.")
    if log.rows == 0:
        raise DataError(f"{source}: none of its {line:,} rows is good; the first: {log.first_bad[0]}")
    if log.rows >= 2**32:
        raise DataError(f"{source}: {log.rows:,} rows, more than 2^32. Cut it with recmill split.")
    return log


def _count_bad(log: ParsedLog, source: Path, bad: BadRow, allowed: int | None) -> None:
    place = f"row {bad.row:,}{bad.text}"
    text = f"{source}: {place}"
    if allowed is None:
        raise DataError(f"{text}. Mend the file, or leave such rows out with --on-bad-row skip.")
    log.bad_rows += 1
    if len(log.first_bad) < _SHOWN:
        log.first_bad.append(f"{source.name}: {place}")
    if log.bad_rows > allowed:
        raise DataError(f"{text}. That is one more than the bad rows allowed: see --max-bad-rows.")


def _chunks(source: Path, chunk_bytes: int, num_fields: int) -> "Iterator[bytes | _Range]":
    """The text in pieces that end with a line: of a plain file only where they are, the reading is for the threads."""
    if source.suffix in SUFFIXES[1:]:
        yield from _whole_lines(source, chunk_bytes, num_fields)
        return
    size, start = source.stat().st_size, 0
    with source.open("rb") as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        while start + chunk_bytes < size:
            file.seek(start + chunk_bytes)
            stop = start + chunk_bytes + len(file.readline(_LONGEST_ROW))
            file.seek(stop - 1)
            if file.read(1) != b"\n":
                break  # the last line, or none at all
            yield _Range(source, start, stop)
            start = stop
        file.seek(start)
        rest = file.read(size - start) if size - start <= chunk_bytes + _LONGEST_ROW else b""
    if rest:
        cut = rest.rfind(b"\n") + 1
        yield from [rest[:cut]] if cut else []
        yield from _last_line(source, rest[cut:], num_fields)
    elif start < size:
        raise _too_long(source)


def _whole_lines(source: Path, chunk_bytes: int, num_fields: int) -> Iterator[bytes]:
    rest, is_first = b"", True
    for block in read_blocks(source, chunk_bytes):
        text = rest + block
        if is_first and len(text) >= len(_BOM):
            text, is_first = text.removeprefix(_BOM), False
        cut = text.rfind(b"\n") + 1
        rest = text[cut:]
        if len(rest) > _LONGEST_ROW:
            raise _too_long(source)
        if cut:
            yield text[:cut]
    yield from _last_line(source, rest, num_fields)


def _too_long(source: Path) -> DataError:
    return DataError(f"{source}: a row of more than {_LONGEST_ROW:,} bytes. This is not a Criteo log.")


def _last_line(source: Path, line: bytes, num_fields: int) -> Iterator[bytes]:
    """A last line without its end may be whole: if its last id has all its 8 digits."""
    if not line:
        return
    last = line.rpartition(b"\t")[2].strip(b'"\r')
    if line.count(b"\t") + 1 < num_fields or len(last) != 8:
        raise DataError(
            f"{source}: the file ends in the middle of its last row, with {_shown(line[-40:])}. Get it again; "
            "if that row is whole, end it with a line break."
        )
    yield line + b"\n"


@dataclass(frozen=True)
class _Range:
    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            text = file.read(self.stop - self.start)
        if len(text) != self.stop - self.start or not text.endswith(b"\n"):
            raise DataError(f"{self.path}: it changed while it was read.")
        return text


def _parse_chunk(chunk: "bytes | _Range", has_labels: bool, smallest: int) -> tuple[int, LogBlock, int, list[BadRow]]:
    """(bytes, good rows, lines, bad rows with their line in this chunk)."""
    text = chunk if isinstance(chunk, bytes) else chunk.read()
    array = np.frombuffer(text, dtype=np.uint8)
    lines = int(np.count_nonzero(array == _LINE))  # unlike bytes.count, lets other threads work
    labels, missing = np.empty(lines, np.int32), np.empty(lines, np.uint32)
    dense, ids = np.empty((lines, NUM_DENSE), np.int32), np.empty((NUM_SPARSE, lines), np.uint32)
    bad = np.empty((lines, 4), np.int64)
    eights = np.ndarray(max(len(text) - 7, 0), np.uint64, text, strides=(1,))  # the 8 bytes from each place on
    rows = _parse(array, eights, has_labels, smallest, _HEX, labels, dense, missing, ids, bad)
    block = LogBlock(labels[:rows], dense[:rows], missing[:rows], ids[:, :rows])
    return len(text), block, lines, [_bad_row(text, has_labels, *map(int, row)) for row in bad[: lines - rows]]


def _bad_row(text: bytes, has_labels: bool, line: int, line_start: int, column: int, kind: int) -> BadRow:
    fields = text[line_start : text.index(b"\n", line_start)].rstrip(b"\r").split(b"\t")
    expected = len(COLUMNS) - (not has_labels)
    if len(fields) != expected:
        return BadRow(line + 1, f": expected {expected} fields, got {len(fields)}, the last is {_shown(fields[-1])}")
    value = fields[column - (not has_labels)]
    return BadRow(line + 1, f", column {COLUMNS[column]}: {_shown(value)} {_FACTS[kind]}")


def _shown(text: bytes) -> str:
    try:
        return repr(text[:80].decode())
    except UnicodeDecodeError:
        return repr(text[:80])[1:]


@compiled
def _are_hex(letters):
    """Whether each of 8 bytes is a hexadecimal digit, all at once: adding 128 - x sets the top bit of bytes >= x."""
    lower = letters | np.uint64(0x2020202020202020)
    digit = (letters + np.uint64(0x5050505050505050)) & ~(letters + np.uint64(0x4646464646464646))
    letter = (lower + np.uint64(0x1F1F1F1F1F1F1F1F)) & ~(lower + np.uint64(0x1919191919191919))
    tops = np.uint64(0x8080808080808080)
    return letters & tops == 0 and (digit | letter) & tops == tops


@compiled
def _hex_value(letters):
    """The number that 8 hexadecimal digits stand for; the first byte is the lowest of the word."""
    x = (letters & np.uint64(0x0F0F0F0F0F0F0F0F)) + np.uint64(9) * (
        (letters >> np.uint64(6)) & np.uint64(0x0101010101010101)
    )
    x = ((x << np.uint64(4)) | (x >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    x = ((x << np.uint64(8)) | (x >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return ((x << np.uint64(16)) | (x >> np.uint64(32))) & np.uint64(0xFFFFFFFF)


@compiled
def _parse(text, eights, has_labels, smallest, hex_value, labels, dense, missing, ids, bad):
    """Good rows fill the arrays, bad ones `bad` (line, its start, column, kind). Every line ends with a line break."""
    rows = 0
    num_bad = 0
    line = 0
    at = 0
    while at < len(text):
        line_start = at
        kind = 0
        mask = np.uint32(0)
        column = 0 if has_labels else 1
        if not has_labels:
            labels[rows] = -1
        while column < 40:
            quoted = text[at] == _QUOTE
            if quoted:
                at += 1
            digits = 0
            if column == 0:
                label = np.int32(text[at]) - 48
                if label != 0 and label != 1:
                    kind = _NOT_A_LABEL
                    break
                at += 1
                labels[rows] = label
                kind = _NOT_A_LABEL
            elif column <= 13:
                negative = text[at] == _MINUS
                if negative:
                    at += 1
                value = np.int64(0)
                while True:
                    digit = np.int64(text[at]) - 48
                    if digit < 0 or digit > 9:
                        break
                    if digits < 18:
                        value = value * 10 + digit
                    digits += 1
                    at += 1
                kind = _NOT_AN_INTEGER
                if negative and digits == 0:
                    break
                if digits > 18 or value > 2147483647 + np.int64(negative):
                    kind = _TOO_LARGE
                    break
                if negative:
                    value = -value
                if value < smallest:
                    kind = _TOO_SMALL
                    break
                dense[rows, column - 1] = value
            else:
                code = np.uint64(0)
                if at + 8 < len(text) and text[at + 8] <= _RETURN:  # 8 digits, as all ids of Criteo
                    letters = eights[at]
                    if _are_hex(letters):
                        code = _hex_value(letters)
                        digits = 8
                        at += 8
                while True:
                    nibble = hex_value[text[at]]
                    if nibble == 255:
                        break
                    code = (code << np.uint64(4)) | np.uint64(nibble)
                    digits += 1
                    at += 1
                kind = _NOT_AN_ID
                if digits > 8:
                    kind = _TOO_LARGE
                    break
                ids[column - 14, rows] = np.uint32(code)
                if digits == 0:
                    mask |= np.uint32(1) << np.uint32(column - 14)
            if quoted:
                if text[at] != _QUOTE:
                    break
                at += 1
            end = text[at]
            if end == _RETURN and text[at + 1] == _LINE:
                at += 1
                end = text[at]
            if end == _TAB and column < 39:
                at += 1
                column += 1
            elif end == _LINE and column == 39:
                column += 1
            else:
                break  # another field too many or too few, or something else in it
        if column == 40:
            missing[rows] = mask
            rows += 1
        else:
            bad[num_bad, 0] = line
            bad[num_bad, 1] = line_start
            bad[num_bad, 2] = column
            bad[num_bad, 3] = kind
            num_bad += 1
            while text[at] != _LINE:
                at += 1
        at += 1
        line += 1
    return rows
