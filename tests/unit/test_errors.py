import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recmill.errors import KINDS, DataError, ResourceError, as_user_error, did_you_mean, did_you_mean_path


def test_exit_codes_stay_the_same() -> None:
    assert {name: kind.exit_code for name, kind in KINDS.items()} == {
        "UserError": 1,
        "ConfigError": 2,
        "DataError": 3,
        "CheckpointError": 4,
        "ResourceError": 5,
        "Preempted": 75,
        "Interrupted": 130,
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            "/data/x: No space left on device. The disk is full",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "Permission denied. Choose a directory that you may write",
        ),
        (OSError(errno.EFBIG, "File too large", "x"), "x: File too large. A file may not be that large here"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files. Too many files are open: raise the limit"),
        (OSError(errno.ENFILE, "Too many open files in system"), "Too many open files in system. The system has"),
        (RuntimeError("Resource temporarily unavailable"), "Resource temporarily unavailable. No process or"),
        (OSError(errno.ESTALE, "Stale file handle", "/nfs/x"), "/nfs/x: Stale file handle. The file server no longer"),
        (OSError(errno.ENOLCK, "No locks available", "x"), "x: No locks available. The file system has no locks"),
        (RuntimeError("Too many open files (os error 24)"), "Too many open files (os error 24). Too many files are"),
        (RuntimeError("write: No space left on device."), "write: No space left on device. The disk is full"),
        (RuntimeError("can't start new thread"), "can't start new thread. No process or thread"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc. There is not enough memory"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "libtorch_cpu.so: failed to map segment from shared object. There is not enough memory",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "[Errno 2] No usable temporary directory found in ['/tmp']. Free some space there, or set TMPDIR",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/.x.partial-7"),
            "/proc/.x.partial-7: No such file or directory. It was removed meanwhile, or cannot be made there",
        ),
        (MemoryError(), "Out of memory. There is not enough memory"),
        (MemoryError("12 GB"), "Out of memory (12 GB). There is not enough memory"),
        (RuntimeError("CUDA out of memory. Tried 2 GiB"), "CUDA out of memory. Tried 2 GiB. There is not"),
    ],
)
def test_what_a_machine_can_cause_becomes_a_resource_error_with_a_remedy(error: Exception, expected: str) -> None:
    converted = as_user_error(error)
    assert converted is not None
    assert converted.exit_code == 5
    assert str(converted).startswith(expected)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENAMETOOLONG, f"{'x' * 300}...: File name too long. Choose a shorter path."),
        (errno.ELOOP, f"{'x' * 300}...: Too many levels of symbolic links. A symbolic link in this path leads back"),
    ],
)
def test_a_path_that_cannot_exist_is_a_config_error(number: int, expected: str) -> None:
    converted = as_user_error(OSError(number, os.strerror(number), "x" * 5000))
    assert converted is not None
    assert converted.exit_code == 2
    assert str(converted).startswith(expected)


def test_failing_imports_are_blamed_on_memory_only_where_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SystemError("error return without exception set")
    monkeypatch.setattr("resource.getrlimit", lambda which: (640_000_000, -1))
    converted = as_user_error(error)
    assert isinstance(converted, ResourceError)
    assert "with at most 640 MB of address space. Raise the limit (ulimit -v)" in str(converted)
    monkeypatch.setattr("resource.getrlimit", lambda which: (640_000_000 if which == resource.RLIMIT_DATA else -1, -1))
    assert "with at most 640 MB of data. Raise the limit (ulimit -d)" in str(as_user_error(error))
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    assert as_user_error(error) is None


def test_a_user_error_stays_as_it_is() -> None:
    error = DataError("no such row")
    assert as_user_error(error) is error


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EPIPE, "Broken pipe")])
def test_anything_else_is_an_internal_error(error: Exception) -> None:
    assert as_user_error(error) is None


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that other users can enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("path", "mode", "remedy"),
    [
        ("secret/file", "rb", "secret/file: Permission denied. You may not read it"),
        ("unreadable", "rb", "unreadable: Permission denied. You may not read it"),
        ("readable", "ab", "readable: Permission denied. Choose a directory that you may write to"),
        ("new", "wb", "new: Permission denied. Choose a directory that you may write to"),
    ],
)
def test_missing_permission_to_read_or_write_has_its_own_remedy(
    path: str, mode: str, remedy: str, public_path: Path
) -> None:
    """In a process that is not root's, for whom permissions do not count."""
    (public_path / "secret").mkdir()
    for name, permissions in (("secret/file", 0o644), ("unreadable", 0o200), ("readable", 0o444)):
        (public_path / name).touch()
        (public_path / name).chmod(permissions)
    (public_path / "secret").chmod(0o600)
    code = (
        "import os\n"
        "from recmill.errors import as_user_error\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        f"try: open({str(public_path / path)!r}, {mode!r})\n"
        "except OSError as error: print(as_user_error(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{public_path}/{remedy}")


def test_names_and_paths_that_do_not_exist_get_the_nearest_one(tmp_path: Path) -> None:
    assert did_you_mean("User_ID", ["item_id", "user_id"]) == "Did you mean 'user_id'? "
    assert did_you_mean("zzz", ["item_id", "user_id"]) == ""
    (tmp_path / "runs" / "dlrm" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "sasrec").mkdir()
    assert did_you_mean_path(tmp_path / "runs" / "dlmr") == f"Did you mean '{tmp_path}/runs/dlrm'? "
    assert did_you_mean_path(tmp_path / "rusn" / "dlrm") == f"Did you mean '{tmp_path}/runs/dlrm'? "
    assert did_you_mean_path(tmp_path / "run" / "sasrec" / "checkpoints") == "", "runs/sasrec has none"
    assert did_you_mean_path(tmp_path / "xyz") == ""
    for name in ("a.csv", "log.csv", "log.toml"):
        (tmp_path / name).touch()
    assert did_you_mean_path(tmp_path / "none.csv") == "", "a suffix alone is no resemblance"
    assert did_you_mean_path(tmp_path / "lgo.toml") == f"Did you mean '{tmp_path}/log.toml'? "
