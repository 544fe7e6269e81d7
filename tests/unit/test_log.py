import logging
import warnings

import pytest

from recmill.observe.log import quiet_libraries


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
