"""The file that holds table rows: an unnamed temporary file, which disappears with the process."""

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from recmill.errors import ConfigError, ResourceError, remedy_for

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_IN_MEMORY = ("tmpfs", "ramfs")


class RowFile(NamedTuple):
    fd: int
    directory: Path
    is_direct: bool  # reads and writes bypass the page cache (O_DIRECT)
    alignment: int  # of offsets, sizes and memory


def check_row_directory(directory: Path, place: str = "tables.path") -> None:
    """Raise a UserError if `directory` does not exist, is on a file system in memory, or cannot hold a file."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"{place}: {directory} {what}. Create it on a local SSD, or choose another one.")
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        raise ConfigError(f"{place}: {directory} is a {kind}, which is memory. Choose a directory on a disk.")
    try:
        os.close(open_row_file(directory).fd)
    except OSError as error:
        problem = f"{place}: {directory}: a row file cannot be written there: {error.strerror}."
        raise ResourceError(f"{problem} {remedy_for(error)}".rstrip()) from error


def file_system(directory: Path) -> str:
    """Return the type of the file system, such as ext4; empty if it is not known."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()]
    return next((right.split()[0] for left, right in mounts if left.split()[2] == number), "")


def open_row_file(directory: Path) -> RowFile:
    """Open a file that no other process can see, and that is deleted when it is closed."""
    fd = _open(directory, os.O_DIRECT)
    if fd is not None:
        if alignment := _direct_alignment(fd):
            return RowFile(fd, directory, True, alignment)
        os.close(fd)
    fd = _open(directory, 0)
    assert fd is not None
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return RowFile(fd, directory, False, 512)


def _open(directory: Path, direct: int) -> int | None:
    """Return a descriptor, or None if the file system does not support O_DIRECT."""
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES or not directory.is_dir():
            raise
    fd, name = tempfile.mkstemp(prefix=".recmill-rows-", dir=directory)
    try:
        return os.open(name, flags)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            return None
        raise
    finally:
        os.close(fd)
        Path(name).unlink()


def _direct_alignment(fd: int) -> int:
    """Try direct reads and return the smallest alignment that works; 0 if none does."""
    with mmap.mmap(-1, 8192) as memory, memoryview(memory) as view:
        try:
            os.pwrite(fd, view[:4096], 0)
            for alignment in (512, 4096):
                try:
                    if os.preadv(fd, [view[alignment : 2 * alignment]], 4096 - alignment) == alignment:
                        return alignment
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return 0
