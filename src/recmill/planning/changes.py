"""Find changes that make tables fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recmill.config import Config
from recmill.errors import UserError
from recmill.planning.work import Case
from recmill.tables.optimizers import OPTIMIZERS

_MAX_RANKS = 256  # planning for more takes minutes


@dataclass(frozen=True)
class Change:
    """Overrides for `--set`, or another number of machines; `margin`: free bytes of the rank that needs most."""

    overrides: tuple[str, ...] = ()
    nodes: int = 0  # 0: as many as before
    margin: int = 0

    def __str__(self) -> str:
        return " ".join(
            [f"--set {text}" for text in self.overrides] + ([f"--nodes {self.nodes}"] if self.nodes else [])
        )


TryPlan = Callable[[Change], Case]


def find_changes(config: Config, case: Case, nodes: int, try_plan: TryPlan) -> list[Change]:
    """Return changes that make the tables fit, each tried by planning again: the first of each kind that fits.

    First come those that change no result: sharding, stores, more machines. Then the optimizer and the batch.
    """
    found = []
    kinds = (
        _shardings(config),
        _stores(config, case),
        _nodes(nodes, case),
        _optimizers(config),
        _batches(config, case, try_plan),
    )
    for kind in kinds:
        for change in kind:
            if (margin := _margin(change, try_plan)) is not None:
                if change.nodes:
                    change = _fewest_nodes(nodes, change, try_plan)
                    margin = _margin(change, try_plan) or 0
                found.append(Change(change.overrides, change.nodes, margin))
                break
    return found


def _margin(change: Change, try_plan: TryPlan) -> int | None:
    """Plan with the change; None: it does not fit, or the config refuses it."""
    try:
        planned = try_plan(change).planned
    except UserError:
        return None
    return planned.usable - planned.most[1] if planned.fits else None


def _shardings(config: Config) -> Iterator[Change]:
    section = config.settings.sharding
    if section.mode == "ddp":
        yield Change(("sharding.mode=auto",))
        return
    of_tables = tuple(f"sharding.tables.{name}=auto" for name, kind in section.tables.items() if kind != "auto")
    if of_tables:
        yield Change(of_tables)
    if section.default != "auto":
        yield Change(("sharding.default=auto", *of_tables))
    if section.default != "row_wise":
        yield Change(("sharding.default=row_wise", *of_tables))


def _stores(config: Config, case: Case) -> Iterator[Change]:
    """Yield caches from large to small: half of what is left beside batches and layers, then less."""
    section = config.settings.tables
    if set(section.requested_stores().values()) != {"device_mem"} or section.dynamic:
        return
    store = "cached_host_mem" if case.machines.device_type == "cuda" else "cached_ssd"
    for share in (2, 4, 8):
        budget = (case.planned.usable - case.planned.beside) // share >> 20
        if budget > 0:
            yield Change((f"tables.store={store}", f"tables.cache_memory_budget_mb={budget}"))


def _nodes(nodes: int, case: Case) -> Iterator[Change]:
    while (nodes := 2 * nodes) * case.machines.local_size <= _MAX_RANKS:
        yield Change(nodes=nodes)


def _fewest_nodes(too_few: int, enough: Change, try_plan: TryPlan) -> Change:
    too_few = max(too_few, enough.nodes // 2)
    while enough.nodes - too_few > 1:
        middle = Change(nodes=(too_few + enough.nodes) // 2)
        if _margin(middle, try_plan) is None:
            too_few = middle.nodes
        else:
            enough = middle
    return enough


def _optimizers(config: Config) -> Iterator[Change]:
    if "per value" in OPTIMIZERS[config.settings.optim.tables.name].state.values():
        yield Change(("optim.tables.name=rowwise_adagrad",))


def _batches(config: Config, case: Case, try_plan: TryPlan) -> Iterator[Change]:
    batch = config.settings.train.global_batch_size
    if _margin(Change((f"train.global_batch_size={case.machines.world_size}",)), try_plan) is None:
        return
    while (batch := batch // 2) >= case.machines.world_size:
        yield Change((f"train.global_batch_size={batch}",))
