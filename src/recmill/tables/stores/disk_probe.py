"""Measure how fast a disk is for `cached_ssd`: random reads of small blocks, one and many at a time."""

import ctypes
import mmap
import os
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from recmill.errors import ResourceError, remedy_for
from recmill.kernels.library import load_rows_library
from recmill.tables.stores.row_cache import ENGINES, Engine
from recmill.tables.stores.row_file import RowFile, check_row_directory, file_system, open_row_file

_FILE_BYTES = 256 << 20
_WRITE_BYTES = 4 << 20
_SECONDS = 1.0
_DEPTHS = 1, 64  # concurrent reads


@dataclass(frozen=True)
class Reads:
    engine: Engine
    depth: int
    per_second: float
    cpu_microseconds: float  # of each

    def is_enough(self, per_second: int) -> bool:
        """Return whether this rate is reached; with one read at a time, it need not be."""
        return self.depth == 1 or self.per_second >= per_second

    def __str__(self) -> str:
        return f"{self.per_second:,.0f} reads/s, {self.cpu_microseconds:.1f} us of CPU each"


@dataclass(frozen=True)
class Disk:
    file_system: str
    free_bytes: int
    is_direct: bool
    alignment: int
    reads: list[Reads]  # without io_uring if the system does not allow it


def measure_disk(directory: Path) -> Disk:
    """Write an unnamed temporary file to `directory`, and read it for a few seconds."""
    check_row_directory(directory, "--store")
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if free < 2 * _FILE_BYTES:
        raise ResourceError(
            f"{directory}: {free / 1e6:,.0f} MB are free, but measuring needs {2 * _FILE_BYTES / 1e6:,.0f} MB. "
            "Free some space, or choose another directory."
        )
    file = open_row_file(directory)
    try:
        _write(file)
        engines: tuple[Engine, ...] = ("io_uring", "threads")
        found = [_reads(file, engine, depth) for engine in engines for depth in _DEPTHS]
    finally:
        os.close(file.fd)
    return Disk(file_system(directory), free, file.is_direct, file.alignment, [reads for reads in found if reads])


def _write(file: RowFile) -> None:
    with mmap.mmap(-1, _WRITE_BYTES) as memory:
        memory.write(os.urandom(_WRITE_BYTES))  # not zeros, which some disks do not store
        for offset in range(0, _FILE_BYTES, _WRITE_BYTES):
            try:
                os.pwrite(file.fd, memory, offset)
            except OSError as error:
                raise ResourceError(f"{file.directory}: {error.strerror}. {remedy_for(error)}") from error
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _reads(file: RowFile, engine: Engine, depth: int) -> Reads | None:
    probe = load_rows_library().rows_probe
    probe.restype = c_int64
    times = (c_double * 2)()
    with mmap.mmap(-1, depth * file.alignment) as memory:
        view = ctypes.c_char.from_buffer(memory)
        sizes = (file.fd, _FILE_BYTES // file.alignment, file.alignment, depth, ENGINES[engine])
        count = probe(*map(c_int64, sizes), c_double(_SECONDS), c_void_p(ctypes.addressof(view)), times)
        del view
    if count < 0:
        raise ResourceError(f"{file.directory}: {os.strerror(-count)}. {remedy_for(OSError(-count, ''))}")
    return Reads(engine, depth, count / times[0], 1e6 * times[1] / count) if count else None
