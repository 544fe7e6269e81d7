"""`recmill download`: public raw data -> a directory that `recmill prepare` reads. Whole and checked, or not there."""

import fcntl
import hashlib
import http.client
import json
import logging
import os
import re
import stat
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from recmill.config.sections import Section, key
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.files.atomic import new_directory, write_json
from recmill.observe.progress import Progress
from recmill.registry import unknown

log = logging.getLogger(__name__)

_TRIES = 5  # in a row without a new byte
_FIRST_PAUSE_SECONDS = 1.0  # doubled from try to try
_SILENCE_SECONDS = 60.0
_BLOCK_BYTES = 1 << 20
_AGAIN = (408, 429, 500, 502, 503, 504)


class Options(Section):
    variant: str | None = key(
        None,
        "movielens: ml-100k, ml-1m (default), ml-20m, ml-25m; goodreads: interactions (default), or books and book-ids "
        "for titles.",
    )
    url: str | None = key(None, "Another address of the same file, such as a mirror; its checksum must be the same.")


@dataclass(frozen=True)
class Source:
    """`members`: what is taken out of a zip; none: the file itself is the data."""

    url: str
    most_bytes: int  # far above the real size; of the members together, ten times as many
    md5: str | None = None  # as published
    members: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def _movielens(variant: str, most_bytes: int, md5: str, *members: str) -> Source:
    return Source(f"https://files.grouplens.org/datasets/movielens/{variant}.zip", most_bytes, md5, members)


_CSV = ("ratings.csv", "movies.csv", "README.txt")
_DAT = ("ratings.dat", "movies.dat", "users.dat", "README")
_GOODREADS = "https://mcauleylab.ucsd.edu/public_datasets/gdrive/goodreads/"
SOURCES = {
    "movielens": {
        "ml-100k": _movielens("ml-100k", 10**7, "0e33842e24a9c977be4e0107933c0723", "u.data", "u.item", "README"),
        "ml-1m": _movielens("ml-1m", 10**7, "c4d9eecfca2ab87c1945afe126590906", *_DAT),
        "ml-20m": _movielens("ml-20m", 4 * 10**8, "cd245b17a1ae2cc31bb14903e1204af3", *_CSV),
        "ml-25m": _movielens("ml-25m", 5 * 10**8, "6b51fb2759a8657d3bfcbfc42b592ada", *_CSV),
    },
    "goodreads": {
        "interactions": Source(f"{_GOODREADS}goodreads_interactions.csv", 10**10),
        "books": Source(f"{_GOODREADS}goodreads_books.json.gz", 10**10),
        "book-ids": Source(f"{_GOODREADS}book_id_map.csv", 10**9),
    },
}


def download(name: str, output: str | Path, *, variant: str | None = None, url: str | None = None) -> Path:
    """Returns what was fetched: output/VARIANT/ of an archive, else output/FILE. What is there already stays.

    Cut off or killed, the same call goes on where it stopped, if the server says that its file is still the same.
    """
    if name not in SOURCES:
        raise ConfigError(unknown("download", name, SOURCES))
    variant = variant or ("ml-1m" if name == "movielens" else next(iter(SOURCES[name])))
    if variant not in SOURCES[name]:
        raise ConfigError(unknown(f"variant of {name}", variant, SOURCES[name]))
    source, output = SOURCES[name][variant], Path(output).absolute()
    url = url or source.url
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"--url {url}: expected an address that begins with https:// or http://.")
    target = output / (variant if source.members else source.file)
    if all((target / member).is_file() for member in source.members or [""]):
        log.info("%s is already there: nothing to do", target)
        return target
    if target.exists():
        raise DataError(
            f"{target} exists, without all of {', '.join(source.members)}. Move it away, or change --output."
        )
    output.mkdir(parents=True, exist_ok=True)
    partial = output / f".{source.file}.partial"
    with partial.open("ab") as file:
        _lock(file)
        try:
            _fetch(url, file, source.most_bytes)
            _check(partial, url, source.md5)
            if source.members:
                _unzip(partial, target, source)
            else:
                os.replace(partial, target)
        except (urllib.error.HTTPError, ConnectionError) as error:
            if not file.seek(0, os.SEEK_END):
                _remove(partial)
            raise ResourceError(f"{url}: {error}. Run it again to go on, or {_by_hand(source, target)}") from None
        except DataError:
            _remove(partial)
            raise
        _remove(partial)
    log.info("downloaded %s", target)
    return target


def _by_hand(source: Source, target: Path) -> str:
    checked = f" (md5 {source.md5})" if source.md5 else ""
    if source.members:
        return f"by hand: fetch {source.url}{checked} and unpack it so that {target / source.members[0]} is there."
    return f"by hand: fetch {source.url}{checked} and put it at {target}."


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ResourceError(f"{file.name}: another `recmill download` is at work on it. Wait for it.") from None


def _note(partial: Path) -> Path:
    """Says which version of which file the partial one is the beginning of."""
    return partial.with_name(f"{partial.name}.json")


def _remove(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _note(partial).unlink(missing_ok=True)


def _fetch(url: str, file: BinaryIO, most_bytes: int) -> None:
    """Append to `file` until it is whole; connections that are cut are made again."""
    tries = 0
    while True:
        before = file.tell()
        try:
            return _fetch_once(url, file, most_bytes)
        except (urllib.error.HTTPError, ConnectionError) as error:
            is_final = isinstance(error, urllib.error.HTTPError) and error.code not in _AGAIN
            if is_final or tries + 1 >= _TRIES:
                raise
            reason = error
        tries = 0 if file.tell() > before else tries + 1
        log.warning("%s: %s after %s bytes; trying again", url, reason, f"{file.tell():,}")
        time.sleep(_FIRST_PAUSE_SECONDS * 2 ** max(tries - 1, 0))


def _fetch_once(url: str, file: BinaryIO, most_bytes: int) -> None:
    note = _note(Path(file.name))
    known = json.loads(note.read_bytes()) if note.is_file() else {}
    if known.get("url") != url or not known.get("version"):
        file.truncate(0)
    have = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "recmill", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": known["version"]}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SILENCE_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # nothing after what we have: it was whole
        file.truncate(0 if error.code == 416 else have)
        raise
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(getattr(error, "reason", error)) from None
    with answer:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = file.truncate(0)
            etag = answer.headers.get("ETag", "")
            version = etag if etag.startswith('"') else answer.headers.get("Last-Modified")
            write_json(note, {"url": url, "version": version})
        length = answer.headers.get("Content-Length")
        if length is None and not answer.chunked:
            raise DataError(f"{url}: the server does not say how long the file is, so a cut would not show.")
        total = None if length is None else have + int(length)
        _copy(answer, file, have, total, most_bytes, url)


def _copy(answer: Any, file: BinaryIO, have: int, total: int | None, most_bytes: int, url: str) -> None:
    with Progress(f"downloading {Path(url).name}", total or most_bytes, "bytes") as progress:
        progress.advance(have)
        while True:
            if max(have, total or 0) > most_bytes:
                raise DataError(f"{url}: more than the {most_bytes:,} bytes that are allowed. Is it the right file?")
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
        raise ConnectionError(f"cut off at {have:,} of {total:,} bytes")


def _check(partial: Path, url: str, md5: str | None) -> None:
    md5 = md5 or _published_md5(f"{url}.md5")
    if md5 is None:
        log.warning("%s: no checksum is known or published beside it, so its content is unchecked", url)
        return
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        raise DataError(
            f"{url}: md5 {found}, expected {md5}: damaged on the way, or another file. Run it again, or give the "
            "address of another copy with --url."
        )


def _published_md5(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_SECONDS) as answer:
            found = re.search(rb"\b[0-9a-f]{32}\b", answer.read(1000))
    except (OSError, http.client.HTTPException):
        return None
    return found[0].decode() if found else None


def _unzip(archive: Path, target: Path, source: Source) -> None:
    """Only the members we know, from an archive in which nothing looks like an attack."""
    try:
        with zipfile.ZipFile(archive) as file, new_directory(target) as partial:
            infos = file.infolist()
            for info in infos:
                path = PurePosixPath(info.filename.replace("\\", "/"))
                if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(info.external_attr >> 16):
                    raise DataError(
                        f"{source.file}: '{info.filename}' would leave its directory. Do not use this file."
                    )
            wanted = {member: f"{source.file.removesuffix('.zip')}/{member}" for member in source.members}
            by_name = {info.filename: info for info in infos}
            if missing := [name for name in wanted.values() if name not in by_name]:
                raise DataError(f"{source.file}: no {', '.join(missing)} in it. Is it the right file?")
            size = sum(by_name[name].file_size for name in wanted.values())
            if size > 10 * source.most_bytes:
                raise DataError(f"{source.file}: {size:,} bytes unpacked, {10 * source.most_bytes:,} are allowed.")
            for member, name in wanted.items():
                with file.open(name) as packed, (partial / member).open("wb") as unpacked:
                    while block := packed.read(_BLOCK_BYTES):  # ends at the declared size, and checks the CRC
                        unpacked.write(block)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:  # the last: packed in a way zipfile lacks
        raise DataError(f"{source.file}: not a whole zip file ({error}). Run it again.") from None
