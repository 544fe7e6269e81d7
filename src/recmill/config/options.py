"""Keyword arguments or command-line flags -> a validated `Options` model."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from recmill.config.load import plain
from recmill.config.sections import Section
from recmill.errors import ConfigError
from recmill.registry import unknown

OptionsT = TypeVar("OptionsT", bound=Section)


def checked_options(command: str, options_class: type[OptionsT], options: dict[str, Any]) -> OptionsT:
    """Validate the options of `command`; one ConfigError names every problem by its flag."""
    try:
        return options_class.model_validate_json(json.dumps(options, default=plain))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = str(problem["loc"][0]) if problem["loc"] else "options"
            if problem["type"] == "value_error":
                lines.append(str(problem["ctx"]["error"]))
            elif problem["type"] == "extra_forbidden":
                lines.append(unknown(f"option of {command}", key, options_class.model_fields))
            else:
                message = problem["msg"].replace("Input should be", "should be")
                lines.append(f"--{key.replace('_', '-')}: {message}, got {problem['input']!r}.")
        raise ConfigError("\n".join(lines)) from None
