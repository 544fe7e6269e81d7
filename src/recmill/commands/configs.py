"""`recmill configs`: list, show or copy the run configs that come with Recmill."""

import textwrap
from pathlib import Path

from recmill.config.shipped import shipped_config, shipped_configs
from recmill.errors import ConfigError
from recmill.files.atomic import write_text

_SUMMARY_WIDTH = 52  # with the longest name, 80 columns


def list_configs() -> dict[str, str]:
    """Return what each config is for, in a few words, by its name."""
    return {name: _summary(file) for name, file in shipped_configs().items()}


def show_config(name: str) -> str:
    return shipped_config(name).read_text(encoding="utf-8")


def copy_config(name: str, destination: str | Path = ".") -> Path:
    """Copy a config to a new file or into a directory, and return its path."""
    file = shipped_config(name)
    path = Path(destination)
    path = path / file.name if path.is_dir() else path
    if path.exists():
        raise ConfigError(f"{path} exists. Choose another destination, or move it away.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such directory. Make it first, or choose another destination.")
    write_text(path, file.read_text(encoding="utf-8"))
    return path


def _summary(file: Path) -> str:
    """Return the first sentence of the comment at the top of a config."""
    lines = [line.removeprefix("#") for line in file.read_text(encoding="utf-8").splitlines()[:2]]
    sentence = " ".join(" ".join(lines).split()).partition(". ")[0].removesuffix(".")
    return textwrap.shorten(sentence, _SUMMARY_WIDTH, placeholder=" ...")
