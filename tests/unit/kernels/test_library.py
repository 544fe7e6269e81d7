import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recmill.kernels import library as module
from recmill.kernels.library import load_library


def test_a_missing_compiler_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_COMPILERS", ("no-such-compiler",))
    module._load_or_warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
        assert load_library() is None
    (record,) = caplog.records
    assert "no C++ compiler (no-such-compiler)" in record.message
    assert "twice as long" in record.message


def test_the_output_of_a_failing_compiler_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(module, "_COMPILERS", (str(broken),))
    module._load_or_warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
    assert "cannot find -lgomp" in caplog.text


def test_processes_that_compile_at_the_same_time_share_one_file(tmp_path: Path) -> None:
    code = "from recmill.kernels.library import load_library; assert load_library() is not None"
    environment = {**os.environ, "HOME": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    (cached,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert cached.suffix == ".so"
