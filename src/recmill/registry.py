"""All plug-ins by name. Their modules are imported on first use.

A built-in one is a file and a line here. Others are entry points of installed packages, in the groups recmill.models,
recmill.datasets and recmill.metrics, or modules that are named by their path, like my_package.fm.
"""

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from recmill.errors import ConfigError, did_you_mean

MODELS = {
    "dlrm": "recmill.models.dlrm",
    "dcnv2": "recmill.models.dcnv2",
    "projection": "recmill.models.projection",
    "logistic": "recmill.models.logistic",
    "fm": "recmill.models.fm",
    "deepfm": "recmill.models.deepfm",
    "finalmlp": "recmill.models.finalmlp",
    "two_tower": "recmill.models.two_tower",
    "bert4rec": "recmill.models.bert4rec",
    "sasrec": "recmill.models.sasrec",
}
DATASETS = {
    "criteo": "recmill.datasets.criteo.steps",
    "clicks": "recmill.datasets.own_clicks.steps",
    "movielens": "recmill.datasets.histories.movielens",
    "goodreads": "recmill.datasets.histories.goodreads",
    "histories": "recmill.datasets.histories.own",
    "synthetic-clicks": "recmill.datasets.synthetic.clicks",
    "synthetic-histories": "recmill.datasets.synthetic.histories",
    "random-clicks": "recmill.datasets.synthetic.random_clicks",
    "random-histories": "recmill.datasets.synthetic.random_histories",
}
METRICS: dict[str, str] = {}  # the metrics of a task itself are no plug-ins:
METRIC_NAMES = ("auroc", "logloss", "normalised_entropy", "calibration", "rows", "users")
TASKS = {
    "ctr": "recmill.tasks.ctr",
    "retrieval": "recmill.tasks.retrieval",
    "next_item": "recmill.tasks.next_item",
}


# What a module must have to be used as one of these
PARTS = {
    "model": ("TASK", "KIND", "Config", "tables", "build"),
    "dataset": ("Options", "plan", "write"),
    "metric": ("TASK", "sums", "value"),
}
_KINDS = {"ctr": "clicks", "retrieval": "clicks", "next_item": "histories"}  # what a task learns from
_plugins: dict[str, ModuleType] = {}  # those that are not built in and were imported, by module


def load(registry: Mapping[str, str], name: str, what: str) -> ModuleType:
    """Import the plug-in `name`; `what` is its kind, for example "model"."""
    others = installed(what) if what in PARTS else {}
    if name in registry:
        if name in others:
            raise ConfigError(
                f"{what} '{name}' is built in, and an installed package has one, too. Use '{others[name][0]}'."
            )
        return importlib.import_module(registry[name])
    if len(others.get(name, ())) > 1:
        raise ConfigError(f"{what} '{name}' is in several installed packages. Use {' or '.join(others[name])}.")
    check_no_file(name, what)
    is_module_path = what in PARTS and "." in name and all(part.isidentifier() for part in name.split("."))
    if name not in others and not is_module_path:
        if not registry and not others:
            raise ConfigError(f"unknown {what} '{name}'. None is installed; name a module, like my_package.accuracy.")
        raise ConfigError(unknown(what, name, [*registry, *others]))
    module_name = others[name][0] if name in others else name
    module = import_module(module_name, what)
    if problem := _misfit(module, what):
        where = getattr(module, "__file__", None)
        raise ConfigError(f"{what} '{name}': {where}: {problem} See docs/own-model.md.")
    _plugins[module_name] = module
    return module


def own_metrics(names: Iterable[str]) -> dict[str, Any]:
    """Return the modules of metrics by the names of their values: the last parts of their own."""
    return {name.rpartition(".")[2]: load(METRICS, name, "metric") for name in names}


@cache
def installed(what: str) -> dict[str, list[str]]:
    """Return the modules of the entry points of installed packages, by name."""
    found: dict[str, list[str]] = {}
    for point in _entry_points().select(group=f"recmill.{what}s"):
        found.setdefault(point.name, []).append(point.value)
    return found


@cache
def _entry_points() -> Any:
    """Return the entry points of all installed packages: reading them takes 20 ms."""
    from importlib import metadata

    return metadata.entry_points()


def plugin_files() -> dict[str, str]:
    """Return the files of the plug-ins that were imported and are not built in, by module."""
    return {name: str(getattr(module, "__file__", None)) for name, module in _plugins.items()}


def place_in_plugin(error: BaseException) -> str:
    """Return the file and the line of a plug-in that raised `error`, like "fm.py:7: "; empty if none did."""
    files = set(plugin_files().values())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""


def plugin_directories() -> list[str]:
    """Return the directories in which Python finds these plug-ins: other processes of a job need them as well."""
    found: dict[str, None] = {}
    for name in _plugins:
        package = sys.modules[name.partition(".")[0]]
        places = [*getattr(package, "__path__", [])] or [str(package.__file__)]
        found |= dict.fromkeys(str(Path(place).absolute().parent) for place in places)
    return list(found)


def search_also(directories: Iterable[str]) -> None:
    """Let Python find modules in `directories` too: after all others, so that they hide nothing."""
    sys.path.extend(directory for directory in directories if directory not in sys.path)


def import_module(name: str, what: str) -> ModuleType:
    """Import a module, which may also be in the current directory."""
    top, _, rest = name.partition(".")
    here = Path.cwd()
    is_here = (here / top).is_dir() or (here / f"{top}.py").is_file()
    if is_here and importlib.util.find_spec(top) is None:
        search_also([str(here)])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(_failure(name, what, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(name, what, error)) from error
    if package := importlib.util.find_spec(top):
        place = str([*(package.submodule_search_locations or []), package.origin][0])
        is_hidden = is_here and Path(place).parent != here
        siblings = [module.name for module in pkgutil.iter_modules(package.submodule_search_locations or [])]
        remedy = f"It hides {top} in {here}: rename that." if is_hidden else did_you_mean(rest, siblings)
        remedy = remedy.strip() or "Correct the name."
        raise ConfigError(f"{what} '{name}': {place} has no module '{rest}'. {remedy}")
    raise ConfigError(
        f"{what} '{name}': no module '{top}' is installed or in {here}. "
        f"Run the command where {top} is, add that directory to PYTHONPATH, or install it."
    )


def check_no_file(name: str, what: str) -> None:
    """Raise ConfigError with the name of the module, if `name` is that of its file."""
    if name.endswith(".py") and ("/" in name or Path(name).is_file()):
        parts = Path(os.path.relpath(name)).with_suffix("").parts
        module = ".".join(parts[-2:] if parts[0] == ".." else parts)
        remedy = f"Use '{module}'." if "." in module else f"Move it to my_models/{name}, and use 'my_models.{module}'."
        raise ConfigError(f"{what} '{name}' is a file, and the name of a module is needed. {remedy}")


def _failure(name: str, what: str, error: BaseException) -> str:
    return f"{what} '{name}' cannot be imported: {type(error).__name__}: {error}. Correct it; --debug shows where."


def _misfit(module: ModuleType, what: str) -> str | None:
    """Return why a module cannot be used as a plug-in of this kind, or None."""
    values: dict[str, Any] = {name: getattr(module, name, None) for name in PARTS[what]}
    if values.get("KIND") == "histories":
        values["window_rules"] = getattr(module, "window_rules", None)
    if missing := [name for name, value in values.items() if value is None]:
        return f"a {what} needs {', '.join(values)}, and this one lacks {', '.join(missing)}."
    for name, value in values.items():
        if name in ("Config", "Options"):
            if not isinstance(value, type) or not hasattr(value, "contradictions"):
                return f"{name} is not a class derived from recmill.config.Section."
        elif name.islower() and not callable(value):
            return f"{name} is not a function."
    if "name" in getattr(values.get("Config"), "model_fields", ()):
        return "Config has a key 'name', which model.name would set. Give it another name."
    if "TASK" in values and values["TASK"] not in TASKS:
        return f"TASK: {unknown('task', str(values['TASK']), TASKS)}"
    if "KIND" in values and values["KIND"] != _KINDS[values["TASK"]]:
        return f"KIND is {values['KIND']!r}, but TASK = '{values['TASK']}' learns from {_KINDS[values['TASK']]}."
    return None


def unknown(what: str, name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return a message with the unknown name, the known names that it resembles or `others`, and all known names."""
    names = sorted(known)
    meant = [f"'{near}'" for near in nearest(name, names) or others]
    hint = f"Did you mean {' or '.join(meant)}? " if meant else ""
    return f"unknown {what} '{name}'. {hint}Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that `name` resembles most, if any.

    Of keys like a.b, the last parts are compared: several keys may have the nearest one.
    """
    by_last_part: dict[str, list[str]] = {}
    for full in sorted(known):
        by_last_part.setdefault(full.rpartition(".")[2], []).append(full)
    near = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
    return by_last_part[near[0]] if near else []
