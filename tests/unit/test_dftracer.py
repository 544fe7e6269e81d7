"""DFTracer's variables, as the scripts that set them expect. Its files: test_timeline.py."""

import importlib.util
from pathlib import Path

import pytest

from recmill.launch.dftracer import files_log, recorded_files


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENABLE", "LOG_FILE", "DATA_DIR", "INC_METADATA", "BIND_SIGNALS"):
        monkeypatch.setenv(f"DFTRACER_{name}", "")  # what the code under test sets is removed afterwards
        monkeypatch.delenv(f"DFTRACER_{name}")


def test_files_are_recorded_only_if_asked_for_and_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files_log(tmp_path, 3) is None
    monkeypatch.setenv("DFTRACER_ENABLE", "1")
    assert files_log(tmp_path, 3) == str(tmp_path / "dft-3")
    assert files_log(None, 3) is None
    monkeypatch.setenv("DFTRACER_LOG_FILE", str(tmp_path / "results" / "trace"))
    assert files_log(None, 3) == str(tmp_path / "results" / "trace-rank3"), "matches trace-*.pfw"


@pytest.mark.skipif(importlib.util.find_spec("dftracer") is not None, reason="DFTracer is installed")
def test_without_dftracer_a_run_continues_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recorded_files(str(tmp_path / "trace"), [tmp_path]):
        pass
    assert caplog.messages == [
        "DFTRACER_ENABLE=1, but DFTracer is not installed: pip install dftracer. Files are not recorded."
    ]
