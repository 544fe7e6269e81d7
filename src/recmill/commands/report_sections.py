"""What `recmill report` reads of a run, and the sections about it after its learning curves."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recmill import registry
from recmill.commands.checkpoint import list_checkpoints
from recmill.commands.history import number
from recmill.commands.results import RunReport
from recmill.config import read_settings
from recmill.data.opening import open_dataset
from recmill.errors import UserError
from recmill.files.reading import read_json_of, read_small
from recmill.observe import page
from recmill.observe.figures import MAX_SERIES, Chart, Curve, Series, bars, heat_map, lanes, line_chart, text
from recmill.observe.printed import counted
from recmill.observe.progress import human_time
from recmill.observe.recorder import PARTS, PAUSES, TRACKS
from recmill.observe.recordings import SHOWN_RANKS, Recordings, read_recordings
from recmill.observe.run_dir import RunDirectory
from recmill.observe.tensorboard import LINE_FACTS

_MAX_ROWS = 60  # of a table
_MAX_CONFIG = 20_000  # characters
_NO_CURVES = (*LINE_FACTS, "rows", "users")
_PARTS_OF_STEP = [part for number, part in enumerate(PARTS) if number not in PAUSES]
_COMMANDS_OF_RUN = ("evaluate", "trace", "report")


@dataclass
class Facts:
    """What the report shows of one run."""

    path: Path
    name: str
    report: RunReport
    curves: dict[str, Curve] = field(default_factory=dict)  # "train/loss", "val/auroc", ...
    epochs: dict[int, float] = field(default_factory=dict)  # the step after which each begins
    recordings: Recordings | None = None
    timing: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    no_checkpoints: str = ""  # why

    @property
    def restarts(self) -> list[tuple[float, str]]:
        starts = self.recordings.starts[1:] if self.recordings else []
        return [(s.first_step, f"resumed after step {s.first_step:,}") for s in starts if s.first_step is not None]


def gather(run: str | Path, found: RunReport) -> Facts:
    """Read what is known about a run; what is missing stays empty."""
    facts = Facts(Path(run), str(run), found)
    _read_curves(facts)
    facts.recordings = read_recordings(facts.path / "trace", found.step)
    facts.timing = read_json_of(facts.path / "results.json", dict).get("timing") or {}
    facts.environment = read_json_of(facts.path / "env.json", dict)
    facts.tables = [row for row in read_json_of(facts.path / "sharding.json", list) if isinstance(row, dict)]
    try:
        facts.checkpoints = list_checkpoints(run)
    except UserError as error:
        facts.no_checkpoints = str(error)
    return facts


def _read_curves(facts: Facts) -> None:
    for line in RunDirectory(facts.path).metrics():
        split, step = line.get("split", ""), line["step"]
        if split not in ("train", "val"):
            continue
        for name, value in line.items():
            if name not in _NO_CURVES and (found := number(value)) is not None:
                facts.curves.setdefault(f"{split}/{name}", Curve()).add(step, found)
        if isinstance(epoch := line.get("epoch"), int) and len(facts.epochs) < 10_000:
            facts.epochs.setdefault(epoch, step)


# Sections of a run


def _time(run: Facts) -> str:
    """Show the parts of the run and of a step, by rank, and the slowest steps."""
    by_rank, steps = _parts(run)
    if not by_rank:
        return page.missing("This run did not record where its time went.")
    of_run = dict.fromkeys(("steps", "validate", "save"), 0.0)
    for _, parts in by_rank.values():
        for name, spent in parts.items():
            of_run[name if name in of_run else "steps"] += spent / len(by_rank)
    rows = []
    for rank, (_, parts) in _some(by_rank).items():
        own = {name: parts.get(name, 0.0) for name in _PARTS_OF_STEP}
        each = f"{1e3 * sum(own.values()) / steps:.3g} ms" if steps else ""
        rows.append((f"rank {rank}", own, each))
    total = human_time(sum(of_run.values()))
    drawn = [bars("The run, without start-up and test", [("all ranks", of_run, total)])]
    drawn += [bars("A step, by rank", rows)] if any(sum(own.values()) for _, own, _ in rows) else []
    drawn.append(_left_out(len(by_rank), len(rows)))
    names = {"train/step_ms_p50": "median", "train/step_ms_p95": "95 % are faster"}
    times = [
        Series(name, run.curves[key], style) for style, (key, name) in enumerate(names.items()) if key in run.curves
    ]
    chart = Chart("step time", times, unit="ms", from_zero=True, marks=run.restarts)
    slow = [
        [f"{step:,}", f"{1e3 * spent:,.1f}", part] for spent, step, part in (run.recordings or Recordings()).slowest
    ]
    slowest = page.table(["slowest steps", "ms", "mostly"], slow) if slow else ""
    return "".join([*drawn, page.figures(line_chart(chart), slowest)])


def _parts(run: Facts) -> tuple[dict[int, tuple[str, dict[str, float]]], float]:
    """Return host and seconds by part of each rank, and how many steps these are: as recorded, or of results.json."""
    if run.recordings:
        ranks = run.recordings.ranks
        steps = max((float(own.steps.sum()) for own in ranks.values()), default=0.0)
        return {rank: (own.host, own.seconds_by_part) for rank, own in sorted(ranks.items())}, steps
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        by_rank = {
            int(one["rank"]): (str(one["host"]), {str(name): float(spent) for name, spent in one["parts"].items()})
            for one in run.timing.get("ranks", [])
        }
        return by_rank, float(run.timing.get("steps", 0))
    return {}, 0.0


def _some(by_rank: Mapping[int, Any]) -> dict[int, Any]:
    """Return the ranks that are shown: all, or those that wait least and most for others."""
    if len(by_rank) <= 2 * SHOWN_RANKS:
        return dict(by_rank)
    ordered = sorted(by_rank, key=lambda rank: by_rank[rank][1].get("sync", 0) + by_rank[rank][1].get("exchange", 0))
    return {rank: by_rank[rank] for rank in sorted([*ordered[:SHOWN_RANKS], *ordered[-SHOWN_RANKS:]])}


def _left_out(total: int, drawn: int) -> str:
    return page.missing(f"{drawn} of {total} ranks are shown: those that wait least and most.") if total > drawn else ""


def _ranks(run: Facts) -> str:
    """Compare the ranks: who waits for whom, and what each used."""
    recorded = run.recordings
    if recorded is None:
        return page.missing("Nothing was recorded for each rank (trace/).")
    waiting, rows = [], []
    shown_ranks = _some(_parts(run)[0])
    for rank in shown_ranks:
        own = recorded.ranks[rank]
        seconds = own.parts[:, [PARTS.index(name) for name in _PARTS_OF_STEP]].sum(axis=1)
        waits = own.parts[:, PARTS.index("sync")] + own.parts[:, PARTS.index("exchange")]
        shares = [w / s if s else float("nan") for w, s in zip(waits.tolist(), seconds.tolist(), strict=True)]
        share = f"{100 * waits.sum() / max(seconds.sum(), 1e-9):.0f} %"
        waiting.append((f"rank {rank}", shares, share))
        sizes = {name: own.totals.get(name) for name in ("cpu_s", "peak_rss", "read_bytes", "write_bytes")}
        cells = ["" if sizes["cpu_s"] is None else f"{sizes['cpu_s']:,.1f}"]
        cells += ["" if sizes[name] is None else f"{(sizes[name] or 0) / 1e6:,.1f}" for name in [*sizes][1:]]
        rows.append([rank, own.host, share, *cells])
    header = ["rank", "host", "waits", "CPU s", "peak memory MB", "read MB", "written MB"]
    drawn = page.table(header, rows) + _left_out(len(recorded.ranks), len(rows))
    if len(recorded.ranks) > 1:
        highest = max((s for _, shares, _ in waiting for s in shares if s == s), default=0.0)
        axis = ["first step", f"strongest colour: {100 * highest:.0f} % of a step", f"step {run.report.step:,}"]
        drawn += heat_map("Waiting for other ranks", waiting, axis, highest)
    return drawn + "".join(page.missing(f"Note: {note}.") for note in recorded.notes[:10])


def _machine(run: Facts) -> str:
    """Draw memory, cores and disk over time, by rank."""
    recorded = run.recordings
    ranks = sorted(recorded.ranks)[:MAX_SERIES] if recorded else []
    units = {"memory": "GB", "cores used": "", "disk read": "MB/s", "disk written": "MB/s", "GPU use": "%"}
    marks = [(start.offset, "resumed") for start in recorded.starts[1:]] if recorded else []
    charts = []
    for name, unit in units.items():
        series = [
            Series(f"rank {rank}", recorded.ranks[rank].curves[name], style)
            for style, rank in enumerate(ranks)
            if recorded and name in recorded.ranks[rank].curves
        ]
        charts.append(line_chart(Chart(name, series, x="time", unit=unit, from_zero=True, marks=marks)))
    if not (drawn := page.figures(*charts)):
        return page.missing("No counters were recorded (trace/).")
    if recorded and len(recorded.ranks) > len(ranks):
        drawn += page.missing(f"The first {len(ranks)} of {len(recorded.ranks)} ranks are drawn.")
    return drawn


def _tables(run: Facts) -> str:
    """List the largest tables: where their rows live, and how large they are on each rank."""
    if not run.tables:
        return page.missing("The placement of tables is unknown (sharding.json).")
    rows = []
    for one in run.tables:
        by_rank = one.get("bytes_by_rank")
        by_rank = by_rank if isinstance(by_rank, dict) else {}
        sizes = [size / 1e6 for size in by_rank.values() if isinstance(size, int)]
        where = f"rank {next(iter(by_rank))}" if len(sizes) == 1 else counted(len(sizes), "rank")
        balance = f"{min(sizes):,.3f} to {max(sizes):,.3f}" if len(sizes) > 1 else ""
        facts = [one.get(name, "") for name in ("table", "rows", "dim", "store", "type")]
        rows.append([*facts, sum(sizes), where, balance])
    rows.sort(key=lambda row: -row[5])
    known = sum(row[1] for row in rows if isinstance(row[1], int))
    size = sum(row[5] for row in rows)
    words = f"{counted(len(rows), 'table')}, {known:,} rows, {size:,.1f} MB with the state of their optimizer."
    if hit := run.curves.get("train/store_hit"):
        words += f" Of the rows that steps needed, {hit.points[-1][1]:.1%} were in the cache at the last report."
    header = ["table", "rows", "width", "store", "sharding", "MB", "on", "MB by rank"]
    cells = [
        [f"{cell:,.3f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell for cell in row]
        for row in rows[:_MAX_ROWS]
    ]
    rest = page.missing(f"The {_MAX_ROWS} largest are listed.") if len(rows) > _MAX_ROWS else ""
    return f"<p>{text(words)}</p>{page.table(header, cells)}{rest}"


def _checkpoints(run: Facts) -> str:
    if not run.checkpoints:
        return page.missing(run.no_checkpoints or "No checkpoint was saved.")
    waits = run.recordings.saves if run.recordings else {}
    rows = []
    for one in run.checkpoints[-_MAX_ROWS:]:
        waited = f"{waits[one['step']]:.3f}" if one["step"] in waits else ""
        is_good = one["health"] == "complete"
        facts = [f"{one['step']:,}", one.get("epoch", ""), one.get("kind", "corrupt"), f"{one['bytes'] / 1e6:,.1f}"]
        state = ("best" if one["is_best"] else "complete") if is_good else one["health"]
        rows.append([*facts, waited, one.get("saved_at", ""), state])
    header = ["step", "epoch", "kind", "MB", "training waited, s", "saved", ""]
    return page.table(header, rows)


def _timeline(run: Facts) -> str:
    """Draw what rank 0 did during the run, and some steps of all ranks."""
    recorded = run.recordings
    if recorded is None:
        return page.missing("Nothing was recorded (trace/): observe.record = false, or an earlier version of Recmill.")
    axis = [human_time(recorded.seconds * share) for share in (0, 0.25, 0.5, 0.75, 1)]
    between = f" ({counted(len(recorded.starts), 'start')}; the time between them is left out)"
    order = ("start-up", "training", "validate", "save", "test")
    whole = {name: recorded.run[name] for name in order if name in recorded.run}
    drawn = lanes(f"The run{between if len(recorded.starts) > 1 else ''}", [("first rank", whole)], axis)
    first, last = recorded.zoom_steps
    rows = []
    for rank, track in sorted(recorded.zoom, key=lambda lane: (lane[0], TRACKS.index(lane[1]))):
        lane = recorded.zoom[rank, track]
        ordered = sorted(lane, key=lambda name: name == "exchange")  # which is within other parts
        rows.append((f"rank {rank} {track}", {name: lane[name] for name in ordered}))
    millis = [f"{1e3 * recorded.zoom_seconds * share:.3g} ms" for share in (0, 0.25, 0.5, 0.75, 1)]
    drawn += lanes(f"Steps {first:,} to {last:,}", rows, millis)
    command = shlex.join(["recmill", "trace", run.name])
    return drawn + f"<p>All of it, for Perfetto: <code>{text(command)}</code></p>"


def hosts_of(run: Facts) -> list[dict[str, Any]]:
    hosts = run.environment.get("hosts")
    return [host for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []


def _environment(run: Facts) -> str:
    known = run.environment
    if not known:
        return page.missing("The environment is unknown (env.json is missing).")
    flat: dict[str, object] = {}
    for name, value in known.items():
        if isinstance(value, dict):
            flat |= {f"{name}: {key}" if name != "packages" else key: inner for key, inner in value.items()}
        elif name != "hosts" and value is not None:
            flat[name] = value
    hosts = [
        [
            *(host.get("name", ""), len(host.get("ranks") or []), host.get("cpu", ""), host.get("cores", "")),
            *(host.get("memory_gb", ""), host.get("kernel", ""), ", ".join(map(str, host.get("gpus") or [])) or "none"),
        ]
        for host in hosts_of(run)
    ]
    header = ["host", "ranks", "CPU", "cores", "memory GB", "kernel", "GPUs"]
    listed = page.table(header, hosts[:_MAX_ROWS]) if hosts else page.missing("Its hosts were not recorded.")
    rest = page.missing(f"{_MAX_ROWS} of {len(hosts)} hosts are listed.") if len(hosts) > _MAX_ROWS else ""
    return listed + rest + page.pairs(dict([*flat.items()][:200]))


def _config(run: Facts) -> str:
    try:
        content = read_small(run.path / "config.toml").decode(errors="replace")
    except (OSError, ValueError):
        return page.missing("The run has no readable config.toml.")
    cut = page.missing("The rest is in config.toml.") if len(content) > _MAX_CONFIG else ""
    return page.preformatted(content[:_MAX_CONFIG], "columns") + cut


def _repeat(run: Facts) -> str:
    """Return the commands that give the same run, and those that look at this one."""
    if not (run.path / "config.toml").is_file():
        return page.missing("Without its config.toml, this run cannot be repeated.")
    size = run.environment.get("world_size")
    hosts = len(hosts_of(run)) or 1
    train = ["recmill", "train", str(run.path / "config.toml"), "--run", f"{run.name}-again"]
    if isinstance(size, int) and size > 1:
        launch = ["recmill", "launch", *train[2:], "--on", str(run.environment.get("launcher") or "slurm")]
        train = (
            [*launch, "--nodes", str(hosts), "--procs", str(size // hosts)]
            if hosts > 1
            else [*train, "--procs", str(size)]
        )
    lines = [_prepare_command(run), shlex.join(train)]
    lines += [shlex.join(["recmill", command, run.name]) for command in _COMMANDS_OF_RUN]
    commit = run.environment.get("git_commit")
    about = f"<p>The code is commit <code>{text(commit)}</code>.</p>" if commit else ""
    return about + page.preformatted("\n".join(filter(None, lines)))


def _prepare_command(run: Facts) -> str:
    """Return the command that made the dataset, if Recmill made it and it is still there."""
    with suppress(UserError, OSError):
        _, settings = read_settings(run.path / "config.toml")
        made = open_dataset(settings.data.path).description
        if made.name not in registry.DATASETS:
            return ""
        words = ["recmill", "prepare", made.name, "--output", settings.data.path]
        words += ["--input", "RAW_FILES"] if "files" in made.recipe else []
        for name, value in made.recipe.items():
            given = ",".join(map(str, value)) if isinstance(value, list) else value
            if name == "files" or given in (None, "", False):
                continue
            words += [f"--{name.replace('_', '-')}", *([] if given is True else [str(given)])]
        return shlex.join(words)
    return ""


SECTIONS: dict[str, Callable[[Facts], str]] = {
    "Where the time went": _time,
    "Ranks": _ranks,
    "Machine": _machine,
    "Timeline": _timeline,
    "Tables": _tables,
    "Checkpoints": _checkpoints,
    "Environment": _environment,
    "Config": _config,
    "How to repeat it": _repeat,
}
