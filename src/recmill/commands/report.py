"""`recmill report`: one HTML file about a run or several, with everything in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Runs, flag, listed
from recmill.commands.report_sections import SECTIONS, Facts, gather, hosts_of
from recmill.commands.results import RunReport, run_report
from recmill.config.options import given_path
from recmill.config.sections import Section
from recmill.errors import ConfigError
from recmill.files.atomic import new_file
from recmill.files.timestamps import utc_now
from recmill.observe import page
from recmill.observe.figures import MAX_SERIES, Chart, Series, legend, line_chart, text
from recmill.observe.printed import counted, distinct, shown, state_text
from recmill.observe.progress import human_rate, human_time

MAX_BYTES = 1_000_000
_FRAME_BYTES = 50_000  # the style sheet, the footer and the list of what is left out
_MAX_METRICS = 8  # figures of validation metrics


class Options(Section):
    output: str | None = flag(
        None, "HTML file to write.  [default: RUN/report.html, or report.html for several]", metavar="FILE"
    )


@checked_keywords
def report(*runs: Runs, output: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about `runs` (paths, or lists of them) and return its path."""
    paths = listed(runs)
    if not paths:
        raise ConfigError("Nothing to report: name at least one run.")
    if len(paths) > MAX_SERIES:
        raise ConfigError(f"{len(paths)} runs: the curves of more than {MAX_SERIES} cannot be told apart. Name fewer.")
    folder = given_path(paths[0], "RUN")
    default = folder / "report.html" if len(paths) == 1 else Path("report.html")
    path = given_path(output, "--output") if output is not None else default
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory. Name a file.")
    reports = [run_report(run) for run in paths]
    with new_file(path.absolute()) as partial:
        facts = [gather(run, found) for run, found in zip(paths, reports, strict=True)]
        partial.write_text(html_of(facts), encoding="utf-8", errors="replace")
    return path


def html_of(runs: Sequence[Facts]) -> str:
    """Return the page. Details of later runs are left out if the file would become too large."""
    is_one = len(runs) == 1
    title = runs[0].name if is_one else f"{len(runs)} runs"
    body = [_head(runs[0]) if is_one else _heads(runs), page.section("Learning", _learning(runs), name="learning")]
    left_out = []
    for run in runs:
        own = "" if is_one else f'<h2 class="run">{text(run.name)}</h2>' + _verdict(run)
        own += "".join(
            page.section(title, show(run), name=_anchor(title) if is_one else "") for title, show in SECTIONS.items()
        )
        if len("".join([*body, own]).encode(errors="replace")) < MAX_BYTES - _FRAME_BYTES:
            body.append(own)
        else:
            left_out.append(run.name)
    if left_out:
        names = ", ".join(left_out)
        body.append(page.missing(f"Left out, because this file would be larger than 1 MB: the details of {names}."))
    body.append(f"<footer>Written by recmill report at {utc_now()}.</footer>")
    return page.page(f"{title} - Recmill", "\n".join(body))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# The beginning


def _verdict(run: Facts) -> str:
    """Return what limits the run, or why it ended."""
    found = run.report
    notes = run.timing.get("notes") or []
    notes = [str(note) for note in notes] if isinstance(notes, list) else []
    if found.reason:
        head, kind = found.reason, "failed" if found.state == "failed" else ""
    elif found.verdict:
        head, kind = found.verdict, ""
    else:
        head, kind = f"The run is {found.state}: the verdict on its speed comes when it is done.", ""
        head = head if found.state != "done" else "This run did not record what limits its speed."
    lines = "".join(f"<div>{text(note)}</div>" for note in notes)
    return f'<div class="verdict {kind}"><b>{text(head)}</b>{lines}</div>'


def _head(run: Facts) -> str:
    found = run.report
    about = [text(part) for part in (found.model, found.dataset) if part]
    state = f'<span class="state {text(found.state)}">{text(state_text(found))}</span>'
    links = "".join(f'<a href="#{_anchor(title)}">{text(title)}</a>' for title in ("Learning", *SECTIONS))
    return (
        f'<p class="kind">Recmill run</p><h1>{text(run.name)}</h1><p>{" &middot; ".join([state, *about])}</p>'
        f"{_verdict(run)}{page.numbers(_numbers(run))}{_tested(run.report)}<nav>{links}</nav>"
    )


def _numbers(run: Facts) -> dict[str, tuple[str, str]]:
    found, shown_numbers = run.report, {}
    if found.best_value is not None and found.best_step is not None:
        shown_numbers[f"best validation {found.metric}"] = (shown(found.best_value), f"at step {found.best_step:,}")
    shown_numbers["steps"] = (f"{found.step:,}", "")
    if found.seconds is not None:
        cores = sum(host.get("cores", 0) for host in hosts_of(run) if isinstance(host.get("cores"), int))
        cost = f"{found.seconds * cores / 3600:.3g} core-hours" if cores else ""
        shown_numbers["training time"] = (human_time(found.seconds), cost)
    if found.samples_per_s:
        shown_numbers["speed"] = (human_rate(found.samples_per_s), "samples/s")
    times = [run.recordings.step_seconds(q) for q in (0.5, 0.95)] if run.recordings else []
    if times and times[0] and times[1]:
        shown_numbers["step time"] = (f"{1e3 * times[0]:.3g} ms", f"median; 95 % below {1e3 * times[1]:.3g} ms")
    if memory := run.curves.get("train/memory_gb"):
        peak = max(y for _, y in memory.points)
        shown_numbers["memory"] = (f"{peak:.3g} GB", "highest report, all processes")
    if isinstance(size := run.environment.get("world_size"), int):
        shown_numbers["processes"] = (f"{size:,}", f"on {counted(len(hosts_of(run)) or 1, 'host')}")
    return shown_numbers


def _tested(found: RunReport) -> str:
    """Return the metrics of the test split beside those of popularity and the best possible model."""
    if not found.values:
        return ""
    names = distinct([name for name in found.values if name.split("/")[0] not in ("low", "high")])
    columns = {"test": names, "model": [shown(found.values[name]) for name in names]}
    for title, values in {"popularity": found.popularity, "best reachable": found.reachable}.items():
        if any(name in values for name in names):
            columns[title] = [shown(values.get(name, "")) for name in names]
    return page.table([*columns], [*zip(*columns.values(), strict=True)])


def _heads(runs: Sequence[Facts]) -> str:
    keys = legend((run.name, f"s{style}") for style, run in enumerate(runs))
    rows = []
    for run in runs:
        found = run.report
        speed = human_rate(found.samples_per_s) if found.samples_per_s else ""
        time = "" if found.seconds is None else human_time(found.seconds)
        best = "" if found.best_value is None else f"{found.metric} {shown(found.best_value)}"
        rows.append([run.name, found.model, state_text(found), f"{found.step:,}", time, speed, best, found.verdict])
    header = ["run", "model", "state", "steps", "time", "samples/s", "best validation", "limit"]
    names = distinct(dict.fromkeys(name for run in runs for name in run.report.values))
    columns = [("test", names)]  # two runs may have one name
    for run in runs:
        groups: list[tuple[str, Mapping[str, Any]]] = [
            (run.name, run.report.values),
            (f"popularity, {run.name}", run.report.popularity),
        ]
        columns += [(title, [shown(v.get(name, "")) for name in names]) for title, v in groups if v]
    titles, cells = zip(*columns, strict=True)
    results = page.table(titles, [*zip(*cells, strict=True)]) if names else ""
    return f'<p class="kind">Recmill</p><h1>{len(runs)} runs</h1>{keys}{page.table(header, rows)}{results}'


# Figures of one or several runs


def _learning(runs: Sequence[Facts]) -> str:
    """Draw loss, learning rate, speed and the metrics of validations by step, the headline metric first."""
    metrics = dict.fromkeys(run.report.metric for run in runs if run.report.metric)
    metrics |= dict.fromkeys(
        name.removeprefix("val/") for run in runs for name in run.curves if name.startswith("val/")
    )
    chosen = distinct(metrics)
    charts = [_chart(runs, "training loss", "train/loss")]
    charts += [_chart(runs, f"validation {name}", f"val/{name}") for name in chosen[:_MAX_METRICS]]
    charts.append(_chart(runs, "learning rate", "train/lr", from_zero=True))
    charts.append(_chart(runs, "speed", "train/samples_per_s", unit="samples/s", from_zero=True))
    charts.append(_chart(runs, "rows found in the cache", "train/store_hit"))
    drawn = page.figures(*map(line_chart, charts))
    if not drawn:
        return page.missing("No curves: nothing was reported yet (metrics.jsonl).")
    marks = ["All curves are by step"]
    marks += ["a ring marks the best validation"] if any(run.report.best_step for run in runs) else []
    marks += ["small ticks on the axis mark where epochs begin"] if 'class="epoch"' in drawn else []
    marks += ["a dashed vertical line marks where the run was resumed"] if 'class="restart"' in drawn else []
    note = f'<p class="soft">{text("; ".join(marks))}.</p>'
    if len(chosen) > _MAX_METRICS:
        note += page.missing(f"{_MAX_METRICS} of {len(chosen)} metrics are drawn; metrics.jsonl has all.")
    return drawn + note


def _chart(runs: Sequence[Facts], title: str, key: str, unit: str = "", from_zero: bool = False) -> Chart:
    series = [Series(run.name, run.curves[key], style) for style, run in enumerate(runs) if key in run.curves]
    best = [
        ((float(run.report.best_step), run.report.best_value), style)
        for style, run in enumerate(runs)
        if key == f"val/{run.report.metric}" and run.report.best_step is not None and run.report.best_value is not None
    ]
    epochs = {number: step for number, step in runs[0].epochs.items() if number} if len(runs) == 1 else {}
    marks = [mark for run in runs for mark in run.restarts] if len(runs) == 1 else []
    return Chart(title, series, unit=unit, from_zero=from_zero, marks=marks, epochs=epochs, best=best)
