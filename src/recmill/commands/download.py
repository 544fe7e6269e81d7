"""`recmill download`: public raw data -> a directory that `recmill prepare` reads, complete and checked."""

import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypedDict, Unpack

from recmill.commands.keywords import checked_keywords
from recmill.config.options import checked_options, given_path
from recmill.config.sections import Section, key
from recmill.datasets.criteo.checksums import published_md5s
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.files.atomic import new_directory, remove_leftovers, write_json
from recmill.files.locks import exclusive_lock
from recmill.observe.progress import Progress
from recmill.registry import unknown

log = logging.getLogger(__name__)

_MAX_FAILURES = 5  # consecutive, without a new byte
_FIRST_PAUSE_SECONDS = 1.0  # doubled after every failure
_TIMEOUT_SECONDS = 60.0  # without a new byte
_BLOCK_BYTES = 1 << 20
_RETRY_STATUSES = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Source:
    """A file to download: a zip archive of which `members` are unpacked, or, without members, the data itself."""

    url: str
    max_bytes: int  # far above the real size; the members together may have ten times as many
    md5: str | None = None  # as published
    members: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


_MOVIELENS = "https://files.grouplens.org/datasets/movielens/"
_GOODREADS = "https://mcauleylab.ucsd.edu/public_datasets/gdrive/goodreads/"
_CRITEO = "criteo"  # of which all variants are downloaded by default
_LOGS = "https://storage.googleapis.com/criteo-cail-datasets/"  # as in facebookresearch/dlrm's download script
_TAB = ("u.data", "u.item", "README")
_CSV = ("ratings.csv", "movies.csv", "README.txt")
_DAT = ("ratings.dat", "movies.dat", "users.dat", "README")
SOURCES = {  # the first variant of each is the default
    "movielens": {
        "ml-1m": Source(f"{_MOVIELENS}ml-1m.zip", 10**7, "c4d9eecfca2ab87c1945afe126590906", _DAT),
        "ml-100k": Source(f"{_MOVIELENS}ml-100k.zip", 10**7, "0e33842e24a9c977be4e0107933c0723", _TAB),
        "ml-20m": Source(f"{_MOVIELENS}ml-20m.zip", 4 * 10**8, "cd245b17a1ae2cc31bb14903e1204af3", _CSV),
        "ml-25m": Source(f"{_MOVIELENS}ml-25m.zip", 5 * 10**8, "6b51fb2759a8657d3bfcbfc42b592ada", _CSV),
    },
    "goodreads": {
        "interactions": Source(f"{_GOODREADS}goodreads_interactions.csv", 10**10),
        "books": Source(f"{_GOODREADS}goodreads_books.json.gz", 10**10),
        "book-ids": Source(f"{_GOODREADS}book_id_map.csv", 10**9),
    },
    _CRITEO: {
        file.removesuffix(".gz"): Source(f"{_LOGS}{file}", 3 * 10**10, md5)
        for file, md5 in published_md5s("logs").items()
    },
}
_VARIANTS = "; ".join(f"of {name}: {', '.join(variants)}" for name, variants in SOURCES.items() if name != _CRITEO)


class Options(Section):
    variant: str | None = key(
        None,
        f"Which file to download, {_VARIANTS}; the default is the first. Of criteo: day_0 to day_23; default: all.",
    )
    url: str | None = key(
        None,
        "Another address of the same file, such as a mirror; its checksum must be the same. Of criteo: the address of "
        "the directory that holds day_0.gz.",
    )


class DownloadOptions(TypedDict, total=False):
    variant: str | None
    url: str | None


@checked_keywords
def download(name: str, output: str | Path, **options: Unpack[DownloadOptions]) -> Path:
    """Download public data and return its path: output/VARIANT/ for an archive, output/FILE for one file, else output.

    Options are the fields of `Options`. Data that is already there is kept. An interrupted call, repeated, continues
    the partial file if the server confirms that its file is still the same.
    """
    checked = checked_options("download", Options, dict(options))
    if name not in SOURCES:
        raise ConfigError(unknown("download", name, SOURCES))
    known = SOURCES[name]
    if checked.variant is not None and checked.variant not in known:
        raise ConfigError(unknown(f"variant of {name}", checked.variant, known))
    variants = [checked.variant] if checked.variant else list(known)[: None if name == _CRITEO else 1]
    directory = given_path(output, "--output").absolute()
    urls = {variant: checked.url or known[variant].url for variant in variants}
    if checked.url and name == _CRITEO:
        urls = {variant: f"{checked.url.rstrip('/')}/{known[variant].file}" for variant in variants}
    for url in urls.values():
        _check_address(url)
    for variant, url in urls.items():
        target = directory / (variant if known[variant].members else known[variant].file)
        _download_missing(url, known[variant], target)
    return target if len(variants) == 1 else directory


def _download_missing(url: str, source: Source, target: Path) -> None:
    if all((target / member).is_file() for member in source.members or [""]):
        log.info("%s is already there: nothing to do", target)
        _remove_finished_work(target, source)
        return
    if target.exists():
        members = ", ".join(source.members) or "the data"
        raise DataError(f"{target} exists, without all of {members}. Move it away, or choose another --output.")
    _download(url, source, target)
    log.info("downloaded %s", target)


def _check_address(url: str) -> None:
    """Raise if a connection would never succeed. `port` raises a ValueError if it is no number."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or not re.fullmatch(r"[!-~]+", url):
        raise ConfigError(f"--url {url}: expected an address like https://host/file, with %20 for a space.")


def _unfinished(target: Path, source: Source) -> Path:
    return target.parent / f".{source.file}.unfinished"


def _remove_finished_work(target: Path, source: Source) -> None:
    """Remove what a download left that was killed when its data was already in place."""
    partial = _unfinished(target, source)
    with suppress(OSError, ResourceError):  # in use, or read-only: nothing depends on it
        remove_leftovers(target)
        if partial.is_dir():
            with exclusive_lock(partial / "lock", ""):
                shutil.rmtree(partial)


def _download(url: str, source: Source, target: Path) -> None:
    """Fetch, check and unpack. After a network error the partial file is kept, after an error in the data it is not."""
    partial = _unfinished(target, source)
    partial.mkdir(parents=True, exist_ok=True)
    data = partial / "data"
    with exclusive_lock(partial / "lock", "Wait for that `recmill download` to end."), data.open("ab") as file:
        try:
            _fetch(url, file, partial / "version.json", source.max_bytes)
            _check_md5(data, url, source.md5)
            if source.members:
                _unpack(data, target, source)
            else:
                os.replace(data, target)
        except (urllib.error.HTTPError, ConnectionError) as error:
            if not data.stat().st_size:
                shutil.rmtree(partial)
            checksum = f" (md5 {source.md5})" if source.md5 else ""
            to = f"and unpack it so that {target / source.members[0]} exists" if source.members else f"to {target}"
            remedy = f"Run it again to resume, or download {source.url}{checksum} {to}."
            raise ResourceError(f"{url}: {error}. {remedy}") from None
        except DataError:
            shutil.rmtree(partial)
            raise
        shutil.rmtree(partial)


def _fetch(url: str, file: BinaryIO, version_note: Path, max_bytes: int) -> None:
    """Append to `file` until it is complete; retry when the connection breaks."""
    failures = 0
    while True:
        before = file.seek(0, os.SEEK_END)
        try:
            return _fetch_once(url, file, version_note, max_bytes)
        except (urllib.error.HTTPError, ConnectionError) as error:
            size = file.seek(0, os.SEEK_END)
            failures = 0 if size > before else failures + 1
            is_final = isinstance(error, urllib.error.HTTPError) and error.code not in _RETRY_STATUSES
            if is_final or failures == _MAX_FAILURES:
                raise
            log.warning("%s: %s after %s bytes; retrying", url, error, f"{size:,}")
        time.sleep(_FIRST_PAUSE_SECONDS * 2 ** max(failures - 1, 0))


def _fetch_once(url: str, file: BinaryIO, version_note: Path, max_bytes: int) -> None:
    """Request the bytes that `file` lacks, or all of them if it is not known to be part of the server's present file.

    `version_note` holds the address that `file` comes from and the version that the server stated.
    """
    begun = json.loads(version_note.read_bytes()) if version_note.is_file() else {}
    if begun.get("url") != url or not begun.get("version"):
        file.truncate(0)
    have = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "recmill", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": begun["version"]}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # nothing follows: the file is complete
        if error.code == 416:
            file.truncate(0)
        raise
    except (http.client.InvalidURL, ValueError) as error:  # a name that cannot be one, or a redirection to it
        raise DataError(f"{url}: {error}. Give the address of another copy with --url.") from None
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(getattr(error, "reason", error)) from None
    with answer:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            file.truncate(0)
            etag = answer.headers.get("ETag", "")
            version = etag if etag.startswith('"') else answer.headers.get("Last-Modified")
            write_json(version_note, {"url": url, "version": version})
        _append(answer, file, url, max_bytes)


def _append(answer: http.client.HTTPResponse, file: BinaryIO, url: str, max_bytes: int) -> None:
    have = file.seek(0, os.SEEK_END)
    length = answer.headers.get("Content-Length")
    if not answer.chunked and not (length or "").isdecimal():
        fact = "does not say how long the file is" if length is None else f"gives the length {length!r}"
        raise DataError(f"{url}: the server {fact}, so a break would go unnoticed. Give another address with --url.")
    total = None if answer.chunked else have + int(length or 0)
    with Progress(f"downloading {Path(url).name}", total or max_bytes, "bytes") as progress:
        progress.advance(have)
        while True:
            if max(have, total or 0) > max_bytes:
                raise DataError(f"{url}: more than the {max_bytes:,} bytes that are allowed. Is it the right file?")
            try:
                block = answer.read(_BLOCK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionError(error) from None
            if not block:
                break
            file.write(block)
            have += len(block)
            progress.advance(len(block))
    file.flush()
    if total is not None and have < total:
        raise ConnectionError(f"connection closed at {have:,} of {total:,} bytes")


def _check_md5(data: Path, url: str, md5: str | None) -> None:
    md5 = md5 or _published_md5(f"{url}.md5")
    if md5 is None:
        log.warning("%s: no checksum is known or published beside it, so its content is unchecked", url)
        return
    with data.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        raise DataError(
            f"{url}: md5 {found}, expected {md5}: corrupted on the way, or another file. Run it again, or give the "
            "address of another copy with --url."
        )


def _published_md5(url: str) -> str | None:
    with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        if found := re.search(rb"\b[0-9a-f]{32}\b", answer.read(1000)):
            return found[0].decode()
    return None


def _unpack(archive: Path, target: Path, source: Source) -> None:
    """Unpack the members of `source` to `target`; refuse archives that contain anything suspicious."""
    try:
        with zipfile.ZipFile(archive) as file, new_directory(target) as partial:
            for member, info in _checked_members(file, source).items():
                with file.open(info) as packed, (partial / member).open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, _BLOCK_BYTES)  # ends at the declared size, checks the CRC
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:  # the last: an unsupported compression
        raise DataError(f"{source.file}: not a complete zip file ({error}). Run it again.") from None


def _checked_members(archive: zipfile.ZipFile, source: Source) -> dict[str, zipfile.ZipInfo]:
    for info in archive.infolist():
        path = PurePosixPath(info.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{source.file}: '{info.filename}' would leave its directory. Do not use this file.")
        if info.flag_bits & 1:
            raise DataError(f"{source.file}: '{info.filename}' is encrypted. Is it the right file?")
    names = {member: f"{source.file.removesuffix('.zip')}/{member}" for member in source.members}
    if missing := [name for name in names.values() if name not in archive.namelist()]:
        raise DataError(f"{source.file}: no {', '.join(missing)} in it. Is it the right file?")
    members = {member: archive.getinfo(name) for member, name in names.items()}
    size = sum(info.file_size for info in members.values())
    if size > 10 * source.max_bytes:
        raise DataError(f"{source.file}: {size:,} bytes unpacked, {10 * source.max_bytes:,} are allowed.")
    return members
