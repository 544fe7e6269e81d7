"""The flags of commands, made from the fields of their `Options`."""

import importlib
import typing
from typing import Any

import click
from annotated_types import Gt


class Command(click.Command):
    """A command that also has the fields of `Options` in its module as flags. The module is imported for them."""

    _has_flags = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self._has_flags:
            module = f"recmill.commands.{(self.name or '').replace('-', '_')}"
            self.params += flags(importlib.import_module(module).Options)
            self.params.sort(key=lambda parameter: parameter.name == "as_json")  # --json comes last in the help
            self._has_flags = True
        return super().get_params(ctx)


def flags(options: Any) -> list[click.Option]:
    """Return the flags of the fields, those of the class itself before those of its bases, which are rarely needed."""
    own = vars(options).get("__annotations__", {})
    fields = sorted(options.model_fields.items(), key=lambda field: field[0] not in own)
    return [_option(field.alias or name, field) for name, field in fields]


def _option(name: str, field: Any) -> click.Option:
    """Return the flag of a field of an `Options` class.

    The values of a list are separated by commas, but a flag of type `list[str]` is repeated. The field's
    `json_schema_extra` may hold other "flags" than the field's name, and a "metavar".
    """
    extra = field.json_schema_extra or {}
    kind = _without_none(field.annotation)
    is_repeated = field.annotation == list[str]
    default = field.default
    if isinstance(default, list) and not is_repeated:
        default = ",".join(map(str, default))
    return click.Option(
        [name, *extra.get("flags", [f"--{name.replace('_', '-')}"])],
        type=str if is_repeated else _click_type(kind, field),
        multiple=is_repeated,
        is_flag=True if kind is bool else None,  # False would mean that the value may be left out
        **({"required": True} if field.is_required() else {"default": default}),
        show_default=not is_repeated,
        metavar=extra.get("metavar"),
        help=field.description,
    )


def _without_none(annotation: Any) -> Any:
    """Return the type without None and without constraints."""
    if type(None) in typing.get_args(annotation):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _click_type(kind: Any, field: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return _CommaList(int if _without_none(typing.get_args(kind)[0]) is int else str)
    is_positive = kind is int and Gt(0) in field.metadata
    return click.IntRange(min=1) if is_positive else kind


class _CommaList(click.ParamType):
    def __init__(self, kind: type[int] | type[str]) -> None:
        self.name = "INTEGERS" if kind is int else "NAMES"
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int | str]:
        try:
            return [self._kind(part.strip()) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r}: expected integers separated by commas, like 10,1000,50000.", param, ctx)
