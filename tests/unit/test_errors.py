import errno
import subprocess
import sys
from pathlib import Path

import pytest

from recmill.errors import KINDS, DataError, as_user_error


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
        (MemoryError("12 GB"), "Out of memory (12 GB). There is not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "Out of memory (CUDA out of memory."),
    ],
)
def test_what_a_machine_can_cause_becomes_a_resource_error_with_a_remedy(error: Exception, expected: str) -> None:
    converted = as_user_error(error)
    assert converted is not None
    assert converted.exit_code == 5
    assert str(converted).startswith(expected)


def test_a_user_error_stays_as_it_is() -> None:
    error = DataError("no such row")
    assert as_user_error(error) is error


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EPIPE, "Broken pipe")])
def test_anything_else_is_an_internal_error(error: Exception) -> None:
    assert as_user_error(error) is None


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
    path: str, mode: str, remedy: str, tmp_path: Path
) -> None:
    """In a process that is not root's, for whom permissions do not count."""
    (tmp_path / "secret").mkdir()
    for name, permissions in (("secret/file", 0o644), ("unreadable", 0o200), ("readable", 0o444)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(permissions)
    (tmp_path / "secret").chmod(0o600)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    code = (
        "import os\n"
        "from recmill.errors import as_user_error\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        f"try: open({str(tmp_path / path)!r}, {mode!r})\n"
        "except OSError as error: print(as_user_error(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{tmp_path}/{remedy}")
