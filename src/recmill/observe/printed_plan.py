"""What `recmill plan` prints: memory, speed and what would make the tables fit."""

from collections.abc import Sequence
from typing import Any

from recmill.observe.printed import counted, print_columns, print_line, print_table
from recmill.observe.progress import human_bytes, human_rate, human_time

_LARGEST = 5  # tables that are shown
_SHORT = 10.0  # seconds that are shown with a fraction
_HELD = {name: name for name in ("rows", "state", "gradients", "cache")} | {"looked_up": "activations", "ids": "ids"}


def print_plan(report: Any, has_details: bool) -> None:
    """Print a `commands.plan.PlanReport`; with details, all tables and the facts about the device as well."""
    site = report.site
    machines = f"{counted(site.nodes, 'machine')} with {counted(site.procs, 'process')}{' each' * (site.nodes > 1)}"
    print_line(f"{report.config} on {machines}, {report.device}; rows of tables: {report.sizes_from}")
    print_line()
    held = [name for name in _HELD if any(getattr(table.bytes, name) for table in report.tables)]
    largest = sorted(report.tables, key=lambda table: -table.bytes.total)
    tables = largest if has_details else largest[:_LARGEST]
    columns = [
        ["rows", *(f"{t.rows:,}" for t in tables)],
        ["dim", *(str(t.dim) for t in tables)],
        ["sharding", *(t.sharding for t in tables)],
        ["process", *(t.ranks for t in tables)],
        *(
            [_HELD[name] if name != "rows" else "size", *(_size(getattr(t.bytes, name)) for t in tables)]
            for name in held
        ),
    ]
    labels = ["table", *(t.table.removeprefix("table_") for t in tables)]
    if len(tables) < len(largest):
        labels.append(f"all {len(largest)}")
        sums = [_size(sum(getattr(t.bytes, name) for t in largest)) for name in held]
        for column, total in zip(columns, [f"{sum(t.rows for t in largest):,}", "", "", "", *sums], strict=True):
            column.append(total)
    print_columns(labels, columns)
    print_line()
    _print_memory(report, held)
    print_line()
    if has_details:
        print_device(site.device)
    else:
        print_line("(--details: all tables, and the facts about the device behind the forecast below)")
    _print_scaling(report.scaling)
    print_line()
    _print_forecast(report)
    _print_fit(report)


def _print_memory(report: Any, held: Sequence[str]) -> None:
    """Print what a process holds, one column for each group of processes that hold the same."""
    is_cuda = report.site.device.kind == "cuda"
    parts = {_HELD[name]: [getattr(rank.tables, name) for rank in report.ranks] for name in held}
    parts["dense"] = [rank.dense for rank in report.ranks]
    parts["NCCL"] = [rank.buffers for rank in report.ranks]
    parts["layers"] = [rank.layer_values for rank in report.ranks]
    cells = {name: [*map(_size, values)] for name, values in parts.items() if any(values)}
    # On CPU dense layers are in host memory, as the rest of the process: not counted as memory of tables.
    outside = ("layers",) if is_cuda else ("dense", "layers")
    cells = {f"({name})" if name in outside else name: values for name, values in cells.items()}
    cells["total"] = [_size(rank.total) for rank in report.ranks]
    cells["at a checkpoint"] = [f"{_size(r.checkpoint_peak)}{', waits' * r.checkpoint_waits}" for r in report.ranks]
    cells["can use"] = [_size(rank.usable) for rank in report.ranks]
    order = sorted(range(len(report.ranks)), key=lambda number: -report.ranks[number].total)
    columns = [[f"process {report.ranks[n].ranks}", *(values[n] for values in cells.values())] for n in order]
    print_columns(["memory", *cells], columns)
    print_line("(in brackets: not in the total)")


def _size(count: int) -> str:
    return human_bytes(count) if count else "0"


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
        times = (3600 * run.hours, run.training, run.validating, run.saving)
        total, training, validating, saving = (f"{t:.2f} s" if t < _SHORT else human_time(t) for t in times)
        parts = f"training {training}, validation {validating}, checkpoints {saving}"
        print_line(f"run: {run.steps:,} steps, {total} ({parts})")
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
