"""Wrong arguments of public functions: an error that names what was meant, as for flags."""

import functools
import inspect
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
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
_COMMAND = r"\brecmill [a-z-]+ .*?(?=\.?$|\. |\n)"  # one that is suggested keeps its flags
# In quotes, a number, KEY=VALUE, COLUMN, or up to a colon
_VALUE = r"'[^'\n]*'|\"[^\"\n]*\"|-?\d+(?:[.,]\d+)*(?!\w)|[\w.]+=[^\s]*[^\s.,;:]|[A-Z]{3,}\b|[^\s'\"`-][^\s'\"`]*(?=: )"
_QUOTES = ("'", '"')
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

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except UserError as error:
            if not errors.names_flags:
                error.args = (_with_arguments(str(error), signature.parameters),)
            raise

    if all(parameter.default is not ... for parameter in signature.parameters.values()):
        call.__signature__ = signature  # type: ignore[attr-defined]
    return typing.cast(CallableT, call)


def _with_arguments(text: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the text of an error with arguments and their values, like `k=3`, instead of flags, like --k 3."""
    kinds = {name.replace("_", "-"): (name, parameter.annotation) for name, parameter in parameters.items()}
    kinds = {_FLAGS[name]: (name, parameters[name].annotation) for name in _FLAGS if name in parameters} | kinds
    words = sorted({re.escape(word) for _, kind in kinds.values() for word in _choices(kind)})
    value = "|".join([_VALUE, *(rf"{word}(?![\w-])" for word in words)])

    def replaced(found: re.Match[str]) -> str:
        flag, rest = found["flag"], f" {found['value']}" if found["value"] else ""
        if flag in kinds:
            name, kind = kinds[flag]
            if bool in (kind, *typing.get_args(kind)):
                return f"`{name}=True`{rest}"
            return f"`{name}={_argument(name, kind, found['value'])}`" if rest else f"`{name}`"
        if flag and (on := kinds.get(flag.removeprefix("no-"))):
            return f"`{on[0]}=False`{rest}"
        return found[0]

    return re.sub(rf"{_COMMAND}|(?<![\w-])--(?P<flag>[a-z][a-z-]*)(?: (?P<value>{value}))?", replaced, text)


def _choices(annotation: Any) -> list[str]:
    """Return the texts of an annotation like `Literal["csv", "jsonl"] | None`."""
    if typing.get_origin(annotation) is typing.Literal:
        return [choice for choice in typing.get_args(annotation) if isinstance(choice, str) and choice.isidentifier()]
    return [choice for part in typing.get_args(annotation) for choice in _choices(part)]


def _argument(name: str, kind: Any, value: str) -> str:
    """Return the value of a flag as it is written in Python."""

    def literal(text: str) -> str:
        return text if text[0] in _QUOTES or re.fullmatch(r"-?\d+(\.\d+)?", text) else repr(text)

    key, _, of_key = value.partition("=")
    if name == "overrides" and of_key:
        return f"{{{key!r}: {literal(of_key)}}}"
    if "list[" in str(kind):
        return f"[{', '.join(map(literal, [value] if value[0] in _QUOTES else value.split(',')))}]"
    return literal(value)


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
