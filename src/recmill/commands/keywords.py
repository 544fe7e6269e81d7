"""Wrong keyword arguments of public functions: an error that names what was meant, as for flags."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from recmill.config import config_keys, meant_keys
from recmill.errors import ConfigError
from recmill.registry import unknown

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def checked_keywords(function: CallableT) -> CallableT:
    """Return the function, or the class with its methods, so that an unknown keyword argument is a ConfigError."""
    if inspect.isclass(function):
        for name, method in [*vars(function).items()]:
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(function, name, checked_keywords(method))
        return function

    known = _keywords(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for name, value in named.items():
            if name not in known:
                raise ConfigError(_message(function.__name__, name, value, known))
        return function(*arguments, **named)

    return typing.cast(CallableT, call)


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments, also of those in a TypedDict: `**options: Unpack[Options]`."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = typing.get_args(parameter.annotation)
            names += options.__annotations__
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "self":
            names.append(parameter.name)
    return names


def keys_instead(name: str, known: list[str]) -> list[str]:
    """Return the keys of the config that an unknown name resembles more than it resembles a known one."""
    near = meant_keys(name, [*known, *config_keys()])
    return [] if {*near} & {*known} else near


def _message(function: str, name: str, value: Any, known: list[str]) -> str:
    if "overrides" in known and (keys := keys_instead(name, known)):
        meant = " or ".join(f'overrides={{"{key}": {value!r}}}' for key in keys)
        return (
            f"unknown argument of {function} '{name}'. Keys of the config go to overrides: {meant}. "
            f"Arguments: {', '.join(known)}."
        )
    return unknown(f"argument of {function}", name, known)
