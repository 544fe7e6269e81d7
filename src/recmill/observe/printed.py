"""What commands print: plain aligned columns, for people and for tools like awk."""

import io
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any
from unicodedata import combining, east_asian_width

from recmill.observe.progress import human_bytes

Row = Sequence[str]
Values = Mapping[str, float | int | str]  # metrics by name
_CONSPICUOUS = 0.5  # share of the values of a feature that are missing or unseen, if that of training is not known
_LARGE = 1e6  # larger numbers are shown like 5.5e+32
_AT_1 = re.compile(r"(ndcg|mrr)@1$")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """Return the text with escapes like \\x1b for what a terminal would act on; `keep`: characters left as they are.

    These are control characters, line breaks, changes of the writing direction and undecodable bytes of file names.
    Ids, titles, column names and paths may contain them.
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def printed_text(print_it: Callable[..., None], *arguments: Any) -> str:
    """Return what a function prints, in lines that fit the terminal if there is one."""
    text = io.StringIO()
    text.isatty = sys.stdout.isatty  # type: ignore[method-assign]
    with redirect_stdout(text):
        print_it(*arguments)
    return text.getvalue().removesuffix("\n")


class Printed(dict[str, Any]):
    """A dictionary whose representation, in a notebook for example, is what the command prints of it."""

    def __init__(self, values: Mapping[str, Any], print_it: Callable[..., None]) -> None:
        super().__init__(values)
        self._print_it = print_it

    def __repr__(self) -> str:
        return printed_text(self._print_it, self)


def print_line(text: str = "", indent: int = 0) -> None:
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
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    padded = ([cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def _width(text: str) -> int:
    """Return how many columns of a terminal the text takes: Chinese characters take two, combining accents none."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 0 if combining(c) else 1 for c in text)


def print_table(header: Row, rows: Sequence[Row]) -> None:
    widths = [max(_width(escaped(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
    last = sum(widths[:-1]) + 2 * (len(widths) - 1)  # where the last column starts: its cells continue there
    if sys.stdout.isatty():
        widths[-1] = max(min(widths[-1], shutil.get_terminal_size().columns - last), 1)
    for line in table_lines([header, ["-" * width for width in widths], *rows]):
        print_line(line, last)


def print_columns(labels: Row, columns: Sequence[Row], references: Sequence[Row] = ()) -> None:
    """Print the labels and as many columns as the terminal has room for, then again with the next ones.

    The columns `references` follow the first ones, if there is room. Rows without a value are left out.
    """
    width = shutil.get_terminal_size((10_000, 0)).columns

    def block(count: int) -> list[Row]:
        header, *rows = zip(labels, *columns[:count], *references, strict=True)
        return [header, *(row for row in rows if any(row[1:]))]

    def fits(count: int) -> bool:
        return max(map(_width, table_lines(block(count)))) <= width

    count = next(filter(fits, range(len(columns), 0, -1)), 0)
    if not count and references:
        print_columns(labels, [*columns, *references])
        return
    header, *rows = block(count or 1)
    print_table(header, rows)
    if rest := columns[count or 1 :]:
        print_line()
        print_columns(labels, rest)


def print_command(before: str, command: str) -> None:
    """Print a command without line breaks, which would end it where it is pasted."""
    print(f"{escaped(before)}{escaped(command)}")


def print_prepared(description: dict[str, Any], next_command: str) -> None:
    """Print what `recmill prepare` made, and the command that trains on it."""
    print_dataset(description)
    print_command("next: ", next_command)


def print_dataset(description: dict[str, Any]) -> None:
    size = human_bytes(sum(file["bytes"] for file in description["files"].values()))
    if description["kind"] == "clicks":
        rows = {split: sum(r["stop"] - r["start"] for r in ranges) for split, ranges in description["splits"].items()}
        counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
        dense = description["dense"]
        flags = sum(name.removesuffix(" is missing") in dense for name in dense if name.endswith(" is missing"))
        numeric = f"{len(dense) - flags} numeric{f' (+ {flags} missing flags)' if flags else ''}"
        features = f"{numeric}, {len(description['sparse'])} categorical features"
        print_line(f"{description['name']}: rows {counts}; {features}; {size}")
    else:
        print_line(
            f"{description['name']}: {description['num_users']:,} users, {description['num_items']:,} items, "
            f"{description['num_interactions']:,} interactions; {size}"
        )
    for split, values in description["truth"].items():
        print_line(f"best reachable, {split}:")
        for line in _metric_lines(values, shutil.get_terminal_size().columns):
            print_line(line)


def print_audit(report: Any) -> None:
    """Print a `commands.audit.AuditReport`."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{share:.2%}"

    parts = []
    for part in report.parts:
        rate = None if part.split == "unlabelled" else part.clicks / part.rows
        parts.append([part.day, part.split, f"{part.rows:,}", percent(rate), part.dense])
    has_transforms = any(part.dense for part in report.parts)  # else a schema says what they are
    titles = ["day", "split", "rows", "label rate", "dense values"][: None if has_transforms else -1]
    print_table(titles, [row[: len(titles)] for row in parts])
    print_line()
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
    header = ["table", "rows", "ids in train", *rare, *(f"{what} in {split}" for split in splits)]
    labels, *columns = zip(header, *tables, strict=True)
    print_columns(labels, columns)
    print_line()
    print_line(
        f"rows: {sum(report.rows.values()):,} in all; " + ", ".join(f"{s} {n:,}" for s, n in report.rows.items())
    )
    print_line("table sizes: " + ",".join(str(table.rows) for table in report.tables))
    for finding in report.findings:
        print_line(f"{'FAILURE' if finding.kind == 'failure' else finding.kind} {finding.text}")
    print_line(f"audit: {report.num_failures or 'no'} failure{'' if report.num_failures == 1 else 's'}")


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
        print_line(f"step {values['step']:,}: {values['checkpoint']}")


def print_guess(guessed: dict[str, Any]) -> None:
    """Print each column with what it was taken for and why."""
    print_table(["column", "guess", "why"], [list(row.values()) for row in guessed["columns"]])


def print_schema(guessed: dict[str, Any]) -> None:
    """Print the guess, then where the schema is, or the schema itself."""
    print_guess(guessed)
    if guessed["output"]:
        words = ["--schema", guessed["output"], "--input", guessed["input"], "--output", "data/mine"]
        print_line(f"check {guessed['output']}, then:")
        print_command("", shlex.join(["recmill", "prepare", "clicks", *words]))
        return
    for line in ["", *guessed["schema"].splitlines()]:
        print_line(line)


def print_items(written: dict[str, Any]) -> None:
    """Print what `recmill items` wrote."""
    what = "items" if "items" in written else "requests"
    print_line(f"{written[what]:,} {what}, vectors of {written['dim']} dims: {written['output']}")


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
    if written["bad_values"]:
        counts = ", ".join(f"{feature} {count:,}" for feature, count in written["bad_values"].items())
        print_line(f"bad values, taken as missing: {counts}")
    if "metrics" in written:
        print_values("rows with labels", written["metrics"], {})
    print_line(f"{written['rows']:,} rows scored: {written['output']}")


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
    print_line()
    if found["best"] is None:
        print_line("no trial was completed: see what they printed, trials/NUMBER.txt")
        return
    print_line(f"best: trial {found['best']}, whose config is {found['config']}")
    print_command("next: ", found["next"])


def print_explanation(found: dict[str, Any]) -> None:
    """Print what `commands.explain.explanation` returns."""
    if "items" in found:
        target = found["target"]
        print_line(f"first recommendation: {target['title']} ({target['item']}), score {target['score']:.4f}")
        rows = [[str(x["position"]), x["item"], f"{x['effect']:+.4f}", x["title"]] for x in found["items"]]
        print_table(["position", "item", "effect", "title"], rows)
        return
    print_line(f"AUROC {found['auroc']:.4f} on {found['rows']:,} rows of the validation split")
    rows = [
        [x["feature"], f"{x['drop']:.5f}", f"{x['spread']:.5f}", "" if x["unseen"] is None else _percent(x["unseen"])]
        for x in found["features"]
    ]
    print_table(["feature", "AUROC lost", "spread", "% unseen"], rows)


def _shares(here: float, training: float | None) -> str:
    return _percent(here) if training is None else f"{_percent(here)} / {_percent(training)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def state_text(report: Any) -> str:
    return "done" if report.state == "done" else f"{report.state} at step {report.step:,}"


def print_recommendations(rows: Sequence[dict[str, Any]]) -> None:
    columns = [column for column in ("user", "rank", "item", "title") if rows and column in rows[0]]
    if all(str(row["item"]) == row.get("title") for row in rows):  # the dataset has no titles
        columns = [column for column in columns if column != "title"]
    cells = [[*(str(row[column]) for column in columns), f"{row['score']:.3f}"] for row in rows]
    print_table([*columns, "score"], cells)


def print_written_recommendations(written: dict[str, Any]) -> None:
    who = "users" if "users" in written else "requests"
    print_line(f"{written['rows']:,} rows for {written[who]:,} {who}: {written['output']}")


def print_checks(checks: Sequence[Any], would_work: bool) -> None:
    """Print a list of `commands.doctor.Check`."""
    rows = [[check.name, "ok" if check.is_good else "PROBLEM", check.found] for check in checks]
    print_table(["check", "", "found"], rows)
    for check in checks:
        if not check.is_good:
            print_line(f"{check.name}: {check.remedy}")
    print_line("Training would work." if would_work else "Training would not work until the problems above are fixed.")


def print_outcomes(outcomes: Sequence[Any]) -> None:
    """Print what `commands.check_plugin` found: each check with its rule and, if it fails, the problem."""
    for outcome in outcomes:
        verdict = "FAIL" if outcome.problem else "skip" if outcome.cause else "pass"
        print_line(f"{verdict}  {outcome.check}", 6)
        print_line(f"      rule: {outcome.rule}", 6)
        if outcome.problem:
            print_line(f"      problem: {outcome.problem}", 6)
        if outcome.cause:
            print_line(f"      the problem of: {outcome.cause}", 6)
    failed, skipped = (sum(bool(getattr(one, kind)) for one in outcomes) for kind in ("problem", "cause"))
    passed = f"{counted(len(outcomes), 'check')}: {len(outcomes) - failed - skipped} passed, {failed} failed"
    print_line(f"{passed}, {skipped} skipped" if skipped else passed)


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
            print_line(facts["health"])


def print_checkpoint(facts: dict[str, Any]) -> None:
    print_line(facts["path"])
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
    print_line(f"{facts['path']}: {facts['rows']:,} rows of table {facts['table']} at step {facts['step']:,}")


def print_imported_rows(facts: dict[str, Any]) -> None:
    of_table = f"{facts['rows']:,} rows of table {facts['table']}"
    print_line(f"{facts['path']}: step {facts['step']:,} of {facts['run']} with {of_table} from {facts['file']}")


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
        print_line(f"note: {note}")
    if merged.clock_error_us is not None:
        apart = f"they were {merged.clocks_apart_us:,.0f} us apart"
        print_line(f"clocks of {counted(merged.ranks, 'rank')} agree within {merged.clock_error_us:,.0f} us ({apart})")
    print_line(f"{merged.output}: {counted(merged.events, 'event')}; open it at https://ui.perfetto.dev")


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
    if run.resume:
        print_command("resume: ", run.resume)
    if run.job:
        print(f"{run.launcher} job {run.job} is {run.job_state}, submitted {run.submitted_at}")


def print_cancelled(jobs: Sequence[str]) -> None:
    print(f"stop requested: {', '.join(jobs)}" if jobs else "no job of this run is queued or running")
