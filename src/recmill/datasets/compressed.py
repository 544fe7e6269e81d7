"""Read raw files: plain, .gz or .zst. A truncated file is an error, never a shorter file."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import xxhash
import zstandard

from recmill.errors import DataError

SUFFIXES = ("", ".gz", ".zst")
_DIGESTED_BYTES = 1 << 28  # a larger file is digested by samples
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 20


def read_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed content in blocks of about this size."""
    if path.suffix == ".zst":
        yield from _zstd_blocks(path, block_bytes)
        return
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb", buffering=0) as file:
            while block := file.read(block_bytes):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: cut short or corrupt ({error}). Download the file again.") from None


def _zstd_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own readers accept a file that ends in the middle of a frame."""
    compressed_bytes = min(block_bytes, 1 << 17)  # so that a block stays small
    frame = None
    try:
        with path.open("rb", buffering=0) as file:
            while compressed := file.read(compressed_bytes):
                while compressed:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    if block := frame.decompress(compressed):
                        yield block
                    compressed = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: corrupt ({error}). Download the file again.") from None
    if frame is not None:
        raise DataError(f"{path}: cut short (it ends in the middle of a frame). Download the file again.")


def expansion(path: Path) -> float:
    """Estimate the bytes of text per byte of the file from its beginning."""
    if path.suffix not in SUFFIXES[1:]:
        return 1.0
    with path.open("rb") as file:
        beginning = file.read(1 << 18)
    try:
        if path.suffix == ".gz":
            text = zlib.decompressobj(31).decompress(beginning)
        else:
            text = zstandard.ZstdDecompressor().decompressobj().decompress(beginning)
    except (zlib.error, zstandard.ZstdError):
        return 1.0  # corrupt: reading the file will report it
    return max(len(text), 1) / max(len(beginning), 1)


def forecast_rows(path: Path) -> int:
    """Estimate the rows of a text from the size of the file and its first rows."""
    beginning = next(read_blocks(path, 1 << 20), b"")
    rows = max(beginning.count(b"\n"), 1)
    return max(int(path.stat().st_size * expansion(path) * rows / max(len(beginning), 1)), 1)


def sample_digest(path: Path) -> str:
    """Return a digest of the file, or of samples spread over a large one, to detect a changed file quickly."""
    size = path.stat().st_size
    state = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        if size <= _DIGESTED_BYTES:
            while block := file.read(_SAMPLE_BYTES):
                state.update(block)
        else:
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
