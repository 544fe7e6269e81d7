"""Keyword arguments or command-line flags -> a validated `Options` model."""

import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from recmill.config.load import plain
from recmill.config.sections import Section
from recmill.errors import ConfigError, as_user_error
from recmill.registry import unknown

_MAX_SIZE_CHARACTERS = 50
OptionsT = TypeVar("OptionsT", bound=Section)


def given_path(path: str | Path, what: str) -> Path:
    """Return the path. An empty one, as from an unset shell variable, would mean the current directory."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{what}: expected str or Path, got {path!r}.")
    if not str(path):
        raise ConfigError(f"{what} is empty. Give a path; the current directory is '.'.")
    try:
        Path(path).stat()
    except OSError as error:
        if isinstance(known := as_user_error(error), ConfigError):  # too long, or a link that leads back to itself
            raise ConfigError(f"{what} {known}") from error
    return Path(path)


def checked_options(command: str, options_class: type[OptionsT], options: dict[str, Any]) -> OptionsT:
    """Validate the options of `command`; one ConfigError names every problem by its flag."""
    if empty := [key for key, value in options.items() if value == ""]:
        raise ConfigError(f"--{empty[0].replace('_', '-')} is empty. Give it a value, or leave it out.")
    try:
        return options_class.model_validate_json(json.dumps(options, default=plain))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = str(problem["loc"][0]) if problem["loc"] else "options"
            if problem["type"] == "value_error":
                lines.append(str(problem["ctx"]["error"]))
            elif problem["type"] == "extra_forbidden":
                fields = options_class.model_fields.items()
                lines.append(unknown(f"option of {command}", key, [field.alias or name for name, field in fields]))
            elif problem["type"] == "missing":
                lines.append(f"--{key.replace('_', '-')} is missing.")
            elif problem["type"] == "list_type" and isinstance(problem["input"], str | int):
                lines.append(f"--{key.replace('_', '-')}: give a list, like {[problem['input']]!r}.")
            else:
                message = problem["msg"].replace("Input should be", "should be")
                lines.append(f"--{key.replace('_', '-')}: {message}, got {problem['input']!r}.")
        raise ConfigError("\n".join(lines)) from None


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size like 4GB, 512 MB or 1.5GiB; `option` names it in the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or len(text) > _MAX_SIZE_CHARACTERS:
        raise ConfigError(f"{option} {text[:_MAX_SIZE_CHARACTERS]!r}: expected a size like 4GB or 512MB.")
    number, unit, binary = match.groups()
    exponent = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** exponent)
