"""TOML + `--set a.b=c` -> a frozen, checked Config. Every problem is reported at once."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
import xxhash
from pydantic import BaseModel, ValidationError

from recmill import registry
from recmill.config.sections import Section, Settings
from recmill.errors import ConfigError

# What may differ between a run and its continuation without making it another run: keys, or sections as a whole.
MAY_CHANGE_ON_RESUME = frozenset(
    [
        "data.path",  # the data itself is compared by its digest
        "data.limit_val_batches",
        "data.limit_test_batches",
        "data.prefetch",
        "data.multi_hot.collect_frequencies",
        "tables.store",
        "sharding",
        "train.device",
        "train.kernels",
        "train.num_epochs",
        "train.max_steps",
        "train.log_every_steps",
        "train.check_replicas_every",
        "train.stop_signals",
        "train.max_restarts",
        "train.hang_seconds",
        "eval.global_batch_size",
        "eval.every_steps",
        "eval.each_epoch",
        "eval.before_training",
        "eval.target_auroc",
        "eval.patience",
        "eval.protocols",
        "eval.ks",
        "checkpoint",
    ]
)


@dataclass(frozen=True)
class Config:
    """A checked run config: the model's name, its own section, and the common sections."""

    model_name: str
    model: Section
    settings: Settings

    def as_dict(self) -> dict[str, Any]:
        model = {"name": self.model_name, **self.model.model_dump(mode="json")}
        return {"model": model, **self.settings.model_dump(mode="json")}


@dataclass(frozen=True)
class _Problem:
    key: str
    text: str


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """`source`: a TOML file, or the same thing as a mapping. Defaults, then the file, then the overrides."""
    if isinstance(source, Mapping):
        name, values = "config", json.loads(json.dumps(source, default=plain))
    else:
        name, values = str(source), _read_toml(Path(source))
    overridden, problems = _apply_overrides(values, [overrides] if isinstance(overrides, str) else overrides)
    config, found = _check(values)
    problems += found
    if problems or config is None:
        raise ConfigError(_report(name, problems, overridden))
    return config


def plain(value: Any) -> Any:
    """What JSON does not know: NumPy's numbers, and paths."""
    return value.item() if hasattr(value, "item") else str(value)


def to_toml(config: Config) -> str:
    """Every key with its value, so that the file alone gives the same run."""
    return tomli_w.dumps(config.as_dict())


def differences(old: Config, new: Config) -> list[str]:
    """'key: old -> new' for everything that makes `new` another run than `old`."""
    before, after = flat(old.as_dict()), flat(new.as_dict())
    keys = [key for key in sorted(before.keys() | after.keys()) if not _may_change(key)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


def fingerprint(config: Config) -> str:
    """The same for configs that a run may go on with, also by a later version with more keys."""
    model = {"name": config.model_name, **config.model.model_dump(mode="json", exclude_defaults=True)}
    values = {"model": model, **config.settings.model_dump(mode="json", exclude_defaults=True)}
    fixed = {key: value for key, value in flat(values).items() if not _may_change(key)}
    return xxhash.xxh3_64_hexdigest(json.dumps(fixed, sort_keys=True).encode())


def _may_change(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in MAY_CHANGE_ON_RESUME)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name a run config (.toml); examples are in configs/.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory. Name the run config (.toml) itself.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> tuple[set[str], list[_Problem]]:
    overridden: set[str] = set()
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(
                _Problem(override, f"--set {override}: expected key=value, like --set optim.dense.lr=0.02.")
            )
            continue
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            child = place.setdefault(parent, {})
            if not isinstance(child, dict):
                problems.append(_Problem(key, f"'{parent}' in '--set {override}' is a value, not a section."))
                break
            place = child
        else:
            value = _parse_value(text.strip())
            if isinstance(value, dict) or isinstance(place.get(last), dict):
                problems.append(_Problem(key, f"--set {override}: '{key}' is a section: set its keys one by one."))
                continue
            place[last] = value
            overridden.add(key)
    return overridden, problems


def _parse_value(text: str) -> Any:
    """A TOML value; what is not one (an unquoted name, a path) is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text  # more than one: a line break in it


def _check(values: dict[str, Any]) -> tuple[Config | None, list[_Problem]]:
    common = {key: value for key, value in values.items() if key != "model"}
    settings, problems = _validated(Settings, common, "", extra_names=["model"])
    model_values = values.get("model")
    name = model_values.get("name") if isinstance(model_values, dict) else None
    model: Section | None = None
    if not isinstance(name, str):
        fact = "a [model] section with a name is missing" if name is None else f"expected text, got {name!r}"
        problems.append(_Problem("model.name", f"'model.name': {fact}. Known: {', '.join(sorted(registry.MODELS))}."))
    elif name not in registry.MODELS:
        problems.append(_Problem("model.name", f"'model.name': {registry.unknown('model', name, registry.MODELS)}"))
    else:
        model_settings = {key: value for key, value in (model_values or {}).items() if key != "name"}
        module = registry.load(registry.MODELS, name, "model")
        model, found = _validated(module.Config, model_settings, "model.", extra_names=["name"])
        problems += found
        if settings is not None and settings.eval.target_auroc and module.TASK != "ctr":
            problems.append(
                _Problem("eval.target_auroc", f"'eval.target_auroc': '{name}' is not measured by AUROC. Remove it.")
            )
    tables = values.get("tables")
    store = tables.get("store") if isinstance(tables, dict) else None
    if isinstance(store, str) and store not in registry.STORES:
        problems.append(
            _Problem("tables.store", f"'tables.store': {registry.unknown('store', store, registry.STORES)}")
        )
    if settings is None or model is None or problems:
        return None, problems
    return Config(model_name=str(name), model=model, settings=settings), []


def _validated(
    cls: type[Section], values: Mapping[str, Any], prefix: str, extra_names: list[str]
) -> tuple[Any, list[_Problem]]:
    try:
        # Through JSON: strict about types, yet a TOML list may fill a list of any kind.
        return cls.model_validate_json(json.dumps(values, default=str)), []
    except ValidationError as error:
        return None, [_problem(cls, dict(e), prefix, extra_names) for e in error.errors()]


def _problem(cls: type[Section], error: dict[str, Any], prefix: str, extra_names: list[str]) -> _Problem:
    loc = [str(part) for part in error["loc"]]
    key = prefix + ".".join(loc)
    if error["type"] == "extra_forbidden":
        section = _section_at(cls, loc[:-1])
        names = list(section.model_fields) + (extra_names if len(loc) == 1 else [])
        parent = key.rpartition(".")[0]
        full_names = [f"{parent}.{name}" if parent else name for name in names]
        return _Problem(key, registry.unknown("key", key, full_names))
    if error["type"] == "missing":
        return _Problem(key, f"'{key}' is missing. {_help(cls, loc)}")
    if error["type"] == "value_error":
        return _Problem(key, str(error["ctx"]["error"]))
    if error["type"] == "literal_error":
        allowed = _literals(cls, loc)
        return _Problem(key, f"'{key}': {registry.unknown('value', str(error['input']), allowed)}")
    message = error["msg"].replace("Input should be", "should be")
    return _Problem(key, f"'{key}': {message}, got {error['input']!r}. {_help(cls, loc)}".rstrip())


def _section_at(cls: type[BaseModel], loc: Sequence[str]) -> type[BaseModel]:
    for part in loc:
        annotation = cls.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        cls = annotation
    return cls


def _field(cls: type[BaseModel], loc: Sequence[str]) -> Any:
    """The field at `loc`, or the list or mapping that `loc` is in."""
    field = None
    for part in loc:
        field = cls.model_fields[part]
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            break
        cls = field.annotation
    return field


def _literals(cls: type[BaseModel], loc: Sequence[str]) -> list[str]:
    annotation = _field(cls, loc).annotation
    if get_origin(annotation) is not Literal:
        annotation = get_args(annotation)[-1]  # of a list's or a mapping's values
    return [str(value) for value in get_args(annotation)]


def _help(cls: type[BaseModel], loc: Sequence[str]) -> str:
    field = _field(cls, loc)
    return (field.description or "") if field is not None else ""


def _report(name: str, problems: list[_Problem], overridden: set[str]) -> str:
    def place(problem: _Problem) -> str:
        related = (k for k in overridden if f"{k}.".startswith(f"{problem.key}.") or problem.key.startswith(f"{k}."))
        return "--set" if any(related) else name

    lines = [f"{place(p)}: {p.text}" if not p.text.startswith("--set") else p.text for p in problems]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} problems in the config:\n" + "\n".join(f"  {line}" for line in lines)
