"""Listing, showing and copying the configs that come with Recmill."""

from pathlib import Path

import pytest

from recmill.commands.configs import copy_config, list_configs, show_config
from recmill.config import load_config
from recmill.errors import ConfigError

from ..conftest import REPO, RunCli

DLRM = REPO / "configs" / "quickstart" / "dlrm.toml"


def test_every_config_of_the_repository_is_listed_with_a_summary() -> None:
    files = (REPO / "configs").rglob("*.toml")
    assert list_configs().keys() == {str(file.relative_to(REPO / "configs"))[:-5] for file in files}
    assert all(0 < len(summary) <= 52 for summary in list_configs().values())
    assert not [summary for summary in list_configs().values() if "..." in summary]


@pytest.mark.parametrize("name", ["quickstart/dlrm", "configs/quickstart/dlrm.toml"])
def test_a_config_is_shown_as_it_is(name: str) -> None:
    assert show_config(name) == DLRM.read_text(encoding="utf-8")


def test_an_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'quickstart/dlrm'\?"):
        show_config("quickstart/dlmr")


def test_a_copy_is_made_in_a_directory_or_as_a_file_and_overwrites_nothing(tmp_path: Path) -> None:
    assert copy_config("quickstart/dlrm", tmp_path) == tmp_path / "dlrm.toml"
    assert copy_config("quickstart/dlrm", tmp_path / "own.toml").read_bytes() == DLRM.read_bytes()
    with pytest.raises(ConfigError, match=r"dlrm\.toml exists"):
        copy_config("quickstart/dlrm", tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        copy_config("quickstart/dlrm", tmp_path / "absent" / "own.toml")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dlrm.toml", "own.toml"]


def test_a_config_is_loaded_by_its_name_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart/dlrm") == load_config(DLRM)
    with pytest.raises(ConfigError, match="The config that comes with Recmill is called quickstart/dlrm"):
        load_config("configs/quickstart/dlrm.toml")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "dlrm").write_text('[data]\npath = "own"\n[model]\nname = "dcnv2"\n')
    assert load_config("quickstart/dlrm").settings.data.path == "own"


def test_the_command_prints_names_and_texts(run_cli: RunCli, tmp_path: Path) -> None:
    assert "quickstart/dlrm " in run_cli("configs", "list").stdout
    assert run_cli("configs", "show", "quickstart/dlrm").stdout == DLRM.read_text(encoding="utf-8")
    assert run_cli("configs", "copy", "quickstart/dlrm").stdout == "dlrm.toml\n"
    assert (tmp_path / "dlrm.toml").is_file()
    refused = run_cli("configs", "copy", "quickstart/dlrm")
    assert (refused.returncode, refused.stderr) == (
        2,
        "recmill: config error: dlrm.toml exists. Choose another destination, or move it away.\n",
    )
