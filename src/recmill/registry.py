"""All plug-ins by name. Their modules are imported on first use; a new plug-in is a file and a line here."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType

from recmill.errors import ConfigError

MODELS = {
    "dlrm": "recmill.models.dlrm",
    "dcnv2": "recmill.models.dcnv2",
    "projection": "recmill.models.projection",
    "bert4rec": "recmill.models.bert4rec",
    "sasrec": "recmill.models.sasrec",
}
DATASETS = {
    "criteo": "recmill.datasets.criteo.steps",
    "movielens": "recmill.datasets.histories.movielens",
    "goodreads": "recmill.datasets.histories.goodreads",
    "histories": "recmill.datasets.histories.own",
    "synthetic-clicks": "recmill.datasets.synthetic.clicks",
    "synthetic-histories": "recmill.datasets.synthetic.histories",
    "random-clicks": "recmill.datasets.synthetic.random_clicks",
    "random-histories": "recmill.datasets.synthetic.random_histories",
}
STORES = {"device_mem": "recmill.tables.stores.device_mem"}
TASKS = {"ctr": "recmill.tasks.ctr", "next_item": "recmill.tasks.next_item"}


def load(registry: Mapping[str, str], name: str, what: str) -> ModuleType:
    """Import the plug-in `name`; `what` is its kind, for the error message."""
    if name not in registry:
        raise ConfigError(unknown(what, name, registry))
    return importlib.import_module(registry[name])


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return a message with the unknown name, the known name that it resembles, and all known names."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"Did you mean '{near}'? " if near else ""
    return f"unknown {what} '{name}'. {hint}Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` resembles most, if any; of keys like a.b, the last parts are compared."""
    by_last_part = {full.rpartition(".")[2]: full for full in sorted(known)}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.6)
    return by_last_part[near[0]] if near else None
