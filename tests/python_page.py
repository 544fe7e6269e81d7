"""The signatures in docs/python.md, made from the functions themselves: python -m tests.python_page writes them."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import recmill

from .conftest import REPO

PAGE = REPO / "docs" / "python.md"
_BLOCK = re.compile(r"(?m)^### `([\w.]+)`\n\n```text\n.*?^```\n", flags=re.S)


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions, and the methods of `Run`, by the names that the page gives them."""
    found = {name: getattr(recmill, name) for name in recmill.__all__ if name != "Run"}
    methods = [name for name, _ in inspect.getmembers(recmill.Run, inspect.isfunction) if not name.startswith("_")]
    return found | {f"Run.{name}": getattr(recmill.Run, name) for name in methods}


def signature(name: str) -> str:
    """Return a function's signature as a user writes it."""
    function = functions()[name]
    parameters = [*_parameters(function)]
    returned = _type(inspect.signature(function).return_annotation)
    line = f"{name}({', '.join(parameters)}) -> {returned}"
    return (
        line if len(line) <= 100 else "\n    ".join([f"{name}(", *(f"{p}," for p in parameters)]) + f"\n) -> {returned}"
    )


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    declared = inspect.signature(function).parameters.values()
    is_marked = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in declared)
    for parameter in declared:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_KEYWORD:  # options of `prepare`: each dataset has its own
            yield "**options"
            return
        if parameter.kind is parameter.KEYWORD_ONLY and not is_marked:
            yield "*"
            is_marked = True
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"{star}{parameter.name}: {_type(parameter.annotation)}{default}"


def _type(annotation: Any) -> str:
    text = inspect.formatannotation(annotation) if not isinstance(annotation, str) else annotation
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
    return re.sub(r"Optional\[(.*)\]$", r"\1 | None", text)


def page(text: str) -> str:
    """Return the page with the signatures of now."""
    return _BLOCK.sub(lambda found: f"### `{found[1]}`\n\n```text\n{signature(found[1])}\n```\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
