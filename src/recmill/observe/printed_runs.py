"""What `train`, `recmill results` and `recmill compare` print about runs."""

from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

from recmill.observe.printed import (
    Values,
    counted,
    distinct,
    print_columns,
    print_command,
    print_line,
    print_table,
    print_values,
    shown,
    state_text,
)
from recmill.observe.progress import human_rate, human_time

_NOISE_OF_SPEED = "the difference is at most twice the spread of ten equal parts of the run"


def print_results(reports: Sequence[Any], deltas: Sequence[Values]) -> None:
    """Print one column per `commands.results.RunReport`, with the differences of its metrics to the first run's.

    If runs on several datasets have the same metrics, which cannot be compared, each dataset has a table of its own.
    """
    groups: list[list[int]] = []  # places of the runs on each dataset
    for place, report in enumerate(reports):
        own = next((group for group in groups if report.has_data_of(reports[group[0]])), None)
        groups.append([place]) if own is None else own.append(place)
    has_several = len(groups) > 1
    datasets = _names_of_datasets(reports, groups) if has_several else [""] * len(reports)
    names = [name for group in groups for name in {name for n in group for name in reports[n].values}]
    if len(names) == len({*names}):
        groups = [[*range(len(reports))]]
    for number, group in enumerate(groups):
        if number:
            print_line()
        _print_runs([reports[n] for n in group], [deltas[n] for n in group], [datasets[n] for n in group])
    if any(deltas):
        print_line(f"+, -: difference to {'the first run of its dataset' if has_several else reports[0].run}")
    for report in reports:
        if report.state != "done" and report.reason:
            print_line(f"{report.run}: {state_text(report)}: {report.reason}")


def _names_of_datasets(reports: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[str]:
    """Return the dataset of each run by its path, followed by its fingerprint if others had the same path."""
    paths = _short_paths([report.dataset for report in reports])
    first = [paths[group[0]] for group in groups]
    of_run = zip(paths, reports, strict=True)
    return [f"{path} {report.fingerprint[:8]}".strip() if first.count(path) > 1 else path for path, report in of_run]


def _print_runs(reports: Sequence[Any], deltas: Sequence[Values], datasets: Sequence[str]) -> None:
    """Print the runs on one dataset, beside what popularity reaches and what is reachable."""
    names = distinct(dict.fromkeys(name for report in reports for name in report.values))
    headlines = dict.fromkeys(report.metric for report in reports if report.metric)
    labels = ["test", "model", "dataset", "state", "started from", "best step", "tested step"]
    labels += [f"best val {metric}" for metric in headlines]
    columns = []
    for report, delta, dataset in zip(reports, deltas, datasets, strict=True):
        steps = ["" if step is None else f"{step:,}" for step in (report.best_step, report.tested_step)]
        best = "" if report.best_value is None else shown(report.best_value)
        values = [shown(report.values.get(name, "")) for name in names]
        values = [f"{v} {delta[name]:+.4f}" if name in delta else v for name, v in zip(names, values, strict=True)]
        bests = [best if metric == report.metric else "" for metric in headlines]
        facts = [report.run, report.model, dataset, state_text(report), report.started_from]
        columns.append([*facts, *steps, *bests, *values])
    references = []
    for title, attribute in {"popularity": "popularity", "best reachable": "reachable"}.items():
        known = [{shown(getattr(report, attribute).get(name, "")) for report in reports} - {""} for name in names]
        cells = [found.pop() if len(found) == 1 else "differs" if found else "" for found in known]
        references += [[title, *[""] * (len(labels) - 1), *cells]] if any(cells) else []
    print_columns([*labels, *names], columns, references)


def print_summary(report: Any, next_command: str) -> None:
    """Print the end of a training, a `commands.results.RunReport`."""
    seconds = f" in {human_time(report.seconds)}" if report.seconds is not None else ""
    rate = f", {human_rate(report.samples_per_s)} samples/s" if report.samples_per_s else ""
    print_line(f"{report.model} is trained: {counted(report.step, 'step')}{seconds}{rate}")
    if report.verdict:
        print_line(report.verdict)
    if report.best_step is not None:
        print_line(f"best validation: {report.metric} {shown(report.best_value)} at step {report.best_step:,}")
    if report.values:
        _print_tested(report)
    print_line()
    print_line(f"{report.run}/: results.json metrics.jsonl log.txt sharding.json checkpoints/")
    print_command("next: ", next_command)


def _print_tested(report: Any) -> None:
    print_line()
    popularity = {f"popularity/{name}": value for name, value in report.popularity.items()}
    tested = {"step": report.tested_step, "checkpoint": report.checkpoint}
    print_values("test", {**report.values, **popularity, **tested}, report.reachable)
    value, baseline = report.values.get(report.metric), report.popularity.get(report.metric)
    if isinstance(value, float) and isinstance(baseline, float) and value < baseline:
        print_line(
            f"warning: {report.metric} {shown(value)} is less than ranking by popularity reaches, {shown(baseline)}. "
            "Train longer (train.num_epochs), or change optim.dense.lr and optim.tables.lr."
        )


def print_comparison(found: Any) -> None:
    """Print a `commands.compare.Comparison`; its tables fit 80 columns."""
    for letter, run in zip("AB", found.runs, strict=True):
        words = [run.run, run.model, state_text(run), human_time(run.seconds) if run.seconds is not None else ""]
        print_line(f"{letter}  {', '.join(filter(None, words))}", 3)
        if run.started_from:
            print_line(f"   started from {run.started_from}", 3)
        if run.verdict:
            print_line(f"   {run.verdict}", 3)
    for title, rows in {"config": found.config, "environment": found.environment}.items():
        cells = [[_cut(row.name, 36), *_cut_alike(row.a, row.b)] for row in rows]
        print_line()
        print_table([title, "A", "B"], cells) if cells else print_line(f"{title}: no difference")
    if found.warning:
        print_line()
        print_line(f"warning: {found.warning}")
    _print_measured(found.metrics_of, found.metrics, lambda row: f"{row.b - row.a:+.4f}", shown)
    _print_measured("speed", found.speed, lambda row: f"{row.b / row.a:.2f}" if row.a else "", _short)
    for name, curve in found.curves.items():
        print_line()
        rows = [[f"{step:,}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for step, a, b in curve]
        print_table([f"step: {name}", "A", "B", "B - A"], rows)
    print_line()
    if found.last_common_step is not None:
        first = found.first_difference
        parted = "are equal" if first is None else f"differ from step {first:,} on"
        print_line(f"losses at common steps {parted} (last: {found.last_common_step:,})")
    rules = {found.metrics_of: found.noise_of_metrics, "speed": _NOISE_OF_SPEED if found.speed else ""}
    for what, rule in rules.items():
        for number, line in enumerate(rule.split("; ") if rule else []):
            print_line(f"  {line}" if number else f"noise ({what}): {line}", 4 if number else 2)


def _print_measured(title: str, rows: Sequence[Any], difference: Any, text: Any) -> None:
    header = [title, "A", "B", "B / A" if title == "speed" else "B - A", "+/-", ""]
    cells = [[row.name, text(row.a), text(row.b), difference(row), _error(row), _judged(row)] for row in rows]
    if any(row.is_same is None for row in rows):
        header, cells = header[:3], [row[:3] for row in cells]
    elif all(row.error is None for row in rows):
        header.pop(4)
        cells = [[*row[:4], row[5]] for row in cells]
    if cells:
        print_line()
        print_table(header, cells)


def _error(row: Any) -> str:
    return f"{row.error:.4f}" if row.error is not None else "" if row.a == row.b else "?"


def _judged(row: Any) -> str:
    if row.a == row.b:
        return "same"
    is_chance = row.error is not None and abs(row.b - row.a) <= row.error
    return "within +/-" if is_chance else "within noise" if row.is_same else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _cut_alike(*values: Any) -> list[str]:
    """Return the values in 20 characters each; long ones without the path that they have in common."""
    texts = ["-" if value is None else str(value) for value in values]
    return [_cut(text, 20) for text in (_short_paths(texts) if max(map(len, texts)) > 20 else texts)]


def _short_paths(texts: Sequence[str]) -> list[str]:
    """Replace the directories that different paths have in common by "..."."""
    if len(set(texts)) < 2 or not all(text.startswith("/") for text in texts):
        return list(texts)
    shared = commonpath([Path(text).parent for text in texts]).rstrip("/")
    return [f"...{text.removeprefix(shared)}" for text in texts]
