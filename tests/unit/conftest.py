"""Raw logs, and a folder for plug-ins, that unit tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recmill import registry

from ..criteo_raw import DAYS, write_days


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of a Criteo log, of 300, 257 and 201 rows."""
    directory = tmp_path_factory.mktemp("logs") / "raw"
    write_days(directory, DAYS, smallest=-1)
    return directory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with an empty folder my_models; what a test imports is forgotten after it."""
    (tmp_path / "my_models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_plugins", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_models"]:
        del sys.modules[name]
