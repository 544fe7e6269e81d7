"""Wrong arguments of public functions: an error that names what was meant, as for flags."""

import functools
import inspect
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from recmill import errors
from recmill.config import Section, config_keys, meant_keys
from recmill.data.frames import is_frame
from recmill.errors import ConfigError, UserError
from recmill.registry import unknown

_ACCEPTED: dict[Any, Any] = {int: numbers.Integral, Path: os.PathLike}
_FLAGS = {  # that are not spelled like their arguments
    "overrides": "set", "histories": "history", "ks": "k", "protocols": "protocol", "per_user_file": "per_user"
}  # fmt: skip
# A suggested command, which keeps its flags, or a flag
_COMMAND_OR_FLAG = re.compile(r"\brecmill [a-z-]+ .*?(?=\.?$|\. |\n)|(?<![\w-])--[a-z][a-z-]*")
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def checked_keywords(function: CallableT) -> CallableT:
    """Make a function, or a class's methods, raise a ConfigError for unknown keywords and values of wrong types."""
    if inspect.isclass(function):
        for name, method in [*vars(function).items()]:
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(function, name, checked_keywords(method))
        return function

    signature = full_signature(function)
    known = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_POSITIONAL and name != "self"]
    parameters = inspect.signature(function).parameters
    kinds = {name: found for name, parameter in parameters.items() if (found := _classes(parameter.annotation))}

    @named_arguments
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for name, value in named.items():
            if name not in known:
                raise ConfigError(_message(function.__name__, name, value, known))
        for name, value in {**dict(zip(parameters, arguments, strict=False)), **named}.items():
            accepted = tuple(_ACCEPTED.get(kind, kind) for kind in kinds.get(name, (object,)))
            if not isinstance(value, accepted) and not is_frame(value):  # functions say more about frames
                expected = " or ".join(kind.__name__ for kind in kinds[name] if kind is not type(None))
                raise ConfigError(f"{name}: expected {expected}, got {value!r}.")
        return function(*arguments, **named)

    return typing.cast(CallableT, call)


def named_arguments(function: CallableT) -> CallableT:
    """Give a function its full signature, if defaults are known, and let its errors name arguments instead of flags."""
    signature = full_signature(function)
    flags = {name: name.replace("_", "-") for name in signature.parameters}
    known = {f"--no-{flag}": f"`{name}=False`" for name, flag in flags.items()}
    known |= {f"--{_FLAGS[name]}": f"`{name}`" for name in flags if name in _FLAGS}
    known |= {f"--{flag}": f"`{name}`" for name, flag in flags.items()}

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except UserError as error:
            if not errors.names_flags:
                text = _COMMAND_OR_FLAG.sub(lambda found: known.get(found[0], found[0]), str(error))
                error.args = (text,)
            raise

    if all(parameter.default is not ... for parameter in signature.parameters.values()):
        call.__signature__ = signature  # type: ignore[attr-defined]
    return typing.cast(CallableT, call)


def full_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature with the keyword arguments in a TypedDict: `**options: Unpack[Options]`.

    Their defaults are those of the Section beside the TypedDict that has them; without one, the default is `...`.
    """
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        (declared,) = typing.get_args(parameter.annotation)
        hints = typing.get_type_hints(declared)
        beside = vars(sys.modules[declared.__module__]).values()
        sections = (kind.model_fields for kind in beside if inspect.isclass(kind) and issubclass(kind, Section))
        fields = next((found for found in sections if hints.keys() <= found.keys()), {})
        for name, annotation in hints.items():
            default = fields[name].get_default(call_default_factory=True) if fields else ...
            parameters.append(
                parameter.replace(name=name, kind=parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    return signature.replace(parameters=parameters)


def _classes(annotation: Any) -> tuple[type, ...]:
    """Return the classes of an annotation like `int | None`, or nothing if values of it are not checked."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    is_checked = all(map(inspect.isclass, kinds)) and not {bool, inspect.Parameter.empty} & {*kinds}
    return kinds if is_checked else ()


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
