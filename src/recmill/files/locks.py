"""Locks between processes. A lock ends with the process that holds it, however that process ends."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recmill.errors import ResourceError
from recmill.files.timestamps import utc_now


@contextmanager
def exclusive_lock(path: Path, remedy: str) -> Iterator[None]:
    """Hold the lock file `path`, created if absent, within the block.

    If another process holds it, raise ResourceError, which names that process and ends with `remedy`.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ResourceError(f"{path.parent} is in use by {holder}. {remedy}") from None
        file.truncate(0)
        with suppress(OSError):  # a full disk
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}".encode())
        yield


def is_holder_gone(path: Path) -> bool:
    """Return whether the last holder of a lock file was a process of this machine that has ended.

    It takes no lock: a process that starts at this moment would fail to get its own.
    """
    with suppress(OSError):
        holder = re.match(r"process (\d+) on (\S+) since", path.read_text(encoding="utf-8", errors="replace"))
        if holder and holder[2] == socket.gethostname():
            return not Path(f"/proc/{holder[1]}").exists()
    return False
