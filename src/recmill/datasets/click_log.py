"""Parse click logs from text into checked integers, in blocks on disk.

A row is a line of tab-separated fields: a label, integers, hexadecimal ids. The parser is compiled, because Polars
silently reads a short row or a truncated file as missing values, and in these logs a missing value is legal.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from string import hexdigits
from typing import Any, TypeVar

import numpy as np

from recmill.datasets.clicks import dense_names, sparse_names
from recmill.datasets.compiled import compiled
from recmill.datasets.compressed import is_compressed, read_blocks
from recmill.datasets.parallel import ordered
from recmill.errors import DataError

Converted = TypeVar("Converted")

_BOM = b"\xef\xbb\xbf"
_LONGEST_ROW = 1 << 20

_TAB, _LINE, _RETURN, _QUOTE, _MINUS = 9, 10, 13, 34, 45
_NOT_A_LABEL, _NOT_AN_INTEGER, _NOT_AN_ID, _TOO_LARGE, _TOO_SMALL = 1, 2, 3, 4, 5
_FACTS = {
    _NOT_A_LABEL: "is not a label, which is 0 or 1",
    _NOT_AN_INTEGER: "is not a whole number",
    _NOT_AN_ID: "is not a hexadecimal id",
    _TOO_LARGE: "does not fit in 32 bits",
    _TOO_SMALL: "is too small for the logarithm of --dense (log-min and log1-clip accept any value)",
}
_NOT_HEX = 255
_HEX = np.array([int(chr(letter), 16) if chr(letter) in hexdigits else _NOT_HEX for letter in range(256)], np.uint8)


@dataclass(frozen=True)
class LogFormat:
    """The fields of a row: a label, integers and hexadecimal ids."""

    num_dense: int
    num_sparse: int
    has_labels: bool = True
    smallest_dense: int = -(2**31)  # a smaller integer makes a row bad

    def __post_init__(self) -> None:
        assert self.num_sparse <= 32, "missing ids are marked by the bits of a 32-bit word"

    @property
    def fields(self) -> list[str]:
        labels = ["label"] if self.has_labels else []
        return [*labels, *dense_names(self.num_dense), *sparse_names(self.num_sparse)]

    @property
    def words_per_row(self) -> int:
        """The 32-bit words of a parsed row: label, dense values, bits of missing ids, ids."""
        return 1 + self.num_dense + 1 + self.num_sparse


@dataclass(frozen=True)
class LogBlock:
    """Consecutive rows: labels int32 [n], dense int32 [n, num_dense], ids uint32 [num_sparse, n]; missing values are 0.

    Bit c of `missing` [n] is set if id column c has no value.
    """

    labels: np.ndarray
    dense: np.ndarray
    missing: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_missing(self) -> np.ndarray:
        """Return `missing` as bool [num_sparse, n]."""
        return (self.missing >> np.arange(len(self.ids), dtype=np.uint32)[:, None]) & np.uint32(1) != 0


@dataclass
class ParsedLog:
    """A parsed log. The file `path` holds its blocks, each as the four arrays of a LogBlock."""

    path: Path
    format: LogFormat
    block_rows: list[int] = field(default_factory=list)
    smallest_dense: int = 2**31 - 1
    bad_rows: int = 0
    first_bad: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.block_rows)

    def to_json(self) -> dict[str, Any]:
        """Return what ParsedLog(path, format, **json) needs."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "format")}

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Return (first row, number of rows) of each block."""
        return zip(accumulate(self.block_rows, initial=0), self.block_rows, strict=False)

    def read_block(self, first: int, rows: int) -> LogBlock:
        num_dense, words_per_row = self.format.num_dense, self.format.words_per_row
        words = np.fromfile(self.path, np.uint32, rows * words_per_row, offset=4 * first * words_per_row)
        labels, dense, missing, ids = np.split(words, np.cumsum([rows, rows * num_dense, rows]))
        return LogBlock(
            labels.view(np.int32),
            dense.view(np.int32).reshape(rows, num_dense),
            missing,
            ids.reshape(self.format.num_sparse, rows),
        )

    def read_column(self, column: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (first row, ids, bits of missing ids) for rows start..stop of one id column, block by block."""
        with self.path.open("rb", buffering=0) as file:
            for first, rows in self.blocks():
                low, high = max(start - first, 0), min(stop - first, rows)
                if low >= high:
                    continue
                words = first * self.format.words_per_row
                missing_at = words + rows * (1 + self.format.num_dense)
                ids_at = missing_at + rows * (1 + column)
                ids = np.fromfile(file, np.uint32, high - low, offset=4 * (ids_at + low) - file.tell())
                missing = np.fromfile(file, np.uint32, high - low, offset=4 * (missing_at + low) - file.tell())
                yield first + low, ids, missing


def parse_log(
    source: Path,
    target: Path,
    log_format: LogFormat,
    bad_rows_allowed: int | None,
    pool: Executor,
    chunk_bytes: int,
    progress: Callable[[int], None],
) -> ParsedLog:
    """Parse the log `source` into `target`. `progress` receives the number of good rows of each block.

    If `bad_rows_allowed` is None, the first bad row is an error; otherwise up to that many bad rows are skipped.
    """
    parsed = ParsedLog(target, log_format)
    with target.open("wb") as file:
        for block in parse_blocks(source, parsed, bad_rows_allowed, pool, chunk_bytes, lambda block: block):
            for part in (block.labels, block.dense, block.missing, block.ids):
                file.write(np.ascontiguousarray(part).data)
            progress(len(block))
    return parsed


def parse_blocks(
    source: Path,
    parsed: ParsedLog,
    bad_rows_allowed: int | None,
    pool: Executor,
    chunk_bytes: int,
    convert: Callable[[LogBlock], Converted],
) -> Iterator[Converted]:
    """Parse the log `source`, yield `convert` of each block of good rows, and count rows in `parsed`.

    The pool's threads convert. `bad_rows_allowed` is that of `parse_log`.
    """

    def converted(chunk: bytes | Callable[[], bytes]) -> tuple[LogBlock, Converted | None, int, list[tuple[int, str]]]:
        block, lines, bad = _parse_chunk(chunk, parsed.format)
        return block, convert(block) if len(block) else None, lines, bad

    lines_before = 0
    chunks = _chunks(source, chunk_bytes, len(parsed.format.fields))
    for block, made, lines, bad in ordered(pool, converted, chunks, ahead=4):
        for line, problem in bad:
            _count_bad(parsed, source, f"row {lines_before + line:,}{problem}", bad_rows_allowed)
        lines_before += lines
        if made is not None:
            parsed.block_rows.append(len(block))
            parsed.smallest_dense = min(parsed.smallest_dense, int(block.dense.min()))
            yield made
    if lines_before == 0:
        raise DataError(f"{source}: the file is empty. Download it again, or remove it from --input.")
    if parsed.rows == 0:
        raise DataError(f"{source}: all of its {lines_before:,} rows are bad; the first: {parsed.first_bad[0]}")
    if parsed.rows >= 2**32:
        raise DataError(f"{source}: {parsed.rows:,} rows are more than 2^32. Split the file with recmill split.")


def _count_bad(parsed: ParsedLog, source: Path, problem: str, allowed: int | None) -> None:
    if allowed is None:
        raise DataError(f"{source}: {problem}. Fix the file, or skip such rows with --on-bad-row skip.")
    parsed.bad_rows += 1
    if len(parsed.first_bad) < 10:
        parsed.first_bad.append(f"{source.name}: {problem}")
    if parsed.bad_rows > allowed:
        raise DataError(f"{source}: {problem}. This is one bad row more than --max-bad-rows allows.")


def _read_range(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        text = file.read(stop - start)
    if len(text) != stop - start or not text.endswith(b"\n"):
        raise DataError(f"{path}: the file changed while it was being read.")
    return text


def _chunks(source: Path, chunk_bytes: int, num_fields: int) -> Iterator[bytes | Callable[[], bytes]]:
    """Yield the text in chunks of complete lines, or functions that read them: a plain file is read by the threads."""
    if is_compressed(source):
        yield from _complete_lines(source, chunk_bytes, num_fields)
        return
    size = source.stat().st_size
    with source.open("rb") as file:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        while start + chunk_bytes < size:
            file.seek(start + chunk_bytes)
            stop = start + chunk_bytes + len(file.readline(_LONGEST_ROW))
            file.seek(stop - 1)
            if file.read(1) != b"\n":
                break  # at the last line, or inside of one that is too long
            yield partial(_read_range, source, start, stop)
            start = stop
        if size - start > chunk_bytes + _LONGEST_ROW:
            raise _too_long(source)
        file.seek(start)
        rest = file.read(size - start)
    end = rest.rfind(b"\n") + 1
    if end:
        yield rest[:end]
    yield from _last_line(source, rest[end:], num_fields)


def _complete_lines(source: Path, chunk_bytes: int, num_fields: int) -> Iterator[bytes]:
    rest = b""
    is_first = True
    for block in read_blocks(source, chunk_bytes):
        text = rest + block
        if is_first and len(text) >= len(_BOM):
            text = text.removeprefix(_BOM)
            is_first = False
        end = text.rfind(b"\n") + 1
        rest = text[end:]
        if len(rest) > _LONGEST_ROW:
            raise _too_long(source)
        if end:
            yield text[:end]
    yield from _last_line(source, rest, num_fields)


def _too_long(source: Path) -> DataError:
    return DataError(f"{source}: a row has more than {_LONGEST_ROW:,} bytes. This is not a click log.")


def _last_line(source: Path, line: bytes, num_fields: int) -> Iterator[bytes]:
    """Yield a last line without line break, if there is one. It is complete if its last id has all 8 digits."""
    if not line:
        return
    last = line.rpartition(b"\t")[2].strip(b'"\r')
    if line.count(b"\t") + 1 < num_fields or len(last) != 8:
        raise DataError(
            f"{source}: the file ends in the middle of its last row, with {_shown(line[-40:])}. Download it again; "
            "if that row is complete, end it with a line break."
        )
    yield line + b"\n"


def parse_text(text: bytes, log_format: LogFormat) -> tuple[LogBlock, list[tuple[int, str]]]:
    """Parse complete lines. Return the good rows, and the bad ones as (line, problem); the first line is 1."""
    block, _, bad = _parse_chunk(text, log_format)
    return block, bad


def _parse_chunk(
    chunk: bytes | Callable[[], bytes], log_format: LogFormat
) -> tuple[LogBlock, int, list[tuple[int, str]]]:
    """Return (good rows, number of lines, bad rows as (line, problem)); the first line of the chunk is 1."""
    text = chunk if isinstance(chunk, bytes) else chunk()
    letters = np.frombuffer(text, dtype=np.uint8)
    eights = np.ndarray(max(len(text) - 7, 0), np.uint64, text, strides=(1,))  # eights[i]: letters i to i + 7
    lines = int(np.count_nonzero(letters == _LINE))  # unlike bytes.count, this lets other threads run
    labels = np.full(lines, -1, np.int32)
    dense = np.empty((lines, log_format.num_dense), np.int32)
    missing = np.empty(lines, np.uint32)
    ids = np.empty((log_format.num_sparse, lines), np.uint32)
    bad = np.empty((lines, 4), np.int64)
    first_column = 0 if log_format.has_labels else 1
    rows = _parse((letters, eights), first_column, log_format.smallest_dense, (labels, dense, missing, ids), bad)
    block = LogBlock(labels[:rows], dense[:rows], missing[:rows], ids[:, :rows])
    problems = []
    for line, line_start, column, kind in bad[: lines - rows].tolist():
        problems.append((line + 1, _problem(text, log_format.fields, line_start, column - first_column, kind)))
    return block, lines, problems


def _problem(text: bytes, names: list[str], line_start: int, index: int, kind: int) -> str:
    values = text[line_start : text.index(b"\n", line_start)].rstrip(b"\r").split(b"\t")
    if len(values) != len(names):
        return f": expected {len(names)} fields, got {len(values)}, the last is {_shown(values[-1])}"
    return f", column {names[index]}: {_shown(values[index])} {_FACTS[kind]}"


def _shown(text: bytes) -> str:
    try:
        return repr(text[:80].decode())
    except UnicodeDecodeError:
        return repr(text[:80])[1:]


@compiled
def _parse(text, first_column, smallest, arrays, bad):
    """Parse lines, each of which ends with a line break, and return the number of good rows.

    Good rows are stored in `arrays`, bad ones in `bad` as (line, its start, column, kind of problem).
    """
    letters, eights = text
    labels, dense, missing, ids = arrays
    num_dense = dense.shape[1]
    last = num_dense + ids.shape[0]
    at = rows = num_bad = 0
    while at < len(letters):
        line_start = at
        mask = np.uint32(0)
        column = first_column
        while column <= last:
            is_quoted = letters[at] == _QUOTE
            if is_quoted:
                at += 1
            if column == 0:
                kind = _NOT_A_LABEL
                label = np.int32(letters[at]) - 48
                if label != 0 and label != 1:
                    break
                labels[rows] = label
                at += 1
            elif column <= num_dense:
                at, value, kind = _parse_integer(letters, at, smallest)
                if kind != 0:
                    break
                dense[rows, column - 1] = value
                kind = _NOT_AN_INTEGER
            else:
                if at + 8 < len(letters) and letters[at + 8] <= _RETURN and _are_hex(eights[at]):
                    code = _hex_value(eights[at])  # 8 digits, as all ids of Criteo have
                    digits = 8
                    at += 8
                else:
                    at, code, digits = _parse_hex(letters, at)
                if digits > 8:
                    kind = _TOO_LARGE
                    break
                ids[column - num_dense - 1, rows] = np.uint32(code)
                if digits == 0:
                    mask |= np.uint32(1) << np.uint32(column - num_dense - 1)
                kind = _NOT_AN_ID
            if letters[at] == _TAB and column < last and not is_quoted:
                at += 1
            else:
                at = _next_field(letters, at, is_quoted, _TAB if column < last else _LINE)
                if at < 0:
                    break
            column += 1
        if column > last:
            missing[rows] = mask
            rows += 1
        else:
            bad[num_bad] = (rows + num_bad, line_start, column, kind)
            num_bad += 1
            at = _next_line(letters, line_start)
    return rows


@compiled
def _next_line(letters, at):
    while letters[at] != _LINE:
        at += 1
    return at + 1


@compiled
def _next_field(letters, at, is_quoted, separator):
    """Return the position behind the separator, or -1 if something else follows the field."""
    if is_quoted:
        if letters[at] != _QUOTE:
            return -1
        at += 1
    if letters[at] == _RETURN and letters[at + 1] == _LINE:
        at += 1
    return at + 1 if letters[at] == separator else -1


@compiled
def _parse_integer(letters, at, smallest):
    """Return (position behind the integer, its value, kind of problem or 0); without any digit the value is 0."""
    is_negative = letters[at] == _MINUS
    if is_negative:
        at += 1
    value = np.int64(0)
    digits = 0
    while True:
        digit = np.int64(letters[at]) - 48
        if digit < 0 or digit > 9:
            break
        if digits < 18:
            value = value * 10 + digit
        digits += 1
        at += 1
    if is_negative and digits == 0:
        return at, value, _NOT_AN_INTEGER
    if digits > 18 or value > 2147483647 + np.int64(is_negative):
        return at, value, _TOO_LARGE
    if is_negative:
        value = -value
    if value < smallest:
        return at, value, _TOO_SMALL
    return at, value, 0


@compiled
def _parse_hex(letters, at):
    """Return (position behind the hexadecimal number, its value, its number of digits)."""
    code = np.uint64(0)
    digits = 0
    while True:
        nibble = _HEX[letters[at]]
        if nibble == _NOT_HEX:
            return at, code, digits
        code = (code << np.uint64(4)) | np.uint64(nibble)
        digits += 1
        at += 1


@compiled
def _are_hex(letters):
    """Check 8 bytes for hexadecimal digits at once: adding 128 - x sets the top bit of bytes >= x."""
    lower = letters | np.uint64(0x2020202020202020)
    digit = (letters + np.uint64(0x5050505050505050)) & ~(letters + np.uint64(0x4646464646464646))
    letter = (lower + np.uint64(0x1F1F1F1F1F1F1F1F)) & ~(lower + np.uint64(0x1919191919191919))
    tops = np.uint64(0x8080808080808080)
    return letters & tops == 0 and (digit | letter) & tops == tops


@compiled
def _hex_value(letters):
    """Return the value of 8 hexadecimal digits; the first digit is the lowest byte of the word."""
    x = (letters & np.uint64(0x0F0F0F0F0F0F0F0F)) + np.uint64(9) * (
        (letters >> np.uint64(6)) & np.uint64(0x0101010101010101)
    )
    x = ((x << np.uint64(4)) | (x >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    x = ((x << np.uint64(8)) | (x >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return ((x << np.uint64(16)) | (x >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
