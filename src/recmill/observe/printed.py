"""What commands print: plain aligned columns, for people and for tools like awk."""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recmill.observe.progress import human_bytes, human_rate, human_time

Row = Sequence[str]
Values = Mapping[str, float | int | str]  # metrics by name
_CONSPICUOUS = 0.5  # share of the values of a feature that are missing or unseen, if that of training is not known
_LARGE = 1e6  # larger numbers are shown like 5.5e+32
_NOISE_OF_SPEED = "the difference is at most twice the spread of ten equal parts of the run"
_AT_1 = re.compile(r"(ndcg|mrr)@1$")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """Return the text with escapes like \\x1b for what a terminal would act on; `keep`: characters left as they are.

    These are control characters, line breaks, changes of the writing direction and undecodable bytes of file names.
    Ids, titles, column names and paths may contain them.
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def _print(text: str = "", indent: int = 0) -> None:
    print(fitted(escaped(text), indent) if sys.stdout.isatty() else escaped(text))


def fitted(text: str, indent: int = 0) -> str:
    """Break lines that are longer than the terminal is wide at spaces; it would break them within words."""
    width = shutil.get_terminal_size().columns
    if indent > width // 2:
        indent = 0
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return one line per row, with its cells in aligned columns."""
    rows = [list(map(escaped, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def print_table(header: Row, rows: Sequence[Row]) -> None:
    widths = [max(len(escaped(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
    last = sum(widths[:-1]) + 2 * (len(widths) - 1)  # where the last column starts: its cells continue there
    if sys.stdout.isatty():
        widths[-1] = max(min(widths[-1], shutil.get_terminal_size().columns - last), 1)
    for line in table_lines([header, ["-" * width for width in widths], *rows]):
        _print(line, last)


def print_dataset(description: dict[str, Any]) -> None:
    size = human_bytes(sum(file["bytes"] for file in description["files"].values()))
    if description["kind"] == "clicks":
        rows = {split: sum(r["stop"] - r["start"] for r in ranges) for split, ranges in description["splits"].items()}
        counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
        features = f"{len(description['dense'])} dense, {len(description['sparse'])} sparse features"
        _print(f"{description['name']}: rows {counts}; {features}; {size}")
    else:
        _print(
            f"{description['name']}: {description['num_users']:,} users, {description['num_items']:,} items, "
            f"{description['num_interactions']:,} interactions; {size}"
        )
    for split, values in description["truth"].items():
        _print(f"best reachable, {split}:")
        for line in _metric_lines(values, shutil.get_terminal_size().columns):
            _print(line)


def print_audit(report: Any) -> None:
    """Print a `commands.audit.AuditReport`."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{share:.2%}"

    parts = []
    for part in report.parts:
        rate = None if part.split == "unlabelled" else part.clicks / part.rows
        parts.append([part.day, part.split, f"{part.rows:,}", percent(rate), part.dense])
    has_transforms = any(part.dense for part in report.parts)  # else a schema says what they are
    columns = ["day", "split", "rows", "label rate", "dense values"][: None if has_transforms else -1]
    print_table(columns, [row[: len(columns)] for row in parts])
    _print()
    splits = list(report.shared_rows)
    has_rare = any(table.rare_in_train is not None for table in report.tables)
    what = "rare, new" if any(table.unseen_or_rare for table in report.tables) else "unseen"
    tables = [
        [
            table.name,
            f"{table.rows:,}",
            "" if table.ids_in_train is None else f"{table.ids_in_train:,}",
            *([percent(table.rare_in_train)] if has_rare else []),
            *(percent((table.unseen_or_rare or table.unseen).get(split)) for split in splits),
        ]
        for table in report.tables
    ]
    rare = ["rare in train"] if has_rare else []
    print_table(["table", "rows", "ids in train", *rare, *(f"{what} in {split}" for split in splits)], tables)
    _print()
    _print(f"rows: {sum(report.rows.values()):,} in all; " + ", ".join(f"{s} {n:,}" for s, n in report.rows.items()))
    _print("table sizes: " + ",".join(str(table.rows) for table in report.tables))
    for finding in report.findings:
        _print(f"{'FAILURE' if finding.kind == 'failure' else finding.kind} {finding.text}")
    _print(f"audit: {report.num_failures or 'no'} failure{'' if report.num_failures == 1 else 's'}")


def validation_text(step: int, values: Values, headline: str, best: tuple[int, float | None], width: int) -> str:
    """Return the headline metric beside its best value so far, and below it the others, in columns of `width`."""
    best_step, best_value = best
    note = "best so far" if best_step == step else f"best {shown(best_value)} at step {best_step:,}"
    line = f"step {step:,}  validation  {headline} {shown(values[headline])}  {note if best_step else ''}".rstrip()
    others = {name: value for name, value in values.items() if name != headline and not isinstance(value, int)}
    return "\n".join([line, *_metric_lines(others, width)])


def _metric_lines(values: Values, width: int) -> list[str]:
    """Return names and values in as many columns as fit; each protocol begins a line."""
    cells: dict[str, list[str]] = {}  # by protocol: name, value, name, value, ...
    for name in distinct(values):
        protocol, _, short = name.rpartition("/")
        cells.setdefault(protocol, []).extend([short, shown(values[name])])
    lines: list[str] = []
    for count in range(max(map(len, cells.values()), default=0), 1, -2):
        rows = []
        for protocol, all_cells in cells.items():
            for start in range(0, len(all_cells), count):
                row = [*(["" if start else protocol] * any(cells)), *all_cells[start : start + count]]
                rows.append(row + [""] * (count + any(cells) - len(row)))
        lines = [f"  {line}" for line in table_lines(rows)]
        if max(map(len, lines)) <= width:
            break
    return lines


def distinct(names: Iterable[str]) -> list[str]:
    """Leave out NDCG@1 and MRR@1 where HR@1 is there: the three are the same."""
    known = set(names)
    return [name for name in names if (same := _AT_1.sub("hr@1", name)) == name or same not in known]


def print_values(split: str, values: dict[str, Any], best: dict[str, float]) -> None:
    """Print the metrics of one evaluation; columns without any value are left out."""
    others = ("low", "high", "popularity", "step", "checkpoint")
    names = distinct([name for name in values if name.split("/")[0] not in others])
    columns = {
        "model": [shown(values[name]) for name in names],
        "95 % interval": [
            f"{values[f'low/{name}']:.4f} to {values[f'high/{name}']:.4f}" if f"low/{name}" in values else ""
            for name in names
        ],
        "popularity": [shown(values.get(f"popularity/{name}", "")) for name in names],
        "best reachable": [shown(best.get(name, "")) for name in names],
    }
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    print_table([split, *kept], [*zip(names, *kept.values(), strict=True)])
    if values.get("step") is not None:  # else these are results of an earlier version
        _print(f"step {values['step']:,}: {values['checkpoint']}")


def print_schema(guessed: dict[str, Any]) -> None:
    """Print each column with what it was taken for and why, then where the schema is, or the schema itself."""
    print_table(["column", "guess", "why"], [list(row.values()) for row in guessed["columns"]])
    if guessed["output"]:
        words = ["--schema", guessed["output"], "--input", guessed["input"], "--output", "data/mine"]
        _print(f"check {guessed['output']}, then: {shlex.join(['recmill', 'prepare', 'clicks', *words])}")
        return
    for line in ["", *guessed["schema"].splitlines()]:
        _print(line)


def print_items(written: dict[str, Any]) -> None:
    """Print what `recmill items` wrote."""
    what = "items" if "items" in written else "requests"
    _print(f"{written[what]:,} {what}, vectors of {written['dim']} dims: {written['output']}")


def print_predictions(written: dict[str, Any]) -> None:
    """Print what `recmill predict` wrote, how its rows differ from those of training, and metrics, if it had labels."""
    by_feature: dict[str, dict[str, tuple[float, float | None]]] = {}
    for found in written["features"]:
        by_feature.setdefault(found["feature"], {})[found["kind"]] = found["here"], found["training"]
    kinds = [kind for kind in ("missing", "unseen", "clipped") if any(kind in found for found in by_feature.values())]
    is_known = any(found["training"] is not None for found in written["features"])
    rows = [
        [feature, *("" if k not in found else _shares(*found[k]) for k in kinds)]
        for feature, found in by_feature.items()
        if any(then is not None or here > _CONSPICUOUS for here, then in found.values())
    ]
    if rows:
        print_table(["% here / in training" if is_known else "% here", *kinds], rows)
    if "metrics" in written:
        print_values("rows with labels", written["metrics"], {})
    _print(f"{written['rows']:,} rows scored: {written['output']}")


def print_study(found: dict[str, Any]) -> None:
    """Print what `recmill tune` returns: its trials, and the best one."""
    keys = list(dict.fromkeys(key for trial in found["trials"] for key in trial["values"]))
    rows = [
        [
            f"{trial['number']}{' *' if trial['number'] == found['best'] else ''}",
            trial["state"],
            "" if trial["value"] is None else shown(trial["value"]),
            *(shown(trial["values"].get(key, "")) for key in keys),
            trial["reason"],
        ]
        for trial in found["trials"]
    ]
    print_table(["trial", "state", "best val", *keys, "reason"], rows)
    _print()
    if found["best"] is None:
        _print("no trial was completed: see what they printed, trials/NUMBER.txt")
        return
    _print(f"best: trial {found['best']}, whose config is {found['config']}")
    _print(f"next: {found['next']}")


def print_explanation(found: dict[str, Any]) -> None:
    """Print what `commands.explain.explanation` returns."""
    if "items" in found:
        target = found["target"]
        _print(f"first recommendation: {target['title']} ({target['item']}), score {target['score']:.4f}")
        rows = [[str(x["position"]), x["item"], f"{x['effect']:+.4f}", x["title"]] for x in found["items"]]
        print_table(["position", "item", "effect", "title"], rows)
        return
    _print(f"AUROC {found['auroc']:.4f} on {found['rows']:,} rows of the validation split")
    rows = [
        [x["feature"], f"{x['drop']:.5f}", f"{x['spread']:.5f}", "" if x["unseen"] is None else _percent(x["unseen"])]
        for x in found["features"]
    ]
    print_table(["feature", "AUROC lost", "spread", "% unseen"], rows)


def _shares(here: float, training: float | None) -> str:
    return _percent(here) if training is None else f"{_percent(here)} / {_percent(training)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def print_results(reports: Sequence[Any], deltas: Sequence[Values]) -> None:
    """Print one column per `commands.results.RunReport`, with the differences of its metrics to the first run's."""
    names = distinct(dict.fromkeys(name for report in reports for name in report.values))
    headlines = dict.fromkeys(report.metric for report in reports if report.metric)
    labels = ["test", "model", "state", "best step", "tested step", *(f"best val {metric}" for metric in headlines)]
    columns = []
    for report, delta in zip(reports, deltas, strict=True):
        steps = ["" if step is None else f"{step:,}" for step in (report.best_step, report.tested_step)]
        best = "" if report.best_value is None else shown(report.best_value)
        values = [shown(report.values.get(name, "")) for name in names]
        values = [f"{v} {delta[name]:+.4f}" if name in delta else v for name, v in zip(names, values, strict=True)]
        bests = [best if metric == report.metric else "" for metric in headlines]
        columns.append([report.run, report.model, state_text(report), *steps, *bests, *values])
    columns += [[title, *([""] * (len(labels) - 1)), *cells] for title, cells in _references(reports, names).items()]
    _print_columns([*labels, *names], columns, shutil.get_terminal_size((10_000, 0)).columns)
    for report in reports:
        if report.state != "done" and report.reason:
            _print(f"{report.run}: {state_text(report)}: {report.reason}")


def _references(reports: Sequence[Any], names: Sequence[str]) -> dict[str, list[str]]:
    """Return columns with what popularity reaches and what is reachable, by title, in the order of `names`.

    Where runs on several datasets have the same metric, each dataset has its own columns.
    """
    datasets = [{report.dataset for report in reports if name in report.values} for name in names]
    is_one = all(len(found) == 1 for found in datasets)
    columns = {}
    for dataset in [""] if is_one else list(dict.fromkeys(report.dataset for report in reports)):
        own = [report for report in reports if is_one or report.dataset == dataset]
        for title, attribute in {"popularity": "popularity", "best reachable": "reachable"}.items():
            known = [
                {shown(getattr(report, attribute).get(name, "")) for report in own if name in report.values} - {""}
                for name in names
            ]
            cells = [found.pop() if len(found) == 1 else "differs" if found else "" for found in known]
            if any(cells):
                columns[title if is_one else f"{title}, {dataset}"] = cells
    return columns


def state_text(report: Any) -> str:
    return "done" if report.state == "done" else f"{report.state} at step {report.step:,}"


def _print_columns(labels: Row, columns: Sequence[Row], width: int) -> None:
    """Print the labels and as many columns as fit, then again with the next ones."""
    count = len(columns)
    while count > 1 and any(
        len(line) > width for line in table_lines(list(zip(labels, *columns[:count], strict=True)))
    ):
        count -= 1
    header, *rows = zip(labels, *columns[:count], strict=True)
    print_table(header, rows)
    if columns[count:]:
        _print()
        _print_columns(labels, columns[count:], width)


def print_summary(report: Any, next_command: str) -> None:
    """Print the end of a training, a `commands.results.RunReport`."""
    seconds = f" in {human_time(report.seconds)}" if report.seconds is not None else ""
    rate = f", {human_rate(report.samples_per_s)} samples/s" if report.samples_per_s else ""
    _print(f"{report.model} is trained: {counted(report.step, 'step')}{seconds}{rate}")
    if report.verdict:
        _print(report.verdict)
    if report.best_step is not None:
        _print(f"best validation: {report.metric} {shown(report.best_value)} at step {report.best_step:,}")
    if report.values:
        _print_tested(report)
    _print()
    _print(f"{report.run}/: results.json metrics.jsonl log.txt sharding.json checkpoints/")
    _print(f"next: {next_command}")


def _print_tested(report: Any) -> None:
    _print()
    popularity = {f"popularity/{name}": value for name, value in report.popularity.items()}
    tested = {"step": report.tested_step, "checkpoint": report.checkpoint}
    print_values("test", {**report.values, **popularity, **tested}, report.reachable)
    value, baseline = report.values.get(report.metric), report.popularity.get(report.metric)
    if isinstance(value, float) and isinstance(baseline, float) and value < baseline:
        _print(
            f"warning: {report.metric} {shown(value)} is less than ranking by popularity reaches, {shown(baseline)}. "
            "Train longer (train.num_epochs), or change optim.dense.lr and optim.tables.lr."
        )


def print_recommendations(rows: Sequence[dict[str, Any]]) -> None:
    columns = [column for column in ("user", "rank", "item", "title") if rows and column in rows[0]]
    cells = [[*(str(row[column]) for column in columns), f"{row['score']:.3f}"] for row in rows]
    print_table([*columns, "score"], cells)


def print_comparison(found: Any) -> None:
    """Print a `commands.compare.Comparison`, in 80 columns."""
    for letter, run in zip("AB", found.runs, strict=True):
        words = [run.run, run.model, state_text(run), human_time(run.seconds) if run.seconds is not None else ""]
        for line in textwrap.wrap(f"{letter}  {', '.join(filter(None, words))}", 80, subsequent_indent="   "):
            _print(line)
        for line in textwrap.wrap(run.verdict, 77):
            _print(f"   {line}")
    for title, rows in {"config": found.config, "environment": found.environment}.items():
        cells = [
            [_cut(row.name, 36), *(_cut("-" if x is None else str(x), 20) for x in (row.a, row.b))] for row in rows
        ]
        _print()
        print_table([title, "A", "B"], cells) if cells else _print(f"{title}: no difference")
    if found.warning:
        _print()
        _print(f"warning: {found.warning}")
    _print_measured(found.metrics_of, found.metrics, lambda row: f"{row.b - row.a:+.4f}", shown)
    _print_measured("speed", found.speed, lambda row: f"{row.b / row.a:.2f}" if row.a else "", _short)
    for name, curve in found.curves.items():
        _print()
        rows = [[f"{step:,}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for step, a, b in curve]
        print_table([f"step: {name}", "A", "B", "B - A"], rows)
    _print()
    if found.last_common_step is not None:
        first = found.first_difference
        parted = "are equal" if first is None else f"differ from step {first:,} on"
        _print(f"losses at common steps {parted} (last: {found.last_common_step:,})")
    rules = {found.metrics_of: found.noise_of_metrics, "speed": _NOISE_OF_SPEED if found.speed else ""}
    for what, rule in rules.items():
        for line in textwrap.wrap(f"noise ({what}): {rule}", 80, subsequent_indent="  ") if rule else ():
            _print(line)


def _print_measured(title: str, rows: Sequence[Any], difference: Any, text: Any) -> None:
    cells = [[row.name, text(row.a), text(row.b), difference(row), "same" if row.is_same else ""] for row in rows]
    header = [title, "A", "B", "B / A" if title == "speed" else "B - A", ""]
    width = 3 if any(row.is_same is None for row in rows) else len(header)
    if cells:
        _print()
        print_table(header[:width], [row[:width] for row in cells])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def print_written_recommendations(written: dict[str, Any]) -> None:
    who = "users" if "users" in written else "requests"
    _print(f"{written['rows']:,} rows for {written[who]:,} {who}: {written['output']}")


def print_checks(checks: Sequence[Any], would_work: bool) -> None:
    """Print a list of `commands.doctor.Check`."""
    rows = [[check.name, "ok" if check.is_good else "PROBLEM", check.found] for check in checks]
    print_table(["check", "", "found"], rows)
    for check in checks:
        if not check.is_good:
            _print(f"{check.name}: {check.remedy}")
    _print("Training would work." if would_work else "Training would not work until the problems above are fixed.")


def print_outcomes(outcomes: Sequence[Any]) -> None:
    """Print what `commands.check_plugin` found: each check with its rule and, if it fails, the problem."""
    for outcome in outcomes:
        verdict = "FAIL" if outcome.problem else "skip" if outcome.cause else "pass"
        _print(f"{verdict}  {outcome.check}", 6)
        _print(f"      rule: {outcome.rule}", 6)
        if outcome.problem:
            _print(f"      problem: {outcome.problem}", 6)
        if outcome.cause:
            _print(f"      the problem of: {outcome.cause}", 6)
    failed, skipped = (sum(bool(getattr(one, kind)) for one in outcomes) for kind in ("problem", "cause"))
    passed = f"{counted(len(outcomes), 'check')}: {len(outcomes) - failed - skipped} passed, {failed} failed"
    _print(f"{passed}, {skipped} skipped" if skipped else passed)


def print_checkpoints(found: Sequence[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        known = [str(facts.get(name, "?")) for name in ("epoch", "batch", "kind")]
        size = f"{facts['bytes'] / 1e6:,.1f}"
        mark = "best" if facts["is_best"] else ""
        problem = facts.get("kind", "corrupt").split()[0].upper()  # CORRUPT, COPY or MISSING
        health = "complete" if facts["health"] == "complete" else problem
        rows.append([f"{facts['step']:,}", *known, size, facts.get("saved_at", "?"), mark, health])
    print_table(["step", "epoch", "batch", "kind", "MB", "saved", "", "health"], rows)
    for facts in found:
        if facts["health"] != "complete":
            _print(facts["health"])


def print_checkpoint(facts: dict[str, Any]) -> None:
    _print(facts["path"])
    kind = f"changes of {facts['changed_tensors']} shards since {facts['base']}" if facts["base"] else "full"
    state = {"kind": kind, "saved": facts["saved_at"]} | facts["position"] | facts["origin"]
    state |= state.pop("versions")
    state |= {f"rows of {w['table']}": f"{w['rows']:,} from {w['file']}" for w in facts["written_rows"]}
    print_table(["state", ""], [[name, str(value)] for name, value in state.items()])
    rows = []
    for tensor in facts["tensors"]:
        size = [f"{number:,}" for number in tensor["size"]]
        if tensor["shared_rows"]:  # of a dynamic table, besides those of ids
            size[0] = f"({size[0]} + {tensor['shared_rows']:,})"
        numbers = [str(tensor["shards"]), f"{tensor['bytes'] / 1e6:,.3f}"]
        rows.append([tensor["key"], tensor["table"] or "", " x ".join(size), tensor["dtype"], *numbers])
    print_table(["tensor", "table", "size", "type", "shards", "MB"], rows)


def print_exported_rows(facts: dict[str, Any]) -> None:
    _print(f"{facts['path']}: {facts['rows']:,} rows of table {facts['table']} at step {facts['step']:,}")


def print_imported_rows(facts: dict[str, Any]) -> None:
    of_table = f"{facts['rows']:,} rows of table {facts['table']}"
    _print(f"{facts['path']}: step {facts['step']:,} of {facts['run']} with {of_table} from {facts['file']}")


def counted(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_timeline(merged: Any) -> None:
    """Print an `observe.timeline.Merged`."""
    for note in merged.notes:
        _print(f"note: {note}")
    if merged.clock_error_us is not None:
        apart = f"they were {merged.clocks_apart_us:,.0f} us apart"
        _print(f"clocks of {counted(merged.ranks, 'rank')} agree within {merged.clock_error_us:,.0f} us ({apart})")
    _print(f"{merged.output}: {counted(merged.events, 'event')}; open it at https://ui.perfetto.dev")


_HELD = {name: name for name in ("rows", "state", "gradients", "cache")} | {"looked_up": "activations", "ids": "ids"}


def print_plan(report: Any) -> None:
    """Print a `commands.plan.PlanReport`."""
    site = report.site
    machines = f"{counted(site.nodes, 'machine')} with {counted(site.procs, 'process')}{' each' * (site.nodes > 1)}"
    _print(f"{report.config} on {machines}, {report.device}; rows of tables: {report.sizes_from}")
    _print()
    held = [name for name in _HELD if any(getattr(table.bytes, name) for table in report.tables)]
    tables = sorted(report.tables, key=lambda table: -table.bytes.total)
    rows = [
        [t.table, f"{t.rows:,}", str(t.dim), t.sharding, t.ranks, *(_mb(getattr(t.bytes, name)) for name in held)]
        for t in tables
    ]
    print_table(["table", "rows", "dim", "sharding", "process", *(f"MB of {_HELD[name]}" for name in held)], rows)
    _print()
    dense = "dense" if site.device.kind == "cuda" else "(dense)"
    header = ["process", *(_HELD[name] for name in held), dense, "NCCL", "(layers)", "total MB", "can use"]
    rows = [
        [
            r.ranks,
            *(_mb(getattr(r.tables, name)) for name in held),
            *map(_mb, (r.dense, r.buffers, r.layer_values, r.total, r.usable)),
            f"{_mb(r.checkpoint_peak)}{', waits' * r.checkpoint_waits}",
        ]
        for r in sorted(report.ranks, key=lambda rank: -rank.total)
    ]
    print_table([*header, "at a checkpoint"], rows)
    _print()
    print_device(site.device)
    _print_scaling(report.scaling)
    _print()
    _print_forecast(report)
    _print_fit(report)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _print_fit(report: Any) -> None:
    if report.site.device.kind == "cuda":
        most = human_bytes(max(rank.checkpoint_copy for rank in report.ranks))
        _print(f"host memory: a checkpoint copies up to {most} of each process")
    margin = min(rank.margin for rank in report.ranks)
    if report.fits:
        _print(f"memory: fits, with {human_bytes(margin)} to spare on the fullest process")
        return
    _print(f"memory: DOES NOT FIT, {human_bytes(-margin)} too little on the fullest process")
    for number, change in enumerate(report.changes):
        word = "first change that fits" if number == 0 else "or"
        _print(f"  {word}: {change}  (planned again: fits, with {human_bytes(change.margin)} to spare)")
    if not report.changes:
        _print("  no single change of sharding, store, machines, optimizer or batch makes it fit")


def _print_forecast(report: Any) -> None:
    step, run, size = report.step, report.run, report.site.size
    disk = f"a checkpoint {human_bytes(report.checkpoint_bytes)}, all that are kept {human_bytes(report.disk_bytes)}"
    _print(f"disk: {disk}{f', dataset {human_bytes(report.dataset_bytes)}' if report.dataset_bytes else ''}")
    if report.preparation_hours:
        _print(f"preparation: {report.preparation_hours:.1f} h on two cores, at the rate measured there")
    parts = ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in step.as_dict().items() if name != "total")
    _print(f"step: {1e3 * step.total:,.2f} ms ({parts})")
    _print(
        f"speed: {human_rate(report.samples_per_s)} samples/s, {human_rate(report.samples_per_s / size)} per process"
    )
    _print(f"verdict: {run.verdict.text}")
    if run.steps:
        spent = f"training {human_time(run.training)}, validation {human_time(run.validating)}"
        _print(f"run: {run.steps:,} steps, {run.hours:,.2f} h ({spent}, checkpoints {human_time(run.saving)})")
    if report.cost is None:
        _print("cost: not known, because the number of steps is not. Give --samples.")
    elif report.cost:
        _print(f"cost: {report.cost:,.2f}")


def _print_scaling(scaling: Sequence[Any]) -> None:
    rows = [
        [
            f"{s.ranks:,}",
            f"{s.nodes:,}",
            "yes" if s.fits else "no",
            f"{1e3 * s.step.total:,.2f}",
            human_rate(s.samples_per_s),
            f"{100 * s.samples_per_s * scaling[0].ranks / (s.ranks * scaling[0].samples_per_s):.0f} %",
            s.verdict.partition(":")[0],
        ]
        for s in scaling
    ]
    if rows:
        _print()
        print_table(["processes", "machines", "fits", "ms per step", "samples/s", "efficiency", "verdict"], rows)


def print_device(device: Any) -> None:
    """Print the facts about a device from which a forecast is made."""
    fields = type(device).model_fields
    rows = [[name, f"{value:g}" if isinstance(value, float) else str(value)] for name, value in device]
    print_table(["fact", "value", "meaning"], [[*row, fields[row[0]].description] for row in rows])


def print_launch(launched: Any, is_dry_run: bool) -> None:
    """Print the script of a job that is not submitted, or how to follow one that is."""
    if is_dry_run:
        sys.stdout.write(launched.text)
        return
    run = shlex.quote(str(launched.job.run))
    for record in launched.records:
        nodes = counted(record.nodes, "node")
        print(f"{record.launcher} job {record.id}: {nodes}, {counted(record.procs, 'process')} each")
    if launched.records:
        print(f"next: recmill status {run}; recmill logs {run} --follow; recmill cancel {run}")
    elif launched.job.place.starts_on_each_node:
        print(f"start this on each of {', '.join(launched.job.place.hosts)}: {launched.command}")


def print_status(run: Any) -> None:
    print(f"{run.state} at step {run.step:,}" + (f": {run.reason}" if run.reason else ""))
    if run.job:
        print(f"{run.launcher} job {run.job} is {run.job_state}, submitted {run.submitted_at}")


def print_cancelled(jobs: Sequence[str]) -> None:
    print(f"stop requested: {', '.join(jobs)}" if jobs else "no job of this run is queued or running")
