import logging
import os
import warnings
from pathlib import Path

import pytest

from recmill.observe.log import log_to_file, quiet_libraries


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
    logging.getLogger("recmill").warning("%s", os.fsdecode(b"/data/caf\xe9"))
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("WARNING /data/caf\\udce9\n")
    assert "Logging error" not in capsys.readouterr().err
