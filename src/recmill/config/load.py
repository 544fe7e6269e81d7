"""Load a run config: defaults, then a TOML file, then variables like RECMILL__TRAIN__SEED, then `--set key=value`.
All problems are reported at once.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tomli_w

from recmill import registry
from recmill.config.problems import Problem, contradictions, contradictions_within, report, validated
from recmill.config.sections import Section, Settings, config_keys
from recmill.config.shipped import shipped_configs
from recmill.config.suggested import own_config, resuming_command, training_command
from recmill.errors import ConfigError, did_you_mean, did_you_mean_path

Overrides = Sequence[str] | Mapping[str, Any]  # ["optim.dense.lr=0.02"] or {"optim.dense.lr": 0.02}, also nested
_MAX_BYTES = 10**6  # of a config file
_BY_TABLE = {".sharding.tables", ".tables.stores", ".tables.dynamic"}  # sections whose keys are names of tables
_DEEP_KEY = re.compile(r"""(?:[\w"'-]{1,100}\s*\.\s*){100}""")  # 50,000 parts take tomllib a minute and 10 GB


@dataclass(frozen=True)
class Config:
    """A checked run config: the model's name, its own section, and the common sections."""

    model_name: str
    model: Section
    settings: Settings

    def as_dict(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        model = self.model.model_dump(mode="json", exclude_defaults=exclude_defaults)
        settings = self.settings.model_dump(mode="json", exclude_defaults=exclude_defaults)
        return {"model": {"name": self.model_name, **model}, **settings}


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Overrides = (), variables: Mapping[str, str] | None = None
) -> Config:
    """Load a TOML file, a shipped config by its name, or a mapping; apply overrides such as "optim.dense.lr=0.02".

    `variables`: environment variables to apply before the overrides, by name; see `key_of`.
    """
    name = "config" if isinstance(source, Mapping) else str(source)
    try:
        return _loaded(name, source, override_texts(overrides), variables or {})
    except RecursionError:
        raise ConfigError(f"{name} or --set: a value or key is nested too deeply.") from None


def read_settings(path: Path) -> tuple[str, Settings]:
    """Return the model's name and the common sections of a run's config. Its plug-ins need not be installed."""
    values = read_toml(path)
    settings, problems = validated(Settings, _common(values), siblings=["model"])
    model = values.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        problems.append(Problem("'model.name': it is missing. Restore the file.", ("model.name",)))
    if problems:
        raise ConfigError(report(str(path), problems, {}))
    return str(name), settings


def _common(values: dict[str, Any]) -> dict[str, Any]:
    return {"data": {}} | {key: value for key, value in values.items() if key != "model"}


def key_of(variable: str) -> str:
    """Return the config key that an environment variable sets: train.seed for RECMILL__TRAIN__SEED.

    Keys are lower-cased; names of tables and features keep their case.
    """
    key = ""
    for part in variable.split("__")[1:]:
        key += f".{part if key in _BY_TABLE else part.lower()}"
    return key.removeprefix(".")


def _loaded(
    name: str, source: str | Path | Mapping[str, Any], overrides: list[str], variables: Mapping[str, str]
) -> Config:
    values = json.loads(json.dumps(source, default=plain)) if isinstance(source, Mapping) else read_toml(Path(source))
    if "model" not in values and {"label", "feature"} <= values.keys():
        raise ConfigError(
            f"{name} is the schema of a click log, not a run config. Prepare the log with it: recmill prepare clicks "
            f"--schema {name} --input LOG --output data/mine; then train: recmill train own/dlrm --set "
            "data.path=data/mine --run runs/mine."
        )
    problems: list[Problem] = []
    origins: dict[str, str] = {}  # by key
    own = values.get("model")
    own_keys = dict(own) if isinstance(own, dict) else {}  # before overrides
    given = [(variable, key_of(variable), f"{variable}={value}") for variable, value in variables.items()]
    for override in overrides:
        given.append(("--set", override.partition("=")[0].strip(), f"--set {override}"))
    for origin, key, override in given:
        if problem := _apply_override(values, key, override):
            problems.append(Problem(problem, (key,)))
        else:
            origins[key] = origin
    config = _checked(values, problems)
    if config.model_name != (theirs := own_keys.get("name")):
        problems = _about_keys_of(theirs, own_keys, config.model_name, name, problems)
    if problems:
        raise ConfigError(report(name, problems, origins))
    return config


def _about_keys_of(
    model: Any, own_keys: Mapping[str, Any], new_model: str, name: str, problems: list[Problem]
) -> list[Problem]:
    """Return one problem for all keys that `new_model` does not know, where an override replaces `model`."""
    unknown = [p for p in problems if p.is_unknown_key and p.keys[0].removeprefix("model.") in own_keys]
    if not unknown:
        return problems
    shipped = shipped_configs()
    known = f"train {own}, or " if (own := f"own/{new_model}") in shipped else ""
    copy = f": recmill configs copy {name}" if name in shipped else ""
    fact = f"'{new_model}' has no {', '.join(p.keys[0] for p in unknown)}, which {name} has for '{model}'"
    text = f"'model.name': {fact}. Instead, {known}edit [model] in a copy{copy}."
    return [*(p for p in problems if p not in unknown), Problem(text, ("model.name",))]


def override_texts(overrides: Overrides, prefix: str = "") -> list[str]:
    """Return overrides as `--set` takes them, key=value; `prefix`: of the keys of a nested mapping."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        texts = []
        for key, value in overrides.items():
            if isinstance(value, Mapping):
                texts += override_texts(value, f"{prefix}{key}.")
            elif value is None:
                raise ConfigError(f"overrides: '{prefix}{key}' is None. Leave it out to keep the config's value.")
            else:
                texts.append(f"{prefix}{key}={json.dumps(value, default=plain, ensure_ascii=False)}")
        return texts
    if not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        expected = '{"optim.dense.lr": 0.02} or ["optim.dense.lr=0.02"]'
        raise ConfigError(f"overrides: expected a dictionary or a list of texts, like {expected}, got {overrides!r}.")
    return [*overrides]


def plain(value: Any) -> Any:
    """Convert a NumPy number or a path to what JSON can hold."""
    return value.item() if hasattr(value, "item") else str(value)


def to_toml(config: Config) -> str:
    """Return a config file with every key, which gives the same run even if defaults change."""
    return tomli_w.dumps(config.as_dict())


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a config file, or of a shipped config, without checking them."""
    if not path.exists():
        path = shipped_configs().get(str(path), path)
    try:
        is_too_large = path.stat().st_size > _MAX_BYTES
        if not path.is_dir() and (is_too_large or not path.is_file()):  # /dev/zero never ends
            raise ConfigError(f"{path} is not a file of at most {_MAX_BYTES:,} bytes. Name a run config (.toml).")
        return _parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        name = str(path).removeprefix("configs/").removesuffix(".toml")
        meant = did_you_mean_path(path) or did_you_mean(name, shipped_configs())
        remedy = f"{meant}Name a run config (.toml), or one that `recmill configs list` shows."
        if name in shipped_configs():
            remedy = f"The config that comes with Recmill is called {name}."
        raise ConfigError(f"{path}: no such file. {remedy}") from None
    except IsADirectoryError:
        raise ConfigError(_about_directory(path)) from None
    except OSError as error:
        if error.filename:
            raise
        raise ConfigError(f"{path}: {error.strerror}. Name a run config (.toml) that can be read.") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of too long integers
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def _about_directory(path: Path) -> str:
    if (path / "config.toml").is_file():
        return f"{path} is a run. To resume it: {resuming_command(path)}; for a new run, name {path / 'config.toml'}."
    if own_config(path):
        return f"{path} is a prepared dataset. Name a config: {training_command(path)}."
    return f"{path} is a directory. Name the run config (.toml) itself."


def _parse_toml(text: str) -> dict[str, Any]:
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def _apply_override(values: dict[str, Any], key: str, override: str) -> str | None:
    """Set `key` in `values`, or return what is wrong with the override."""
    if not key or "=" not in override:
        return f"{override}: expected key=value, like --set optim.dense.lr=0.02."
    *parents, last = key.split(".")
    section = values
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            return f"'{parent}' in '{override}' is a value, not a section."
    value = parse_value(override.partition("=")[2].strip())
    if isinstance(value, dict) or isinstance(section.get(last), dict):
        return f"{override}: '{key}' is a section: set its keys one by one."
    section[last] = value
    return None


def parse_value(text: str) -> Any:
    """Parse a TOML value; anything else, like an unquoted name or path, is a string."""
    try:
        parsed = _parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text  # several keys: the text has a line break


def _checked(values: dict[str, Any], problems: list[Problem]) -> Config:
    """Return the config, and add everything that is wrong with it to `problems`."""
    own = values.get("model")
    own = own if isinstance(own, dict) else {}
    name = own.get("name")
    model = Section()
    module = _model_module(name, problems)
    known = [*config_keys(), *(config_keys(module.Config, "model.") if module else ())]
    settings, found = validated(Settings, _common(values), siblings=["model"], elsewhere=known)
    problems += found
    sentences = list(contradictions_within(settings))
    if module:
        keys = {key: value for key, value in own.items() if key != "name"}
        model, found = validated(module.Config, keys, "model.", siblings=["name"], elsewhere=known)
        problems += found
        sentences += contradictions_within(model)
        sentences += [
            f"eval.{key}: model '{name}' is not measured by AUROC. Remove it."
            for key in ("target_auroc", "group")
            if getattr(settings.eval, key) and module.TASK != "ctr"
        ]
        if settings.observe.mlperf and name != "dcnv2":
            sentences.append(f"observe.mlperf: MLPerf has no benchmark for model '{name}', only for dcnv2. Remove it.")
        if getattr(model, "head", "") == "tied" and "cached_ssd" in settings.tables.requested_stores().values():
            sentences.append("model.head = 'tied' with tables.store = 'cached_ssd': it needs all rows. Use 'linear'.")
        if settings.data.remainder == "torchrec" and module.KIND != "clicks":
            sentences.append(f"data.remainder = 'torchrec' is for click logs, and '{name}' reads histories. Remove it.")
        if settings.tables.dynamic and module.KIND != "clicks":
            sentences.append(f"tables.dynamic: the items of model '{name}' must be known in advance. Remove it.")
    found_in_metrics = metric_problems(settings.eval.metrics, module.TASK if module else None)
    problems += [Problem(f"'eval.metrics': {text}", ("eval.metrics",)) for text in found_in_metrics]
    problems += contradictions(sentences, problems)
    return Config(model_name=str(name), model=model, settings=settings)


def metric_problems(names: Sequence[str], task: str | None) -> Iterator[str]:
    """Yield what is wrong with the names of metrics for a model of `task`, which is None if it is not known."""
    for name in names:
        try:
            found = registry.load(registry.METRICS, name, "metric").TASK
            if task not in (found, None):
                yield f"metric '{name}' is for task '{found}', and the model's is '{task}'. Remove it."
        except ConfigError as error:
            yield str(error)
    shorts = [name.rpartition(".")[2] for name in names]
    if twice := sorted({name for name in shorts if shorts.count(name) > 1 or name in registry.METRIC_NAMES}):
        yield f"two metrics are called '{twice[0]}'. Rename one of the modules."


def _model_module(name: Any, problems: list[Problem]) -> ModuleType | None:
    """Return the model's module, or add what is wrong with its name to `problems`."""
    if isinstance(name, str):
        try:
            return registry.load(registry.MODELS, name, "model")
        except ConfigError as error:
            text = str(error)
    else:
        fact = "a [model] section with a name is missing" if name is None else f"expected text, got {name!r}"
        text = f"{fact}. Known: {', '.join(sorted(registry.MODELS))}."
    problems.append(Problem(f"'model.name': {text}", ("model.name",)))
    return None
