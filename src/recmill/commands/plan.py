"""`recmill plan`: what a run needs and how fast it will be on given machines, before it is started anywhere."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pydantic import NonNegativeFloat, PositiveInt

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import flag
from recmill.config import Config, Overrides, load_config, override_texts
from recmill.config.options import checked_options, given_path
from recmill.config.sections import Section
from recmill.environment import config_variables
from recmill.errors import ConfigError, ResourceError, did_you_mean_path
from recmill.observe.log import quiet_libraries
from recmill.observe.printed import printed_text
from recmill.observe.printed_plan import print_plan
from recmill.observe.progress import spinner
from recmill.observe.verdict import Hints
from recmill.planning.devices import Site, read_device
from recmill.planning.published import PREPARED_ROWS_PER_S, PUBLISHED, described, read_sizes
from recmill.schema import SPLITS, Dataset, HistoriesDescription
from recmill.tables.libraries import import_libraries

if TYPE_CHECKING:
    from recmill.planning.changes import Change
    from recmill.planning.forecast import RunTime, StepTime
    from recmill.planning.memory import RankMemory, TableMemory
    from recmill.planning.work import Case, Samples

_MAX_SCALE = 1024  # processes


class Options(Section):
    nodes: PositiveInt = flag(1, "Number of machines.")
    procs: PositiveInt = flag(1, "Processes per machine; one per GPU.")
    device: str = flag(
        "cpu", "What processes compute with: cpu, a100-40gb, h100-80gb, or a file of facts.", metavar="NAME|FILE.toml"
    )
    memory_gb: NonNegativeFloat = flag(0.0, "Memory of a machine, or of each GPU, in GB; 0: the device's.")
    rows: str | None = flag(
        None,
        "Rows of each table, if the dataset is not here: numbers, a file of them, or a published dataset.",
        metavar="N,N,...|FILE|NAME",
    )
    ids_per_row: list[PositiveInt] | None = flag(None, "Ids per row of each table, with --rows.  [default: 1]")
    samples: PositiveInt | None = flag(None, "Training samples of an epoch, with --rows; of histories: users.")
    overrides: list[str] = flag(
        [], "Change a config key, like sharding.default=row_wise.", "--set", metavar="KEY=VALUE"
    )
    price_per_hour: NonNegativeFloat = flag(0.0, "Price of a machine for an hour.")
    scaling: bool = flag(False, "Plan for 1 to 1,024 processes as well; takes a minute.")
    plot: str | None = flag(
        None, "Draw how speed grows with processes: an SVG file; implies --scaling.", metavar="FILE"
    )


class PlanOptions(TypedDict, total=False):
    nodes: int
    procs: int
    device: str
    memory_gb: float
    rows: str | None
    ids_per_row: list[int] | None
    samples: int | None
    overrides: Overrides
    price_per_hour: float
    scaling: bool
    plot: str | None


@dataclass(frozen=True)
class Scale:
    """The forecast for another number of processes; the global batch stays the same."""

    ranks: int
    nodes: int
    fits: bool
    step: "StepTime"
    samples_per_s: float
    verdict: str


@dataclass(frozen=True)
class PlanReport:
    config: str
    sizes_from: str
    device: str
    site: Site
    fits: bool
    tables: "list[TableMemory]"
    ranks: "list[RankMemory]"
    changes: "list[Change]"
    step: "StepTime"
    samples_per_s: float
    run: "RunTime"
    checkpoint_bytes: int
    disk_bytes: int  # for all checkpoints that are kept, and one more
    dataset_bytes: int
    preparation_hours: float  # of a Criteo log, on two cores; 0: not known
    cost: float | None  # None: not known, because the number of steps is not
    scaling: list[Scale]

    def as_dict(self) -> dict[str, Any]:
        site = {"nodes": self.site.nodes, "procs": self.site.procs, "facts": self.site.device.model_dump()}
        changes = [asdict(change) | {"flags": str(change)} for change in self.changes]
        run = asdict(self.run) | {"hours": self.run.hours, "verdict": self.run.verdict.as_dict()}
        own = {"site": site, "step": self.step.as_dict(), "changes": changes, "run": run}
        own["scaling"] = [asdict(scale) | {"step": scale.step.as_dict()} for scale in self.scaling]
        own |= {"tables": [*map(asdict, self.tables)], "ranks": [*map(asdict, self.ranks)]}
        return vars(self) | own

    def __str__(self) -> str:
        return printed_text(print_plan, self, False)


@checked_keywords
def plan(config: str | Path | Mapping[str, Any], **options: Unpack[PlanOptions]) -> PlanReport:
    """Plan the run of `config`. Nothing is started, and nothing but `plot` is written."""
    overrides = override_texts(options.get("overrides", ()))
    checked = checked_options("plan", Options, {**options, "overrides": overrides})
    if checked.plot and given_path(checked.plot, "--plot").suffix != ".svg":
        raise ConfigError(f"--plot {checked.plot}: use a name that ends in .svg.")
    device = read_device(checked.device)
    if checked.memory_gb:
        device = device.model_copy(update={"memory_gb": checked.memory_gb})
    site = Site(checked.nodes, checked.procs, device)
    loaded = load_config(config, checked.overrides, config_variables())
    dataset, sizes_from, dataset_bytes = _dataset(loaded, checked)
    with spinner("importing torch"):
        import_libraries(in_own_process=False)
    with quiet_libraries():
        name = "config" if isinstance(config, Mapping) else str(config)
        return _report(name, loaded, dataset, (sizes_from, dataset_bytes), checked, site)


def check_fits(config: Config, dataset: Dataset, site: Site) -> None:
    """Raise ResourceError if the tables do not fit, with the first change that helps."""
    import_libraries(in_own_process=False)
    from recmill.planning.changes import find_changes
    from recmill.tables.placement import does_not_fit

    with quiet_libraries():
        case = plan_case(config, dataset, site)
        if case.planned.fits:
            return
        changes = find_changes(config, case, site.nodes, partial(_try_plan, config, dataset, site))
    help_text = f" It fits with {changes[0]}." if changes else ""
    raise ResourceError(f"{does_not_fit(case.planned, case.request, case.machines)}{help_text}")


def plan_case(config: Config, dataset: Dataset, site: Site) -> "Case":
    """Let TorchRec plan the tables of a config for machines that need not exist."""
    from recmill.planning.work import Case
    from recmill.tables.placement import Machines, find_plan
    from recmill.tables.sharding import make_sharders

    optim, device = config.settings.optim.tables, site.device
    if device.kind == "cuda" and (problem := optim.problem_on_cuda()):
        raise ConfigError(problem)
    if config.settings.train.global_batch_size < site.size:
        raise ConfigError(
            f"train.global_batch_size = {config.settings.train.global_batch_size:,} for {site.size:,} processes: some "
            "would have no rows. Raise it, or use fewer."
        )
    share = device.memory_gb * 1e9 / (site.procs if device.kind == "cpu" else 1)
    machines = Machines(site.size, site.procs, device.kind, int(share))
    network = assemble.build_network(config, dataset)
    request = assemble.table_request(config, dataset, site.size, device.kind)
    planned = find_plan(network, make_sharders(optim), request, machines)
    return Case(network, request, machines, planned, _average_sample(config, dataset))


def _try_plan(config: Config, dataset: Dataset, site: Site, change: "Change") -> "Case":
    from recmill.tables.slots import plan_caches

    changed = load_config(config.as_dict(), change.overrides)
    case = plan_case(changed, dataset, replace(site, nodes=change.nodes or site.nodes))
    if case.request.cached:
        plan_caches(case.planned.sharding, case.request, case.machines.world_size)  # ConfigError: too small
    return case


def _dataset(config: Config, options: Options) -> tuple[Dataset, str, int]:
    """Return the config's dataset, or one without files; what its sizes are from; its bytes, 0 if not known."""
    path = config.settings.data.path
    kind = assemble.model_module(config).KIND
    if options.rows is None and (options.samples or options.ids_per_row):
        raise ConfigError("--samples and --ids-per-row go with --rows. Add it, or remove them.")
    if options.rows is None and Path(path).exists():
        dataset = assemble.open_matching_dataset(config)
        return dataset, path, sum(file.bytes for file in dataset.description.files.values())
    name = options.rows or Path(path).name
    if options.rows is None and name not in PUBLISHED:
        raise ConfigError(
            f"{path}: no such directory, so the sizes of tables are not known. {did_you_mean_path(path)}Give them: "
            "--rows 40000000,39060,... or "
            f"--rows NAME, with one of {', '.join(PUBLISHED)}."
        )
    sizes = read_sizes(name)
    samples = (options.samples, *sizes.samples[1:]) if options.samples else sizes.samples
    # More users have histories that are as long.
    interactions = sizes.interactions * samples[0] // max(1, sizes.samples[0])
    sizes = replace(
        sizes, samples=samples, interactions=interactions, ids_per_row=options.ids_per_row or sizes.ids_per_row
    )
    origin = f"--rows {options.rows}" if options.rows else f"published sizes of {name}, because {path} is not here"
    return described(sizes, kind, path), origin, sizes.bytes if kind == "clicks" else 0


def _average_sample(config: Config, dataset: Dataset) -> "Samples":
    from recmill.planning.work import Samples

    description = dataset.description
    if not isinstance(description, HistoriesDescription):
        return Samples()
    rules = assemble.window_rules(config)
    average = description.num_interactions / description.num_users
    tokens = min(rules.max_length, average) if average > 1 else rules.max_length
    if rules.predicts_next:
        return Samples(tokens, tokens)
    return Samples(tokens, (1 - rules.last_only) * rules.probability * tokens + rules.last_only)


def _samples_of(config: Config, dataset: Dataset) -> dict[str, int]:
    """Return the samples of each split; 0: not known."""
    description = dataset.description
    if not isinstance(description, HistoriesDescription):
        return {split: sum(part.stop - part.start for part in description.splits[split]) for split in SPLITS}
    users = description.num_users if description.num_users > 1 else 0
    is_here = bool(dataset.fingerprint)
    windows = assemble.build_source(config, dataset, 0, 1).samples_per_epoch if is_here else users
    return {"train": windows, "val": users, "test": users}


def _report(
    name: str, config: Config, dataset: Dataset, sizes: tuple[str, int], options: Options, site: Site
) -> PlanReport:
    from recmill.planning.changes import find_changes
    from recmill.planning.forecast import step_time
    from recmill.planning.memory import checkpoint_bytes, explain
    from recmill.planning.work import step_work

    settings = config.settings
    case = plan_case(config, dataset, site)
    work = step_work(case)
    tables, ranks = explain(case, work, settings.checkpoint.background)
    step = step_time(work, site.device, case.machines, settings.train)
    fits = case.planned.fits
    saved = checkpoint_bytes(case)
    run = _run_time(config, dataset, site, step, (saved, any(rank.checkpoint_waits for rank in ranks)))
    rows = sum(_samples_of(config, dataset).values())
    is_criteo = Path(settings.data.path).name.startswith("criteo") and rows
    scaling = _scaling(config, dataset, site) if options.scaling or options.plot else []
    if options.plot:
        _draw(scaling, name, Path(options.plot))
    return PlanReport(
        config=name,
        sizes_from=sizes[0],
        device=options.device,
        site=site,
        fits=fits,
        tables=tables,
        ranks=ranks,
        changes=[] if fits else find_changes(config, case, site.nodes, partial(_try_plan, config, dataset, site)),
        step=step,
        samples_per_s=settings.train.global_batch_size / step.total,
        run=run,
        checkpoint_bytes=saved,
        disk_bytes=saved * (settings.checkpoint.keep + 1 + settings.checkpoint.keep_best),
        dataset_bytes=sizes[1],
        preparation_hours=rows / PREPARED_ROWS_PER_S / 3600 if is_criteo else 0.0,
        cost=run.hours * site.nodes * options.price_per_hour if run.steps or not options.price_per_hour else None,
        scaling=scaling,
    )


def _run_time(config: Config, dataset: Dataset, site: Site, step: "StepTime", saves: tuple[int, bool]) -> "RunTime":
    """Forecast the run. `saves`: bytes of a checkpoint, and whether training waits until it is written."""
    from recmill.planning.forecast import run_time
    from recmill.training.schedule import run_steps

    settings = config.settings
    samples = _samples_of(config, dataset)
    batching = assemble.batching_of(config, 0, site.size)
    used = {split: batching.num_used(split, count) for split, count in samples.items()}
    per_epoch = batching.num_batches("train", used["train"]) or settings.train.max_steps
    steps = run_steps(settings, per_epoch)
    times = [-(-steps.total // (every or steps.epoch or 1)) for every in (steps.checkpoint, steps.validation)]
    num_bytes, waits = saves
    write = num_bytes / (1e9 * site.device.disk_gb_per_s * site.nodes)
    copy = num_bytes / (1e9 * site.device.copy_gb_per_s * site.size)
    hints = Hints(settings.data.prefetch, settings.checkpoint.background)
    validated = times[1] * used["val"] + used["test"]
    seconds = validated / settings.train.global_batch_size * (step.total - step.overhead)  # their batches are large
    return run_time(step, steps.total, times[0] * (write if waits else copy), seconds, hints)


def _scaling(config: Config, dataset: Dataset, site: Site) -> list[Scale]:
    from recmill.planning.forecast import step_time
    from recmill.planning.work import step_work

    found = []
    most = min(_MAX_SCALE, config.settings.train.global_batch_size)
    in_a_machine = [2**n for n in range(site.procs.bit_length()) if 2**n < site.procs]
    machines = [2**n for n in range(_MAX_SCALE.bit_length())]
    sites = [(1, procs) for procs in in_a_machine] + [(nodes, site.procs) for nodes in machines]
    for here in (Site(nodes, procs, site.device) for nodes, procs in sites if nodes * procs <= most):
        case = plan_case(config, dataset, here)
        step = step_time(step_work(case), site.device, case.machines, config.settings.train)
        verdict = _run_time(config, dataset, here, step, (0, False)).verdict.text
        rate = config.settings.train.global_batch_size / step.total
        found.append(Scale(here.size, here.nodes, case.planned.fits, step, rate, verdict))
    return found


def _draw(scaling: list[Scale], name: str, path: Path) -> None:
    """Draw samples per second by processes, beside what proportional growth would be."""
    from recmill.commands.plot import new_figure, save_figure

    figure = new_figure(1)
    (axes,) = figure.axes
    ranks, rates = [scale.ranks for scale in scaling], [scale.samples_per_s for scale in scaling]
    axes.plot(ranks, rates, marker="o", label="forecast")
    axes.plot(ranks, [rates[0] / ranks[0] * count for count in ranks], "--", label="proportional", color="0.6")
    lacking = [scale for scale in scaling if not scale.fits]
    axes.plot([s.ranks for s in lacking], [s.samples_per_s for s in lacking], "x", color="C3", label="does not fit")
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="samples/s", title=name)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)
