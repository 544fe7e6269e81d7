"""`recmill compare`: how two runs differ in config, environment, metrics, speed and learning curves."""

import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import hypot, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recmill import registry
from recmill.commands.history import number
from recmill.commands.keywords import checked_keywords
from recmill.commands.results import RunReport, run_report
from recmill.config.compare import flat
from recmill.environment import is_recorded
from recmill.errors import UserError
from recmill.files.reading import read_json, read_small
from recmill.metrics.own import Values
from recmill.metrics.sampling_error import TWO_SIDED_95, standard_error
from recmill.observe.printed import distinct, printed_text
from recmill.observe.printed_runs import print_comparison
from recmill.observe.recorder import PARTS, PAUSES
from recmill.observe.recordings import BINS, read_recordings
from recmill.observe.run_dir import RunDirectory

_STRETCHES = 10  # of the steps of a run, whose spread is the noise of its speed
_VALIDATIONS = 20  # the last ones, whose spread around their trend is the noise of a metric
_FEW_VALIDATIONS = 4
_ROWS = 8  # of a learning curve
_NOISE_SPREADS = 2.0  # a difference of at most this many spreads is noise
_OF_ONE_START = ("started_at", "job_id")


@dataclass(frozen=True)
class Difference:
    """A key whose values differ; None: the run does not have it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Measured:
    """A number of both runs. `is_same`: the difference is none or noise; None: the runs cannot be compared.

    `error`: half of the 95 % interval of the difference that comes from the rows tested, estimated; None: unknown.
    """

    name: str
    a: float
    b: float
    is_same: bool | None
    error: float | None = None


@dataclass(frozen=True)
class Comparison:
    runs: list[RunReport]
    config: list[Difference]
    environment: list[Difference]
    metrics: list[Measured]  # of the test split, or the best validation if one of the runs is not done
    metrics_of: str
    noise_of_metrics: str  # how it was found
    speed: list[Measured]  # milliseconds of a step by part, then samples/s and GB
    curves: dict[str, list[tuple[int, float, float]]]  # by name: step and both values
    first_difference: int | None  # the first common step at which the losses differ
    last_common_step: int | None  # at which both reported a loss
    warning: str = ""  # why metrics or losses cannot be compared

    def __str__(self) -> str:
        return printed_text(print_comparison, self)


@checked_keywords
def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare two runs, whatever their state."""
    reports = [run_report(run) for run in (a, b)]
    runs = [_read(run, report) for run, report in zip((a, b), reports, strict=True)]
    metrics, metrics_of, rule = _metrics(reports, runs)
    no_metrics, no_losses = _not_comparable(reports)
    if no_metrics:
        metrics, rule = [replace(row, is_same=None) for row in metrics], ""
    last_step = min(report.step for report in reports)
    losses, first_difference = ([], None) if no_losses else _common(a, b, "train", "loss", last_step)
    curves = {"loss": losses}
    if (metric := reports[0].metric) and metric == reports[1].metric and not no_metrics:
        curves[metric], _ = _common(a, b, "val", metric, last_step)
    return Comparison(
        runs=reports,
        config=_differences(runs[0].config, runs[1].config),
        environment=_differences(runs[0].environment, runs[1].environment),
        metrics=metrics,
        metrics_of=metrics_of,
        noise_of_metrics=rule,
        speed=[
            Measured(name, own.mean, other.mean, _is_noise(own, other))
            for name, own in runs[0].speed.items()
            if (other := runs[1].speed.get(name)) and (own.mean or other.mean)
        ],
        curves={name: rows for name, rows in curves.items() if rows},
        first_difference=first_difference,
        last_common_step=losses[-1][0] if losses else None,
        warning=no_metrics or no_losses,
    )


class _Speed(NamedTuple):
    mean: float
    spread: float  # of the ten parts of the run, relative to the mean


@dataclass
class _Run:
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, _Speed] = field(default_factory=dict)
    validations: dict[str, deque[float]] = field(default_factory=dict)


def _read(path: str | Path, report: RunReport) -> _Run:
    run, folder = _Run(), RunDirectory(path)
    with suppress(OSError, ValueError):
        run.config = flat(tomllib.loads(read_small(folder.config_file).decode(errors="replace")))
    with suppress(OSError, ValueError, AttributeError):
        facts = read_json(folder.path / "env.json")
        facts.pop("started_from", None)  # a fact of the report
        hosts = [host for host in facts.pop("hosts", []) if isinstance(host, dict)]
        facts |= {"hosts": ", ".join(str(host.get("name")) for host in hosts)} if hosts else {}
        run.environment = {key: value for key, value in flat(facts).items() if _is_comparable(key)}
    if recorded := read_recordings(folder.trace, report.step):
        steps = np.sum([rank.steps for rank in recorded.ranks.values()], axis=0)
        parts = np.sum([rank.parts for rank in recorded.ranks.values()], axis=0)
        by_stretch = [np.add.reduceat(values, range(0, BINS, BINS // _STRETCHES)) for values in (steps, parts)]
        names = [name for part, name in enumerate(PARTS) if part not in PAUSES]
        each = {f"{name} ms": by_stretch[1][:, PARTS.index(name)] for name in names}
        for name, seconds in (each | {"step ms": np.sum([*each.values()], axis=0)}).items():
            _add_speed(run, name, 1e3 * seconds, by_stretch[0])
    sums = {name: (np.zeros(_STRETCHES), np.zeros(_STRETCHES)) for name in ("samples_per_s", "memory_gb")}
    for line in folder.metrics():
        if line.get("split") == "val":
            for name, value in line.items():
                if (found := number(value)) is not None and isfinite(found):
                    run.validations.setdefault(name, deque(maxlen=_VALIDATIONS)).append(found)
        for name, (total, count) in sums.items():
            if (value := number(line.get(name))) is not None and isfinite(value):
                stretch = line["step"] * _STRETCHES // (max(report.step, line["step"]) + 1)
                total[stretch] += value
                count[stretch] += 1
    for name, label in {"samples_per_s": "samples/s", "memory_gb": "memory GB"}.items():
        _add_speed(run, label, *sums[name])
    if "samples/s" in run.speed and "step ms" in run.speed:  # the time of all steps, not only that of the reported ones
        run.speed["samples/s"] = _Speed(run.speed["samples/s"].mean, run.speed["step ms"].spread)
    return run


def _is_comparable(key: str) -> bool:
    """Return whether a fact in env.json may differ between runs for a reason; older runs hold internal variables."""
    section, _, name = key.partition(".")
    return key not in _OF_ONE_START and (section != "variables" or is_recorded(name))


def _not_comparable(reports: Sequence[RunReport]) -> tuple[str, str]:
    """Return why the metrics of two runs cannot be compared, and why their losses cannot; empty if they can."""
    models = [report.model for report in reports]
    tasks = [*map(_task, models)] if models[0] != models[1] else []  # models import torch
    if tasks and all(tasks) and tasks[0] != tasks[1]:
        text = f"different tasks ({' and '.join(tasks)}): metrics and losses are not comparable"
        return text, text
    if not reports[0].has_data_of(reports[1]):
        text = "different datasets: metrics are not comparable"
        return text, text
    if "next_item" in tasks or "retrieval" in tasks:  # such models have losses of their own; click models share one
        return "", f"different models ({' and '.join(models)}): losses are not comparable"
    return "", ""


def _task(model: str) -> str:
    """Return the name of a model's task; empty if the run has no config, or the model is unknown here."""
    with suppress(UserError):
        return str(registry.load(registry.MODELS, model, "model").TASK) if model else ""
    return ""


def _add_speed(run: _Run, name: str, totals: np.ndarray, counts: np.ndarray) -> None:
    """Add the mean, and how far the stretches of the run are from it (standard deviation)."""
    if counts.sum():
        stretches = totals[counts > 0] / counts[counts > 0]
        mean = float(totals.sum() / counts.sum())
        run.speed[name] = _Speed(mean, float(stretches.std()) / mean if mean else 0.0)


def _is_noise(a: _Speed, b: _Speed) -> bool:
    """Return whether a difference is noise. Spreads are relative, so a rate and its time give the same answer."""
    return abs(b.mean - a.mean) <= _NOISE_SPREADS * hypot(a.spread, b.spread) * (a.mean + b.mean) / 2


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    return [Difference(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def _metrics(reports: Sequence[RunReport], runs: Sequence[_Run]) -> tuple[list[Measured], str, str]:
    """Return the metrics of both runs, the split that they are of, and the rules that say which are the same."""
    values, split = [report.values for report in reports], "test"
    names = [name for name in distinct(values[0]) if name.split("/")[0] not in ("low", "high")]
    names = [name for name in names if all(isinstance(of_run.get(name), float) for of_run in values)]
    if not names:
        split, metric, bests = "best validation", reports[0].metric, [report.best_value for report in reports]
        if metric == reports[1].metric and None not in bests:
            names = [metric]
            values = [{name: series[-1] for name, series in run.validations.items()} for run in runs]
            values = [{**last, metric: best or 0.0} for last, best in zip(values, bests, strict=True)]
    judged = [_judged(name, values, runs) for name in names]
    rules = dict.fromkeys(rule for _, rules_of_row in judged for rule in rules_of_row)
    if {row.error is None for row, _ in judged if row.a != row.b} == {True, False}:
        rules["?: known with eval.bootstrap"] = None
    unclear = [row.name for row, _ in judged if row.error and 0 < abs(row.b - row.a) <= row.error]
    if unclear:
        rules[f"the split is too small to tell the runs apart by {', '.join(unclear)}"] = None
    return [row for row, _ in judged], split, "; ".join(rules)


def _judged(name: str, values: Sequence[Values], runs: Sequence[_Run]) -> tuple[Measured, list[str]]:
    """Return a metric of both runs, and the rules that say whether its difference is noise.

    It may be that of training, which differs from seed to seed, or that of a split with few rows.
    """
    a, b = (float(of_run[name]) for of_run in values)
    is_same, rules = a == b, []
    series = [list(run.validations.get(name, ())) for run in runs]
    if min(map(len, series)) < _FEW_VALIDATIONS:
        rules.append(f"the noise of training is unknown: a run has fewer than {_FEW_VALIDATIONS} validations")
    else:
        rules.append("the difference is at most twice the spread of the last validations around their trend")
        is_same |= abs(b - a) <= _NOISE_SPREADS * hypot(*map(_spread, series))
    lows, highs = ([number(of_run.get(f"{end}/{name}")) for of_run in values] for end in ("low", "high"))
    if lows[0] is not None and lows[1] is not None and highs[0] is not None and highs[1] is not None:
        rules.append("the 95 % intervals of both runs overlap")
        is_same |= lows[0] <= highs[1] and lows[1] <= highs[0]
    errors = [standard_error(name, of_run) for of_run in values]
    if errors[0] is None or errors[1] is None:
        return Measured(name, a, b, is_same), rules
    error = TWO_SIDED_95 * hypot(errors[0], errors[1])
    count = " and ".join(f"{value:,} {what}" for what in ("users", "rows") if (value := values[0].get(what)))
    rules.append(f"within +/-: its 95 % interval with {count} in the split")
    return Measured(name, a, b, is_same or abs(b - a) <= error, error), rules


def _spread(values: list[float]) -> float:
    """Return the standard deviation of noise on a curve, from how far points are from the middle of neighbours."""
    middle = np.array(values[1:-1]) - (np.array(values[:-2]) + np.array(values[2:])) / 2
    return float(np.sqrt((middle**2).mean() / 1.5))  # such a distance has 1.5 times the variance of the noise


def _pairs(a: str | Path, b: str | Path, split: str, name: str) -> Iterator[tuple[int, float, float]]:
    """Yield step and values of both runs where both reported, reading both files at once."""

    def values(path: str | Path) -> Iterator[tuple[int, float]]:
        for line in RunDirectory(path).metrics():
            if line.get("split") == split and (value := number(line.get(name))) is not None:
                yield line["step"], value

    left, right = values(a), values(b)
    first, second = next(left, None), next(right, None)
    while first and second:
        if first[0] == second[0]:
            yield first[0], first[1], second[1]
        lead = first[0] - second[0]
        first = first if lead > 0 else next(left, None)
        second = second if lead < 0 else next(right, None)


def _common(
    a: str | Path, b: str | Path, split: str, name: str, last_step: int
) -> tuple[list[tuple[int, float, float]], int | None]:
    """Return the last common step of each eighth with both values, and the first step at which they differ."""
    rows: dict[int, tuple[int, float, float]] = {}
    first = None
    for row in _pairs(a, b, split, name):
        rows[-(-row[0] * _ROWS // max(last_step, 1))] = row
        if first is None and row[1] != row[2]:
            first = row[0]
    return list(rows.values()), first
