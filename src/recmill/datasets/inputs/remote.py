"""Files in object storage (s3://, gs://, hf:// and others that fsspec knows), read by ranges of bytes.

A request that fails is repeated; a file that changes while it is read is an error, because ranges of two versions would
be mixed.
"""

import io
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, TypeVar

from recmill.errors import ConfigError, DataError, ResourceError

log = logging.getLogger(__name__)

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts
_BUFFER_BYTES = 1 << 23
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError)  # another attempt would not help
Result = TypeVar("Result")


def is_remote(given: object) -> bool:
    return "://" in str(given)


@dataclass(frozen=True)
class RemoteFile:
    """A file of an object store, with the methods of Path that reading needs."""

    url: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: "RemoteFile") -> bool:
        return self.url < other.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.url).stem

    def absolute(self) -> "RemoteFile":
        return self

    def stat(self) -> os.stat_result:
        """Return a stat with the size; the version takes the place of the time of change."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))

    def open(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self), _BUFFER_BYTES)

    @cached_property
    def _system(self) -> Any:
        return _system(self.url)

    def bytes_of(self, start: int, stop: int) -> bytes:
        system = self._system
        path = system._strip_protocol(self.url)
        found = _repeated(self.url, lambda: bytes(system.cat_file(path, start=start, end=stop)))
        if len(found) != min(stop, self.size) - start:
            raise DataError(f"{self.url}: ends at byte {start + len(found):,} of {self.size:,}. Was it replaced?")
        return found

    def check_unchanged(self) -> None:
        if (now := found_remote(self.url)) != [self]:
            size = f"{now[0].size:,}" if now else "no"
            raise DataError(f"{self.url}: changed while it was read ({self.size:,} bytes before, {size} now). Repeat.")


class _Ranges(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._file.size)
        if stop <= self._place:
            return 0
        found = self._file.bytes_of(self._place, stop)
        buffer[: len(found)] = found
        self._place = stop
        return len(found)


def found_remote(pattern: str) -> list[RemoteFile]:
    """Return the file, the files that a pattern matches, or those of a directory, in the order of their names."""
    system = _system(pattern)
    path = system._strip_protocol(pattern)
    scheme = pattern.partition("://")[0]

    def listed() -> dict[str, dict[str, Any]]:
        system.invalidate_cache()
        if any(letter in path for letter in "*?["):
            return dict(system.glob(path, detail=True))
        if system.isdir(path):
            return dict(system.find(path, detail=True))
        return {path: system.info(path)} if system.exists(path) else {}

    found = _repeated(pattern, listed)
    return sorted(
        RemoteFile(f"{scheme}://{name}", int(info["size"] or 0), _version(info))
        for name, info in found.items()
        if info.get("type") == "file" and not PurePosixPath(name).name.startswith(("_", "."))
    )


def _version(info: dict[str, Any]) -> str:
    """Return what changes when the file does: its checksum or, where there is none, the time of its change."""
    found = next((info[k] for k in ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime") if info.get(k)), "")
    return str(found).strip('"')


def _system(url: str) -> Any:
    scheme = url.partition("://")[0]
    extra = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError:
        how = f"pip install 'recmill[{extra}]'" if scheme in _PACKAGES else "pip install the package that fsspec names"
        package = _PACKAGES.get(scheme, "fsspec")
        raise ConfigError(f"{url}: reading {scheme}:// needs {package}, which is not installed. Use: {how}.") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}. Known: {', '.join(['s3://', 'gs://', 'hf://'])}.") from None


def _repeated(url: str, request: Callable[[], Result]) -> Result:
    """Return what the request returns. One that fails is repeated after a moment, a few times."""
    for attempt, wait in enumerate((*_WAITS, None), 1):
        try:
            return request()
        except _LASTING as error:
            raise _refused(url, error) from error
        except Exception as error:
            if wait is None or not _may_pass(error):
                raise _refused(url, error, attempt) from error
            log.warning("%s: %s; attempt %d failed, the next in %.1f s", url, _fact(error), attempt, wait)
            time.sleep(wait)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    return "credential" not in str(error).lower() and not isinstance(error, TypeError | ValueError | KeyError)


def _refused(url: str, error: Exception, attempts: int = 1) -> DataError | ResourceError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{url}: no such file or bucket. Check the address.")
    if isinstance(error, PermissionError) or "credential" in str(error).lower():
        remedy = "Set the credentials of its store, like AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://."
        return ResourceError(f"{url}: may not be read ({_fact(error)}). {remedy}")
    text = f"{url}: could not be read, {attempts} attempts failed; the last: {_fact(error)}."
    return ResourceError(f"{text} Is the store reachable? Repeat the command.")


def _fact(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
