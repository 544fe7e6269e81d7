"""The run configs that come with Recmill: `configs/` of the repository, to which `recmill/configs` is a link."""

from pathlib import Path

from recmill.errors import ConfigError
from recmill.registry import unknown

_FOLDER = Path(__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """Return the files by name: quickstart/dlrm, ..."""
    return {str(file.relative_to(_FOLDER).with_suffix("")): file for file in sorted(_FOLDER.glob("*/*.toml"))}


def shipped_config(name: str) -> Path:
    """Return the file of a config, which may also be named as in the repository: configs/quickstart/dlrm.toml."""
    known = shipped_configs()
    short = name.removeprefix("configs/").removesuffix(".toml")
    if short not in known:
        raise ConfigError(unknown("config", short, known))
    return known[short]
