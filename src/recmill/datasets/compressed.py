"""Raw files as they come: plain, .gz or .zst. A file that ends too early is an error, not a short file."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import xxhash
import zstandard

from recmill.errors import DataError

SUFFIXES = ("", ".gz", ".zst")
_SAMPLED_WHOLE = 1 << 28  # bytes up to which the whole file is looked at
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


def read_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """The decompressed content in blocks of about this size."""
    if path.suffix == ".gz":
        return _gzip_blocks(path, block_bytes)
    if path.suffix == ".zst":
        return _zstd_blocks(path, block_bytes)
    return _plain_blocks(path, block_bytes)


def _plain_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(block_bytes):
            yield block


def _gzip_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(block_bytes):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: cut short or damaged ({error}). Get the file again.") from None


def _zstd_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Frame by frame: zstandard's own readers take a file cut in the middle of a frame for a shorter one."""
    piece_bytes = min(block_bytes, 1 << 17)  # compressed, so that a block stays small
    frame = None
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(piece_bytes):
                while piece:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    if block := frame.decompress(piece):
                        yield block
                    piece = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged ({error}). Get the file again.") from None
    if frame is not None:
        raise DataError(f"{path}: cut short (it ends in the middle of a frame). Get the file again.")


def expansion(path: Path) -> float:
    """How many bytes of text a byte of the file gives, judged by its beginning."""
    with path.open("rb") as file:
        piece = file.read(1 << 18)
    try:
        if path.suffix == ".gz":
            return max(len(zlib.decompressobj(31).decompress(piece)), 1) / max(len(piece), 1)
        if path.suffix == ".zst":
            return max(len(zstandard.ZstdDecompressor().decompressobj().decompress(piece)), 1) / max(len(piece), 1)
    except (zlib.error, zstandard.ZstdError):
        return 1.0  # damaged: reading it will tell
    return 1.0


def forecast_rows(path: Path) -> int:
    """Of a text, from the size of the file and its first rows."""
    beginning = next(read_blocks(path, 1 << 20), b"")
    rows = max(beginning.count(b"\n"), 1)
    return max(int(path.stat().st_size * expansion(path) * rows / max(len(beginning), 1)), 1)


def sample_digest(path: Path) -> str:
    """Digest of the whole file, or of blocks all over a large one: tells quickly whether it is still the same."""
    size = path.stat().st_size
    state = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        if size <= _SAMPLED_WHOLE:
            while block := file.read(_SAMPLE_BYTES):
                state.update(block)
        else:
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
