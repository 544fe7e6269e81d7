"""Locks between processes. A lock ends with the process that holds it, or a minute later without kernel locks."""

import errno
import fcntl
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recmill.errors import ResourceError
from recmill.files.timestamps import utc_now

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre without -o flock, some NFS
_RENEW_SECONDS = 10.0
_STALE_SECONDS = 60.0


@contextmanager
def exclusive_lock(path: Path, remedy: str) -> Iterator[None]:
    """Hold the lock file `path` within the block, or raise ResourceError with its holder and the remedy."""
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ResourceError(f"{path.parent} is in use by {holder}. {remedy}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with _owner_file(path.with_name(f"{path.name}.owner"), remedy):
                yield
            return
        file.truncate(0)
        with suppress(OSError):  # a full disk
            os.write(file.fileno(), _own_name().encode())
        yield


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"


@contextmanager
def _owner_file(path: Path, remedy: str) -> Iterator[None]:
    """Hold a file that exists only while its owner lives, on file systems without locks.

    A thread renews its time. If it is not renewed for a minute, by the file server's clock, its owner was killed.
    """
    own = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    own.write_text(_own_name(), encoding="utf-8")
    try:
        with suppress(FileNotFoundError):
            if own.stat().st_mtime - path.stat().st_mtime < _STALE_SECONDS:
                holder = path.read_text(encoding="utf-8", errors="replace") or "another process"
                raise ResourceError(f"{path.parent} is in use by {holder}. {remedy}")
            path.unlink()
        try:
            os.link(own, path)  # fails if another process was faster
        except FileExistsError:
            raise ResourceError(f"{path.parent} is in use by another process. {remedy}") from None
    finally:
        own.unlink()
    log.warning("%s: the file system has no locks; a file that is renewed every few seconds replaces them", path)
    end = threading.Event()

    def renew() -> None:
        while not end.wait(_RENEW_SECONDS):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=renew, daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        path.unlink(missing_ok=True)


def is_holder_gone(path: Path) -> bool:
    """Return whether the last holder of a lock file was a process of this machine that has ended.

    It takes no lock: a process that starts at this moment would fail to get its own.
    """
    with suppress(OSError):
        holder = re.match(r"process (\d+) on (\S+) since", path.read_text(encoding="utf-8", errors="replace"))
        if holder and holder[2] == socket.gethostname():
            return not Path(f"/proc/{holder[1]}").exists()
    return False
