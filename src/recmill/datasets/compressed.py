"""Read raw files: plain, .gz or .zst. A truncated file is an error, never a shorter file."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash
import zstandard

from recmill.datasets.inputs.frame import FrameFile
from recmill.datasets.inputs.remote import RemoteFile
from recmill.errors import DataError

InputFile = Path | RemoteFile | FrameFile

SUFFIXES = ("", ".gz", ".zst")
_SAMPLE_BYTES = 1 << 20


def is_compressed(path: InputFile) -> bool:
    return path.suffix in SUFFIXES[1:]


def file_of(directory: Path, name: str) -> Path | None:
    """Return the file of this name in a directory, plain or compressed, if it is there."""
    return next((path for suffix in SUFFIXES if (path := directory / f"{name}{suffix}").is_file()), None)


def read_blocks(path: InputFile, block_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed content in blocks of about this size. A file that changes meanwhile is an error."""
    before = file_state(path)
    yield from _zstd_blocks(path, block_bytes) if path.suffix == ".zst" else _blocks(path, block_bytes)
    if isinstance(path, RemoteFile):
        path.check_unchanged()
    elif file_state(path) != before:
        raise DataError(f"{path}: it changed while it was read. Wait until it is complete, then repeat the command.")


def _blocks(path: InputFile, block_bytes: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as raw, gzip.open(raw, "rb") if path.suffix == ".gz" else raw as file:
            while block := file.read(block_bytes):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: cut short or corrupt ({error}). Download the file again.") from None


def _zstd_blocks(path: InputFile, block_bytes: int) -> Iterator[bytes]:
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


def expansion(path: InputFile) -> float:
    """Estimate the bytes of text per byte of the file from its beginning."""
    if not is_compressed(path):
        return 1.0
    with path.open("rb") as file:
        beginning = file.read(1 << 18)
    decompressor = zlib.decompressobj(31) if path.suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj()
    try:
        text = decompressor.decompress(beginning)
    except (zlib.error, zstandard.ZstdError):
        return 1.0  # corrupt: reading the file will report it
    return max(len(text), 1) / max(len(beginning), 1)


def forecast_rows(path: InputFile) -> int:
    """Estimate the rows of a text from the size of the file and its first rows."""
    beginning = next(read_blocks(path, 1 << 20), b"")
    rows = max(beginning.count(b"\n"), 1)
    return max(int(path.stat().st_size * expansion(path) * rows / max(len(beginning), 1)), 1)


def forecast_items(path: InputFile) -> int:
    """Estimate the words of a text from the size of the file and its first rows."""
    beginning = next(read_blocks(path, 1 << 20), b"")
    return max(int(path.stat().st_size * expansion(path) * len(beginning.split()) / max(len(beginning), 1)), 1)


def file_state(path: InputFile) -> list[int | str]:
    """Return the size of a file, and what changes when its content does."""
    return [path.stat().st_size, path.stat().st_mtime_ns if isinstance(path, Path) else path.version]


def sample_digest(path: InputFile) -> str:
    """Return a digest of the file, or of samples spread over a large one, to detect a changed file quickly.

    Of a file in object storage it is the version that the store gives.
    """
    if not isinstance(path, Path):
        return path.version
    size = path.stat().st_size
    starts: Iterable[int] = range(0, size, _SAMPLE_BYTES)
    if size > 1 << 28:
        starts = [(size - _SAMPLE_BYTES) * index // 63 for index in range(64)]
    state = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        for start in starts:
            file.seek(start)
            state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
