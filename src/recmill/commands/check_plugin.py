"""`recmill check-plugin`: run the checks of `recmill.contracts` on a model, dataset or metric, and report each."""

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recmill import registry
from recmill.commands.options import flag
from recmill.commands.prepare import prepare
from recmill.config import Overrides, Section, load_config, override_texts
from recmill.config.load import parse_value
from recmill.contracts import Broken
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, UserError
from recmill.observe.progress import spinner

_KINDS = {"model": registry.MODELS, "dataset": registry.DATASETS, "metric": registry.METRICS}
_SMALL: dict[str, dict[str, Any]] = {
    "clicks": {"rows": 2002, "days": 4, "dense": 3, "tables": [5, 50, 300, 2000]},
    "histories": {"users": 101, "items": 200, "interactions": 1500},
}


class Options(Section):
    data: str | None = flag(
        None, "Check a model on this prepared dataset.  [default: small synthetic data]", metavar="DATASET"
    )
    overrides: list[str] = flag(
        [],
        "A config key of a model, like model.embedding_dim=8, or an option of a dataset.",
        "--set",
        metavar="KEY=VALUE",
    )


@dataclass(frozen=True)
class Outcome:
    check: str  # the fact that was checked
    rule: str  # of the contract that it follows from
    problem: str  # empty if the fact holds
    cause: str = ""  # the earlier check that failed for the same reason: nothing is known about this fact


def check_plugin(name: str, *, data: str | Path | None = None, overrides: Overrides = ()) -> list[Outcome]:
    """Return the outcome of each check of the contract; raise ConfigError if `name` cannot be used at all.

    `data`: a prepared dataset for a model; otherwise it is checked on small synthetic data. `overrides`: config keys
    like "model.embedding_dim=8" for a model, options like "users=50" for a dataset.
    """
    what = _kind(name)
    module = registry.load(_KINDS[what], name, what)
    with _quiet(), tempfile.TemporaryDirectory(prefix="recmill-check-") as directory:
        checks: Sequence[Callable[..., None]]
        subject: tuple[Any, ...]
        if what == "model":
            from recmill.contracts import models

            path = Path(data) if data else _small_data(module.KIND, Path(directory))
            train = {"global_batch_size": 32, "kernels": "torch", "device": "cpu"}
            values = {"data": {"path": str(path.absolute())}, "model": {"name": name}, "train": train}
            checks, subject = models.CHECKS, (load_config(values, overrides), open_dataset(path))
        elif what == "dataset":
            from recmill.contracts import datasets

            checks, subject = datasets.CHECKS, (name, _dataset_options(overrides), Path(directory))
        else:
            from recmill.contracts import metrics

            checks, subject = metrics.CHECKS, (module,)
        return _outcomes(checks, *subject)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log errors only within the block: the preparations and trainings of the checks are of no interest."""
    log = logging.getLogger("recmill")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _kind(name: str) -> str:
    """Return whether `name` is a model, dataset or metric; for an incomplete module, what it resembles most."""
    for what, built_in in _KINDS.items():
        if name in built_in or name in registry.installed(what):
            return what
    registry.check_no_file(name, "plug-in")
    if "." not in name:
        known = [known for what, built_in in _KINDS.items() for known in (*built_in, *registry.installed(what))]
        raise ConfigError(registry.unknown("plug-in", name, known))
    module = registry.import_module(name, "plug-in")
    parts = {what: sum(hasattr(module, part) for part in registry.PARTS[what]) for what in _KINDS}
    if not any(parts.values()):
        needs = "; ".join(f"a {what} needs {', '.join(registry.PARTS[what])}" for what in _KINDS)
        raise ConfigError(f"plug-in '{name}' is not a model, dataset or metric: {needs}.")
    return max(parts, key=lambda what: parts[what])


def _small_data(kind: str, directory: Path) -> Path:
    prepare(f"synthetic-{kind}", directory / "data", **_SMALL[kind])
    return directory / "data"


def _dataset_options(overrides: Overrides) -> dict[str, Any]:
    options = {}
    for override in override_texts(overrides):
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected an option of the dataset, like --set users=50.")
        options[key.strip().replace("-", "_")] = parse_value(value.strip())
    return options


def _outcomes(checks: Sequence[Callable[..., None]], *subject: Any) -> list[Outcome]:
    """Run the checks. One that fails for the reason of an earlier one, also in a process of its own, names that one."""
    found: list[Outcome] = []
    for check in checks:
        outcome = _outcome(check, *subject)
        causes = [earlier.check for earlier in found if earlier.problem and earlier.problem in outcome.problem]
        found.append(replace(outcome, problem="", cause=causes[0]) if causes else outcome)
    return found


def _outcome(check: Callable[..., None], *subject: Any) -> Outcome:
    """Run a check of a plug-in; datasets get a new directory for each."""
    fact = check.__name__.replace("_", " ")
    rule = inspect.getdoc(check) or ""
    if isinstance(subject[-1], Path):
        subject = (*subject[:-1], Path(tempfile.mkdtemp(dir=subject[-1])))
    try:
        with spinner(fact):
            check(*subject)
    except (Broken, UserError) as error:
        return Outcome(fact, rule, str(error))
    except Exception as error:  # noqa: BLE001  # whatever a plug-in raises is what is reported
        return Outcome(fact, rule, f"{registry.place_in_plugin(error)}{type(error).__name__}: {error}")
    return Outcome(fact, rule, "")
