"""What `recmill plan` prints: memory, speed and what would make the tables fit."""

from collections.abc import Sequence
from typing import Any

from recmill.observe.printed import counted, print_line, print_table
from recmill.observe.progress import human_bytes, human_rate, human_time

_HELD = {name: name for name in ("rows", "state", "gradients", "cache")} | {"looked_up": "activations", "ids": "ids"}


def print_plan(report: Any) -> None:
    """Print a `commands.plan.PlanReport`."""
    site = report.site
    machines = f"{counted(site.nodes, 'machine')} with {counted(site.procs, 'process')}{' each' * (site.nodes > 1)}"
    print_line(f"{report.config} on {machines}, {report.device}; rows of tables: {report.sizes_from}")
    print_line()
    held = [name for name in _HELD if any(getattr(table.bytes, name) for table in report.tables)]
    tables = sorted(report.tables, key=lambda table: -table.bytes.total)
    rows = [
        [t.table, f"{t.rows:,}", str(t.dim), t.sharding, t.ranks, *(_mb(getattr(t.bytes, name)) for name in held)]
        for t in tables
    ]
    print_table(["table", "rows", "dim", "sharding", "process", *(f"MB of {_HELD[name]}" for name in held)], rows)
    print_line()
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
    print_line()
    print_device(site.device)
    _print_scaling(report.scaling)
    print_line()
    _print_forecast(report)
    _print_fit(report)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _print_fit(report: Any) -> None:
    if report.site.device.kind == "cuda":
        most = human_bytes(max(rank.checkpoint_copy for rank in report.ranks))
        print_line(f"host memory: a checkpoint copies up to {most} of each process")
    margin = min(rank.margin for rank in report.ranks)
    if report.fits:
        print_line(f"memory: fits, with {human_bytes(margin)} to spare on the fullest process")
        return
    print_line(f"memory: DOES NOT FIT, {human_bytes(-margin)} too little on the fullest process")
    for number, change in enumerate(report.changes):
        word = "first change that fits" if number == 0 else "or"
        print_line(f"  {word}: {change}  (planned again: fits, with {human_bytes(change.margin)} to spare)")
    if not report.changes:
        print_line("  no single change of sharding, store, machines, optimizer or batch makes it fit")


def _print_forecast(report: Any) -> None:
    step, run, size = report.step, report.run, report.site.size
    disk = f"a checkpoint {human_bytes(report.checkpoint_bytes)}, all that are kept {human_bytes(report.disk_bytes)}"
    print_line(f"disk: {disk}{f', dataset {human_bytes(report.dataset_bytes)}' if report.dataset_bytes else ''}")
    if report.preparation_hours:
        print_line(f"preparation: {report.preparation_hours:.1f} h on two cores, at the rate measured there")
    parts = ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in step.as_dict().items() if name != "total")
    print_line(f"step: {1e3 * step.total:,.2f} ms ({parts})")
    print_line(
        f"speed: {human_rate(report.samples_per_s)} samples/s, {human_rate(report.samples_per_s / size)} per process"
    )
    print_line(f"verdict: {run.verdict.text}")
    if run.steps:
        spent = f"training {human_time(run.training)}, validation {human_time(run.validating)}"
        print_line(f"run: {run.steps:,} steps, {run.hours:,.2f} h ({spent}, checkpoints {human_time(run.saving)})")
    if report.cost is None:
        print_line("cost: not known, because the number of steps is not. Give --samples.")
    elif report.cost:
        print_line(f"cost: {report.cost:,.2f}")


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
        print_line()
        print_table(["processes", "machines", "fits", "ms per step", "samples/s", "efficiency", "verdict"], rows)


def print_device(device: Any) -> None:
    """Print the facts about a device from which a forecast is made."""
    fields = type(device).model_fields
    rows = [[name, f"{value:g}" if isinstance(value, float) else str(value)] for name, value in device]
    print_table(["fact", "value", "meaning"], [[*row, fields[row[0]].description] for row in rows])
