import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from recmill.observe import log as log_module
from recmill.observe.log import log_to_file, quiet_libraries


def test_a_warning_of_a_library_is_no_error_in_a_process_of_ours() -> None:
    code = "import warnings\nfrom recmill.observe.log import set_up_console\nset_up_console()\n"
    code += "warnings.warn('old', DeprecationWarning)"
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_quiet_libraries_hides_warnings_that_no_user_can_act_on_within_its_block_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_libraries():
            warnings.warn("torch will rename this", FutureWarning, stacklevel=1)
            warnings.warn("fbgemm::dense_embedding_codegen_lookup_function: no autograd", UserWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
            logging.getLogger("torchrec").warning("internals")
            logging.getLogger("torchrec").error("a failure")
        warnings.warn("the user's own", FutureWarning, stacklevel=1)
        logging.getLogger("torchrec").warning("seen again")
    assert [str(warning.message) for warning in caught] == ["something else", "the user's own"]
    assert caplog.messages == ["a failure", "seen again"]


def test_a_path_of_any_bytes_can_be_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_file(tmp_path, rank=0)
    record = logging.makeLogRecord({"msg": os.fsdecode(b"/data/caf\xe9"), "levelname": "WARNING"})
    logging.getLogger().handlers[-1].handle(record)  # not by a logger: pytest cannot send such a line between processes
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("WARNING /data/caf\\udce9\n")
    assert "Logging error" not in capsys.readouterr().err


def test_a_log_file_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log_to_file(tmp_path, rank=0)
    for number in range(3):
        logging.getLogger("recmill").info("line %d", number)
    (tmp_path / "next").mkdir()
    log_to_file(tmp_path / "next", rank=0)
    logging.getLogger().handlers.pop().close()
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 1
    assert said.startswith(f"{tmp_path / 'log.txt'}: cannot be written")
    assert "Traceback" not in said


def test_lines_of_a_run_hold_no_control_characters(tmp_path: Path) -> None:
    log_to_file(tmp_path, rank=0)
    logging.getLogger("recmill").error("%s is a path\nof two lines", "a\x1b]0;title\x07")
    assert (tmp_path / "log.txt").read_text().endswith("ERROR a\\x1b]0;title\\x07 is a path\nof two lines\n")


def test_a_record_may_have_a_shorter_text_or_none_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO())
    monkeypatch.setattr(log_module, "CONSOLE", console)
    log_to_file(tmp_path, rank=0)
    handler = log_module._ConsoleHandler()
    log = logging.getLogger("recmill")
    log.addHandler(handler)
    try:
        log.info("checkpoint committed step=5", extra={"console": "saved step 5"})
        log.info("step 5  loss 0.5", extra={"console": ""})
        log.info("for both")
        log.warning("half of the rows are missing")
    finally:
        log.removeHandler(handler)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "saved step 5\nfor both\nwarning: half of the rows are missing\n"
    in_file = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert in_file == [
        *("INFO checkpoint committed step=5", "INFO step 5  loss 0.5", "INFO for both"),
        "WARNING half of the rows are missing",
    ]
