"""Raw logs that many unit tests share."""

from pathlib import Path

import pytest

from ..criteo_raw import DAYS, write_days


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of a Criteo log, of 300, 257 and 201 rows."""
    directory = tmp_path_factory.mktemp("logs") / "raw"
    write_days(directory, DAYS, smallest=-1)
    return directory
