"""Files and directories that appear complete or not at all, whenever the process is killed."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recmill.errors import ConfigError, as_user_error
from recmill.failpoints import reach


def write_text(path: Path, text: str) -> None:
    """Replace `path` with a synced file that holds `text`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _refuse_devices(path)
        write_synced(temporary, text)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # a failing write() names no file
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_synced(path: Path, text: str, before_sync: Callable[[], None] = lambda: None) -> None:
    """Write a file and sync it. It may be incomplete if the process is killed meanwhile."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        before_sync()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is lost with the power until then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `output` if the block succeeds, and removed otherwise."""
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
    partial = _new_partial(output, Path.touch)
    try:
        yield partial
        os.rename(partial, output)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `output` if the block succeeds, and is removed otherwise."""
    partial = _new_partial(output, Path.mkdir)
    try:
        reach("prepare.begin")
        yield partial
        replace_directory(output, partial)
    except OSError as error:
        error.filename = error.filename or str(output)  # a failing write() does not name its file
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_devices(output: Path) -> None:
    """Raise ConfigError for devices and pipes: root would replace /dev/null or /dev/stdout for the whole machine."""
    is_special = output.exists() and not (output.is_file() or output.is_dir())
    if is_special or output.absolute().parent == Path("/dev"):
        raise ConfigError(f"{output} is a device or pipe, which a file would replace. Name a file instead.")


def _new_partial(output: Path, create: Callable[[Path], None]) -> Path:
    """Create the temporary file or directory beside `output`, with the parents that are missing."""
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    try:
        _refuse_devices(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output)
        create(partial)
    except OSError as error:
        raise as_user_error(error) or error from error
    return partial


def replace_directory(output: Path, new: Path) -> None:
    """Rename `new` to `output`, and remove what was there before."""
    reach("prepare.before_rename")
    old = output.parent / f".{output.name}.old-{os.getpid()}"
    if output.exists():
        os.rename(output, old)
    os.rename(new, output)
    reach("prepare.renamed")
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(output: Path) -> None:
    """Remove what killed processes left beside `output`, or restore it if it is the only copy."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.(?:(partial|old)-)?(\d+)")
    for path in list(output.parent.iterdir()):
        leftover = pattern.fullmatch(path.name)
        if leftover is None or Path(f"/proc/{leftover[2]}").exists():
            continue
        if leftover[1] == "old" and not output.exists():  # killed between the two renames
            os.rename(path, output)
        elif path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
