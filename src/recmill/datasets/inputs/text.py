"""The bytes of a text file as UTF-8, in blocks of complete rows. What cannot be decoded is an error with its place."""

import codecs
import logging
import re
from collections.abc import Iterator

from recmill.datasets.compressed import InputFile, read_blocks
from recmill.datasets.inputs.encodings import likely_encoding
from recmill.datasets.inputs.section import InputSection
from recmill.errors import DataError

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 22  # so small that what is made of a block stays below malloc's limit of 32 MB for its own pages
MAX_ROW_BYTES = 1 << 24
QUOTE_IN_FIELD = "\x1e"  # stands for \" until the fields are divided
_BOM = b"\xef\xbb\xbf"
_OTHERS = {  # how files begin that are no text
    b"PAR1": "a Parquet file. Name it .parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet. Unpack it, or save it as CSV",
    b"\x1f\x8b": "compressed by gzip. Name it .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd. Name it .zst",
}
_ESCAPED = re.compile(rb'\\(["\\])')


class LongRow(Exception):  # noqa: N818 - becomes a DataError where the number of the row is known
    """The next row is longer than MAX_ROW_BYTES."""


def setting(prefix: str, name: str, value: str | int | bool) -> str:
    """Return how to set a key of the input: in a schema, whose keys begin with 'input.', or by a flag."""
    if isinstance(value, bool):  # a file of titles has no flags of its own for these
        return (
            f"--{'' if value else 'no-'}{name}" if prefix.startswith("--") else f"{prefix}{name} = {str(value).lower()}"
        )
    return f"{prefix}{name.replace('_', '-')} {value!r}" if prefix.startswith("--") else f"{prefix}{name} = {value!r}"


def row_blocks(file: InputFile, section: InputSection, prefix: str, quotes: bool) -> Iterator[bytes]:
    """Yield the text in blocks of complete rows, without blank lines at the end.

    A block is held back until another row follows, because blank lines at its end may be the last of the file.
    """
    held = b""
    rest = b""  # the beginning of a row
    skip = section.skip_lines
    for block in _plain_blocks(file, section, prefix):
        text = rest + block
        while skip and b"\n" in text:
            text = text.partition(b"\n")[2]
            skip -= 1
        end = text.rfind(b"\n") + 1
        if quotes and b'"' in text and text.count(b'"', 0, end) % 2:  # the last quote opens a field with line ends
            end = text.rfind(b"\n", 0, text.rfind(b'"', 0, end)) + 1
        rest = text[end:]
        if end and not skip:
            if held:
                yield held
            held = text[:end]
        if len(rest) > MAX_ROW_BYTES:
            if held:
                yield held
            raise LongRow
    if last := (held + rest).rstrip(b"\r\n"):
        yield last + b"\n"
    if rest.strip(b"\r\n") and not rest.endswith(b"\n"):  # after the last block: not if only the header is read
        log.warning("%s: the last row has no line end; it is used as it is. Is the file incomplete?", file)


def _plain_blocks(file: InputFile, section: InputSection, prefix: str) -> Iterator[bytes]:
    """Yield UTF-8 without a byte order mark, with line feeds for line ends, and without backslashes before quotes."""
    has_only_cr: bool | None = None
    pending = b""
    for block in _utf8_blocks(file, section, prefix):
        if has_only_cr is None and (b"\n" in block or b"\r" in block[:-1]):
            has_only_cr = b"\n" not in block
        text = pending + (block.replace(b"\r", b"\n") if has_only_cr else block)
        pending = b""
        if section.escape and b"\\" in text:
            if (len(text) - len(text.rstrip(b"\\"))) % 2:  # what it stands before is in the next block
                text, pending = text[:-1], b"\\"
            text = _ESCAPED.sub(lambda found: b"\x1e" if found[1] == b'"' else b"\\", text)
        yield text
    if pending:
        yield pending


def _utf8_blocks(file: InputFile, section: InputSection, prefix: str) -> Iterator[bytes]:
    blocks = read_blocks(file, BLOCK_BYTES)
    if codecs.lookup(section.encoding).name in ("utf-8", "utf-8-sig"):
        first = next(blocks, b"")
        while 0 < len(first) < len(_BOM) and (more := next(blocks, b"")):
            first += more
        if other := next((what for magic, what in _OTHERS.items() if first.startswith(magic)), ""):
            raise DataError(f"{file}: is no text but {other}.")
        if (likely := likely_encoding(first[: 1 << 12])).startswith("utf-16"):
            fact = f"it is in UTF-16, its first bytes are {first[:2].hex(' ').upper()}"
            raise DataError(f"{file}: {fact}. Use {setting(prefix, 'encoding', likely)}.")
        if first:
            yield first.removeprefix(_BOM)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(section.encoding)()
    before = 0
    is_start = True
    for block in blocks:
        text = _decoded(file, section, prefix, decoder, before, block)
        before += len(block)
        yield (text.removeprefix("\ufeff") if is_start else text).encode("utf-8", "surrogatepass")
        is_start = is_start and not text
    _decoded(file, section, prefix, decoder, before, b"", final=True)


def _decoded(
    file: InputFile,
    section: InputSection,
    prefix: str,
    decoder: codecs.IncrementalDecoder,
    before: int,
    block: bytes,
    final: bool = False,
) -> str:
    """Decode the next block; `before` bytes were read before it, some of which the decoder may hold."""
    held = decoder.getstate()[0]
    try:
        return decoder.decode(block, final)
    except UnicodeError as error:
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        raise DataError(
            f"{file}: byte {before - len(held) + start + 1:,} is not {section.encoding}. "
            f"{_advice(held + block, prefix, section.encoding)}"
        ) from None


def bad_byte(file: InputFile, prefix: str) -> str:
    """Return where a text that should be UTF-8 is not, and what it may be; empty if all of it is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    for block in read_blocks(file, BLOCK_BYTES):
        held = decoder.getstate()[0]
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            place = before - len(held) + error.start + 1
            text = error.object
            line = text.rfind(b"\n", 0, error.start) + 1
            around = text[max(line, error.start - (1 << 12)) : error.start + (1 << 16)]
            return f"byte {place:,} of the text ({error.object[error.start]:#04x}) is not UTF-8. " + _advice(
                around, prefix, "utf-8"
            )
        before += len(block)
    return ""


def _advice(sample: bytes, prefix: str, encoding: str) -> str:
    likely = likely_encoding(sample)
    if likely == encoding:
        return "Fix the file, or get it again."
    if not likely:
        return f"Name the encoding of the file: {prefix}encoding, a codec of Python."
    return f"It is probably {likely}: use {setting(prefix, 'encoding', likely)}."
