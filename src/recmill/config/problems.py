"""Check sections of a run config and describe each problem in a sentence that names its key."""

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from recmill import registry
from recmill.config.sections import Section, named_sections, subsection

SectionT = TypeVar("SectionT", bound=Section)
_MAX_LINES = 10  # of a report
_KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
# Words that people try, and the keys that they mean
_RATES = ["optim.dense.lr", "optim.tables.lr"]
_WORDS = {"data": ["data.path"], "dataset": ["data.path"], "model": ["model.name"], "learning_rate": _RATES}


@dataclass(frozen=True)
class Problem:
    text: str
    keys: tuple[str, ...]  # that it is about
    meant: Sequence[str] = ()  # the known keys that an unknown one resembles


def meant_keys(name: str, keys: Sequence[str]) -> list[str]:
    """Return those of the `keys` of a run config that `name` resembles most, like both learning rates for lr."""
    return _WORDS.get(name) or registry.nearest(name, keys)


def validated(
    cls: type[SectionT],
    values: Mapping[str, Any],
    prefix: str = "",
    siblings: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
) -> tuple[SectionT, list[Problem]]:
    """Return the section, where keys with a problem have their defaults, and the problems.

    `prefix`: the section's name in the config; `siblings`: other keys that the config may have there; `elsewhere`:
    the keys of all sections, one of which may be meant if the section was left out.
    """
    try:
        # Through JSON, pydantic is strict about types but accepts a list for a tuple.
        return cls.model_validate_json(json.dumps(values, default=str)), []
    except ValidationError as invalid:
        errors: Sequence[Mapping[str, Any]] = invalid.errors()
    problems: dict[tuple[str, ...], Problem] = {}
    for error in errors:
        problem = _problem(cls, error, prefix, siblings, elsewhere)
        if (
            error["type"] != "list_type" or problem.keys not in problems
        ):  # of `int | list[int]`, report the error of int
            problems[problem.keys] = problem
    return _without_problems(cls, values, [error["loc"] for error in errors]), list(problems.values())


def contradictions(sentences: Sequence[str], others: Sequence[Problem]) -> list[Problem]:
    """Return a problem for each sentence, unless it names a key that has a problem already."""
    doubtful = [key for other in others for key in (*other.keys, *other.meant)]
    found = [Problem(text, tuple(_KEY.findall(text))) for text in sentences]
    return [problem for problem in found if not any(concerns(problem, key) for key in doubtful)]


def contradictions_within(section: Section) -> Iterator[str]:
    """Yield the contradictions of a section and of the sections in it."""
    for name in type(section).model_fields:
        value = getattr(section, name, None)
        if isinstance(value, Section):
            yield from contradictions_within(value)
    if all(hasattr(section, name) for name in type(section).model_fields):  # no required key is missing
        yield from section.contradictions()


def concerns(problem: Problem, key: str) -> bool:
    """Return whether the problem is about `key`, a section around it, or a key within it."""
    return any(f"{key}.".startswith(f"{own}.") or own.startswith(f"{key}.") for own in problem.keys)


def report(name: str, problems: Sequence[Problem], origins: Mapping[str, str]) -> str:
    """Return one line per problem, each with its origin: the config's name, or that of an override, by its key."""

    def line(problem: Problem) -> str:
        if problem.text.startswith(("--set", "RECMILL__")):
            return problem.text
        origin = next((origin for key, origin in origins.items() if concerns(problem, key)), name)
        return f"{origin}: {problem.text}"

    lines = list(dict.fromkeys(map(line, problems)))
    if len(lines) == 1:
        return lines[0]
    rest = [f"and {len(lines) - _MAX_LINES:,} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([f"{len(lines)} problems in the config:", *(f"  {line}" for line in [*lines[:_MAX_LINES], *rest])])


def _without_problems(cls: type[SectionT], values: Any, problems: Sequence[tuple[Any, ...]]) -> SectionT:
    """Return the section without the values at the locations `problems`, which are relative to it."""
    values = values if isinstance(values, Mapping) else {}
    good: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        inside = [location[1:] for location in problems if location[:1] == (name,)]
        if section := subsection(field):
            good[name] = _without_problems(section, values.get(name, {}), [rest for rest in inside if rest])
        elif name in values and not inside:
            good[name] = values[name]
    return cast(SectionT, cls.model_construct(**good))  # mypy infers Section, not SectionT


def _problem(
    cls: type[Section], error: Mapping[str, Any], prefix: str, siblings: Sequence[str], elsewhere: Sequence[str]
) -> Problem:
    parent, field, location = _locate(cls, error["loc"])
    key = (prefix + ".".join(map(str, location))).rstrip(".")
    if error["type"] == "extra_forbidden":
        names = [*parent.model_fields, *(siblings if len(location) == 1 else [])]
        before = key[: len(key) - len(str(location[-1]))]
        known = [f"{before}{name}" for name in names]
        others = meant_keys(key, elsewhere) if elsewhere else []
        return Problem(registry.unknown("key", key, known, others), (key,), registry.nearest(key, known) or others)
    help_text = (field.description or "") if field else ""
    if error["type"] == "missing":
        return Problem(f"'{key}' is missing. {help_text}", (key,))
    if error["type"] == "value_error":
        return Problem(str(error["ctx"]["error"]), (key,))
    if error["type"] == "literal_error" and field:
        return Problem(
            f"'{key}': {registry.unknown('value', str(error['input']), _literals(field.annotation))}", (key,)
        )
    if error["type"] == "list_type" and isinstance(error["input"], str | int | float):
        return Problem(
            f"'{key}' is a list: write '{key}={_as_list(str(error['input']))}'. {help_text}".rstrip(), (key,)
        )
    message = error["msg"].replace("Input should be", "should be")
    message = re.sub(r"\d{16,}", lambda digits: f"{float(digits[0]):g}", message)  # a limit like 3e+38
    return Problem(f"'{key}': {message}, got {reprlib.repr(error['input'])}. {help_text}".rstrip(), (key,))


def _as_list(text: str) -> str:
    parts = [part.strip() for part in text.split(",")]
    is_numbers = all(re.fullmatch(r"-?[\d.]+(e-?\d+)?", part) for part in parts)
    return f"[{', '.join(parts)}]" if is_numbers else json.dumps(parts)


def _locate(cls: type[Section], location: Sequence[Any]) -> tuple[type[Section], FieldInfo | None, Sequence[Any]]:
    """Return the section that holds the key, its field if it is known, and the location as a user would write it."""
    field = None
    depth = 0
    while depth < len(location):
        field = cls.model_fields.get(location[depth])
        depth += 1
        section = subsection(field) if field else None
        if field and section is None and depth < len(location) and (section := named_sections(field)):
            depth += 1  # past the section's name
        if section is None:
            is_inside = field is not None and get_origin(field.annotation) in (list, dict)
            return cls, field, location if is_inside else location[:depth]  # the rest names a union's alternative
        cls = section
    return cls, field, location


def _literals(annotation: Any) -> list[str]:
    """Return the values of the Literal in a type such as `Literal[...] | None` or `dict[str, Literal[...]]`."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for inner in get_args(annotation) for value in _literals(inner)]
