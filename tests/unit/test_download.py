"""`recmill download` from a local server that breaks connections, sends wrong data and refuses requests."""

import fcntl
import gzip
import hashlib
import io
import logging
import re
import stat
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recmill import prepare
from recmill.commands import download as download_module
from recmill.commands.download import download
from recmill.errors import ConfigError, DataError, ResourceError

from ..conftest import RunCli


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


FILES = {
    "ml-1m/ratings.dat": "".join(f"{u}::{i}::4::{u * i}\n" for u in range(1, 9) for i in range(1, 9)),
    "ml-1m/movies.dat": "".join(f"{i}::Film {i}::Drama\n" for i in range(1, 9)),
    "ml-1m/users.dat": "1::F::1::10::48067\n",
    "ml-1m/README": "terms of use",
    "ml-1m/extra.sh": "rm -r somewhere",
}
ARCHIVE = zipped(FILES)


@dataclass
class Server:
    """`cuts` are the lengths at which the next answers end, `failures` the statuses of the next answers."""

    content: bytes = ARCHIVE
    contents: dict[str, bytes] = field(default_factory=dict)  # by path, instead of `content`
    etag: str | None = '"one"'
    cuts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    has_length: bool = True
    length: str | None = None  # instead of the real one
    location: str = ""  # in answers of `failures`
    checksum: str | None = None
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.endswith(".md5"):
            return self.send(request, 200 if self.checksum else 404, (self.checksum or "").encode(), {})
        self.content = self.contents.get(request.path, self.content)
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        if self.failures:
            return self.send(request, self.failures.pop(0), b"", {"Location": self.location})
        headers = {"ETag": self.etag} if self.etag else {}
        if wanted and request.headers.get("If-Range") == self.etag:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            if start >= len(self.content):
                return self.send(request, 416, b"", {"Content-Range": f"bytes */{len(self.content)}"})
            headers["Content-Range"] = f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
            return self.send(request, 206, self.content[start:], headers)
        return self.send(request, 200, self.content, headers)

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        if self.has_length:
            request.send_header("Content-Length", self.length or str(len(body)))
        request.end_headers()
        is_data = status in (200, 206) and not request.path.endswith(".md5")
        request.wfile.write(body[: self.cuts.pop(0)] if self.cuts and is_data else body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download_module, "_FIRST_PAUSE_SECONDS", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}/ml-1m.zip"
        publish(monkeypatch, ARCHIVE)
        yield state
        http.shutdown()
        thread.join()


def publish(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Make `content` the archive that GroupLens publishes."""
    md5 = hashlib.md5(content).hexdigest()
    source = replace(download_module.SOURCES["movielens"]["ml-1m"], md5=md5, max_bytes=10_000)
    monkeypatch.setitem(download_module.SOURCES["movielens"], "ml-1m", source)


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


UNFINISHED = ".ml-1m.zip.unfinished"
COMPLETE = ["ml-1m/README", "ml-1m/movies.dat", "ml-1m/ratings.dat", "ml-1m/users.dat"]


def test_the_known_members_are_unpacked_and_can_be_prepared(server: Server, tmp_path: Path) -> None:
    assert download("movielens", tmp_path / "raw", url=server.url) == tmp_path / "raw" / "ml-1m"
    assert left_in(tmp_path / "raw") == COMPLETE
    assert (tmp_path / "raw" / "ml-1m" / "ratings.dat").read_text() == FILES["ml-1m/ratings.dat"]
    assert prepare("movielens", tmp_path / "d", input=tmp_path / "raw" / "ml-1m")["num_users"] == 8
    download("movielens", tmp_path / "raw", url=server.url)
    assert len(server.ranges) == 1  # the second time it was there already


def test_a_broken_connection_is_resumed_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cuts = [100, 50]
    download("movielens", tmp_path, url=server.url)
    assert server.ranges == [None, "bytes=100-", "bytes=150-"]
    assert left_in(tmp_path) == COMPLETE


def test_a_download_that_failed_resumes_when_run_again(server: Server, tmp_path: Path) -> None:
    server.cuts = [100, *[0] * 20]
    with pytest.raises(ResourceError) as caught:
        download("movielens", tmp_path, url=server.url)
    assert f"closed at 100 of {len(ARCHIVE)} bytes. Run it again to resume, or download https://" in str(caught.value)
    assert f"so that {tmp_path}/ml-1m/ratings.dat exists" in str(caught.value)
    assert left_in(tmp_path) == [f"{UNFINISHED}/{name}" for name in ("data", "lock", "version.json")]
    server.cuts, server.ranges = [], []
    download("movielens", tmp_path, url=server.url)
    assert server.ranges == ["bytes=100-"]
    assert left_in(tmp_path) == COMPLETE


@pytest.mark.parametrize("etag", ['"two"', None, 'W/"one"'])
def test_a_file_that_may_have_changed_is_fetched_from_its_beginning(
    server: Server, tmp_path: Path, etag: str | None
) -> None:
    server.etag = '"one"' if etag == '"two"' else etag
    server.cuts = [100, *[0] * 20]
    with pytest.raises(ResourceError):
        download("movielens", tmp_path, url=server.url)
    server.cuts, server.etag = [], etag
    download("movielens", tmp_path, url=server.url)
    assert left_in(tmp_path) == COMPLETE


def test_a_complete_partial_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "data").write_bytes(ARCHIVE)
    (tmp_path / UNFINISHED / "version.json").write_text(f'{{"url": "{server.url}", "version": "\\"one\\""}}')
    download("movielens", tmp_path, url=server.url)
    assert server.ranges == [f"bytes={len(ARCHIVE)}-"]
    assert left_in(tmp_path) == COMPLETE


def test_a_second_download_at_the_same_time_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).mkdir()
    with (tmp_path / UNFINISHED / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another open file counts like another process
        with pytest.raises(ResourceError, match=r"in use by another process\. Wait for that `recmill download`"):
            download("movielens", tmp_path, url=server.url)
    assert server.ranges == []


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.content = zipped({**FILES, "ml-1m/README": "tampered with"})
    with pytest.raises(DataError, match=r"md5 [0-9a-f]{32}, expected [0-9a-f]{32}: corrupted on the way"):
        download("movielens", tmp_path, url=server.url)
    assert left_in(tmp_path) == []


def test_busy_servers_are_retried_and_missing_files_fail_at_once(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 429]
    download("movielens", tmp_path / "a", url=server.url)
    assert len(server.ranges) == 3
    server.failures, server.ranges = [404], []
    with pytest.raises(ResourceError, match=r"HTTP Error 404.*or download https://files\.grouplens\.org"):
        download("movielens", tmp_path / "b", url=server.url)
    assert len(server.ranges) == 1


@pytest.mark.parametrize(
    ("has_length", "length", "message"),
    [
        (True, None, "more than the 200 bytes"),
        (False, None, "does not say how long the file is"),
        (True, "abc", "the server gives the length 'abc'"),
        (True, "-5", "the server gives the length '-5'"),
    ],
)
def test_files_that_are_too_large_or_of_unknown_length_are_refused(
    server: Server,
    tmp_path: Path,
    has_length: bool,
    length: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.length = length
    source = replace(download_module.SOURCES["movielens"]["ml-1m"], max_bytes=200)
    monkeypatch.setitem(download_module.SOURCES["movielens"], "ml-1m", source)
    server.has_length = has_length
    with pytest.raises(DataError, match=message):
        download("movielens", tmp_path, url=server.url)
    assert left_in(tmp_path) == []


def with_link(name: str) -> bytes:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    buffer = io.BytesIO(zipped(FILES))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(info, "/etc")
    return buffer.getvalue()


def encrypted() -> bytes:
    """Mark the first member as encrypted, in its own header and in the directory of the archive."""
    content = bytearray(ARCHIVE)
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encrypted(), "'ml-1m/ratings.dat' is encrypted"),
        (zipped({**FILES, "../evil": "x"}), r"'\.\./evil' would leave its directory"),
        (zipped({**FILES, "/etc/evil": "x"}), "'/etc/evil' would leave"),
        (zipped({**FILES, "ml-1m\\..\\..\\evil": "x"}), "would leave"),
        (with_link("ml-1m/link"), "'ml-1m/link' would leave"),
        (zipped({"ml-1m/ratings.dat": "x"}), r"no ml-1m/movies\.dat, ml-1m/users\.dat, ml-1m/README in it"),
        (zipped({**FILES, "ml-1m/users.dat": "0" * 10**6}), r"1,000,\d+ bytes unpacked, 100,000 are allowed"),
        (b"<html>Please log in</html>", "not a complete zip file"),
        (ARCHIVE[:-30], "not a complete zip file"),
    ],
)
def test_archives_that_are_not_what_they_should_be_leave_nothing(
    server: Server, tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = content
    publish(monkeypatch, content)
    with pytest.raises(DataError, match=message):
        download("movielens", tmp_path / "raw", url=server.url)
    assert left_in(tmp_path) == []


def test_without_a_known_checksum_the_published_one_is_used_or_a_warning_logged(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.content = b"user_id,book_id,is_read,rating,is_reviewed\n"
    url = server.url.replace("ml-1m.zip", "goodreads_interactions.csv")
    with caplog.at_level(logging.WARNING):
        target = download("goodreads", tmp_path / "a", url=url)
    assert target.read_bytes() == server.content
    assert "so its content is unchecked" in caplog.text
    server.checksum = f"MD5 (goodreads_interactions.csv) = {'0' * 32}\n"
    with pytest.raises(DataError, match=f"expected {'0' * 32}"):
        download("goodreads", tmp_path / "b", url=url)
    server.checksum = hashlib.md5(server.content).hexdigest() + "  goodreads_interactions.csv\n"
    assert download("goodreads", tmp_path / "b", url=url).read_bytes() == server.content


@pytest.mark.parametrize("target", ["http://127.0.0.1:abc/f", "http://../f"])
def test_a_malformed_address_is_not_retried(server: Server, tmp_path: Path, target: str) -> None:
    server.failures, server.location = [302], target
    with pytest.raises(DataError, match=r"ml-1m\.zip: .* another copy with --url"):
        download("movielens", tmp_path, url=server.url)
    assert len(server.ranges) == 1
    assert left_in(tmp_path) == []


def test_what_a_kill_after_the_last_rename_left_is_removed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / UNFINISHED

    def unpacked_and_killed(*arguments: Any) -> None:
        unpack(*arguments)
        raise KeyboardInterrupt

    unpack = download_module._unpack
    monkeypatch.setattr(download_module, "_unpack", unpacked_and_killed)
    with pytest.raises(KeyboardInterrupt):
        download("movielens", tmp_path, url=server.url)
    assert unfinished.is_dir()
    download("movielens", tmp_path, url=server.url)
    assert [path.name for path in tmp_path.iterdir()] == ["ml-1m"]


def publish_days(monkeypatch: pytest.MonkeyPatch, days: dict[str, bytes]) -> None:
    """Make `days` all of Criteo's logs."""
    known = download_module.SOURCES["criteo"]
    sources = {day: replace(known[day], md5=hashlib.md5(content).hexdigest()) for day, content in days.items()}
    monkeypatch.setitem(download_module.SOURCES, "criteo", sources)


def test_criteo_s_days_come_from_a_mirror_and_resume_where_they_stopped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = {day: gzip.compress(f"{day}\n".encode() * 50) for day in ("day_0", "day_1", "day_2")}
    publish_days(monkeypatch, days)
    server.contents = {f"/logs/{day}.gz": content for day, content in days.items()}
    mirror = server.url.replace("ml-1m.zip", "logs/")
    server.cuts = [1000, 10, *[0] * 20]  # day_0 arrives; day_1 breaks after 10 bytes, and the server stays broken
    with pytest.raises(ResourceError, match=r"logs/day_1\.gz: connection closed at 10 of .* Run it again to resume"):
        download("criteo", tmp_path / "raw", url=mirror)
    assert left_in(tmp_path / "raw") == [
        *(f".day_1.gz.unfinished/{file}" for file in ("data", "lock", "version.json")),
        "day_0.gz",
    ]
    server.cuts, server.ranges = [], []
    assert download("criteo", tmp_path / "raw", url=mirror) == tmp_path / "raw"
    assert server.ranges == ["bytes=10-", None]  # the rest of day_1, then day_2; day_0 was there
    assert left_in(tmp_path / "raw") == ["day_0.gz", "day_1.gz", "day_2.gz"]
    assert {day: (tmp_path / "raw" / f"{day}.gz").read_bytes() for day in days} == days
    one = download("criteo", tmp_path / "one", variant="day_2", url=mirror.rstrip("/"))
    assert (one, left_in(tmp_path / "one")) == (tmp_path / "one" / "day_2.gz", ["day_2.gz"])


def test_a_day_that_changes_while_it_is_downloaded_is_never_mixed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server also ignores ranges, and its first file is not Criteo's."""
    right, wrong = gzip.compress(b"right" * 100), gzip.compress(b"wrong" * 100)
    publish_days(monkeypatch, {"day_0": right})
    server.contents = {"/day_0.gz": wrong}
    server.cuts = [20, *[0] * 20]
    mirror = server.url.replace("/ml-1m.zip", "")
    with pytest.raises(ResourceError, match="closed at 20 of"):
        download("criteo", tmp_path, url=mirror)
    server.contents, server.etag, server.cuts = {"/day_0.gz": right}, '"two"', []
    assert download("criteo", tmp_path, url=mirror).read_bytes() == right
    (tmp_path / "day_0.gz").unlink()
    server.contents = {"/day_0.gz": wrong}
    with pytest.raises(DataError, match=r"md5 .*: corrupted on the way, or another file"):
        download("criteo", tmp_path, url=mirror)
    assert left_in(tmp_path) == []


def test_an_unreachable_server_is_one_error_with_manual_steps(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"refused.*or download https://mcauleylab.* to .*csv\."):
        download("goodreads", tmp_path, url="http://127.0.0.1:1/goodreads_interactions.csv")
    assert left_in(tmp_path) == []


def test_mistakes_are_reported_before_any_work(tmp_path: Path, run_cli: RunCli) -> None:
    with pytest.raises(ConfigError, match=r"unknown download 'movielense'\. Did you mean 'movielens'"):
        download("movielense", tmp_path)
    with pytest.raises(ConfigError, match="unknown variant of movielens 'ml-2m'"):
        download("movielens", tmp_path, variant="ml-2m")
    for url in (
        "file:///etc/passwd",
        "http://",
        "http://host:abc/f",
        "http://[::1/f",
        "http://host/a b",
        "http://h\u00f6st/f",
    ):
        with pytest.raises(ConfigError, match=rf"--url {re.escape(url)}: expected an address like https://host/file"):
            download("movielens", tmp_path, url=url)
    (tmp_path / "ml-1m").mkdir()
    with pytest.raises(DataError, match="ml-1m exists, without all of"):
        download("movielens", tmp_path)
    done = run_cli("download", "goodreads", "--variant", "ml-1m", "--output", tmp_path)
    assert done.returncode == 2
    assert "unknown variant of goodreads 'ml-1m'" in done.stderr


def test_the_command_line_offers_what_there_is(run_cli: RunCli) -> None:
    text = run_cli("download", "--help").stdout
    for name, variants in download_module.SOURCES.items():
        shown = variants if name != "criteo" else ["day_0 to day_23"]
        assert all(word in " ".join(text.split()) for word in (name, *shown))
