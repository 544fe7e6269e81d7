import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recmill.kernels import library as module
from recmill.kernels.library import KernelLibrary, load_library


def test_a_missing_compiler_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    module._load_or_warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
        assert load_library() is None
    (record,) = caplog.records
    assert "no C++ compiler (CXX, g++, c++, clang++)" in record.message
    assert "twice as long" in record.message


def test_the_output_of_a_failing_compiler_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    module._load_or_warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
    assert "cannot find -lgomp" in caplog.text


@pytest.fixture
def copying_compiler(library: KernelLibrary, tmp_path: Path) -> Path:
    """Copies the library that the real compiler made to the path in its last argument."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\ncp {library.path} "$last"\n')
    compiler.chmod(0o755)
    return compiler


def test_kernels_that_this_cpu_cannot_run_are_refused_and_not_tried_again(
    copying_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    for _ in range(2):
        module._load_or_warn.cache_clear()
        caplog.clear()
        assert load_library() is None
        assert (
            "cannot be used here: a trial run was killed by SIGILL: this CPU, or its hypervisor, lacks" in caplog.text
        )
        assert "Set train.kernels=torch" in caplog.text
        monkeypatch.delenv("RECMILL_FAIL", raising=False)  # it would work now, but the refusal is cached
    (cached,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert cached.suffix == ".txt"


def test_kernels_that_passed_their_trial_are_not_tried_again(
    copying_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    module._load_or_warn.cache_clear()
    assert load_library() is not None
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    module._load_or_warn.cache_clear()
    assert load_library() is not None


def test_processes_that_compile_at_the_same_time_share_one_file(tmp_path: Path) -> None:
    code = "from recmill.kernels.library import load_library; assert load_library() is not None"
    environment = {**os.environ, "HOME": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    (cached,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert cached.suffix == ".so"
