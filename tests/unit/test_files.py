"""Writing, locking and digesting files. Directories that replace others: tests/unit/test_every_failpoint.py."""

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from recmill.errors import ConfigError, ResourceError
from recmill.files.atomic import new_directory, new_file, remove_leftovers, write_json, write_synced, write_text
from recmill.files.digests import digest
from recmill.files.locks import exclusive_lock


def gone_process() -> int:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_text(file, "old")
    write_json(file, {"b": [1]})
    assert file.read_text() == '{\n "b": [\n  1\n ]\n}\n'
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_names_the_file_and_leaves_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path / "a.json", "text")
    assert caught.value.filename == str(tmp_path / "a.json")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as full:
        write_text(tmp_path / "b.json", "text")
    assert full.value.filename == str(tmp_path / "b.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_disk_that_is_full_prevents_no_lock(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            exclusive_lock(tmp_path / "lock", ""),
            pytest.raises(ResourceError, match=r"in use by another process. Wait"),
            exclusive_lock(tmp_path / "lock", "Wait."),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_text_is_written_before_it_is_synced(tmp_path: Path) -> None:
    seen: list[str] = []
    write_synced(tmp_path / "a", "text", lambda: seen.append((tmp_path / "a").read_text()))
    assert seen == ["text"]


@pytest.mark.parametrize("new", [new_file, new_directory])
def test_a_block_that_fails_leaves_the_old_one(new: object, tmp_path: Path) -> None:
    assert callable(new)
    output = tmp_path / "parent" / "output"
    with new(output) as partial:
        assert partial.exists()
        assert not output.exists()
    before = output.stat().st_ino
    with pytest.raises(KeyError), new(output) as partial:
        raise KeyError
    assert output.stat().st_ino == before
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("device", ["/dev/null", "/dev/stdout", "pipe"])
def test_a_file_does_not_replace_a_device_or_a_pipe(device: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    output = tmp_path / device
    before = output.lstat()
    for new in (new_file, new_directory):
        with pytest.raises(ConfigError, match="is a device or pipe"), new(output):
            pytest.fail("the work began")
    with pytest.raises(ConfigError, match="is a device or pipe"):
        write_text(tmp_path / "pipe", "")  # not a device, which a failure of this test would replace
    assert (output.lstat().st_ino, output.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_file_cannot_replace_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output in (Path(), tmp_path):
        with pytest.raises(IsADirectoryError), new_file(output):
            pytest.fail("the work began")
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="file"), new_file(tmp_path / "file" / "output"):
        pass


def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    output, gone = tmp_path / "output", gone_process()
    (tmp_path / f".output.partial-{gone}").touch()
    (tmp_path / f".output.partial-{os.getpid()}").touch()
    (tmp_path / f".output.old-{gone}").mkdir()
    remove_leftovers(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".output.partial-{os.getpid()}", "output"]
    (tmp_path / f".output.old-{gone}").mkdir()
    remove_leftovers(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".output.partial-{os.getpid()}", "output"]


def test_a_lock_that_is_held_names_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    second = exclusive_lock(lock, "Wait.")
    expected = pytest.raises(ResourceError, match=rf"in use by process {os.getpid()} on .* since 20.*Z\. Wait\.")
    with exclusive_lock(lock, ""), expected, second:
        pass
    with exclusive_lock(lock, ""):  # it ended with the block
        assert lock.read_text().startswith(f"process {os.getpid()} on")


def test_a_digest_is_that_of_all_bytes(tmp_path: Path) -> None:
    content = os.urandom((1 << 22) + 5)
    (tmp_path / "file").write_bytes(content)
    blocks: list[int] = []
    assert digest(tmp_path / "file", lambda: blocks.append(1)) == xxhash.xxh3_128_hexdigest(content)
    assert len(blocks) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_that_is_renewed_replaces_locks_where_the_file_system_has_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)  # as Lustre without -o flock, and NFS without its lock service
    lock, owner = tmp_path / "lock", tmp_path / "lock.owner"
    second = exclusive_lock(lock, "Wait.")
    expected = pytest.raises(ResourceError, match=f"is in use by process {os.getpid()} on .* Wait.")
    with exclusive_lock(lock, ""), expected, second:
        pass
    assert caplog.text.count("has no locks") == 1  # not for each attempt of a process that waits
    assert not owner.exists()
    owner.write_text("process 1 on elsewhere")  # its owner was killed
    long_ago = time.time() - 100
    os.utime(owner, (long_ago, long_ago))
    with exclusive_lock(lock, ""):
        assert str(os.getpid()) in owner.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
