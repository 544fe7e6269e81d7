"""Statistics of the caches of cached_ssd, for each report and for the complete run."""

from torch import nn

from recmill.tables.spec import Stores
from recmill.tables.stores.key_table import Facts
from recmill.tables.stores.row_cache import Counters, RowCache
from recmill.tables.table_lookup import cached_tables
from recmill.world import World

_FACTORS = (1.25, 1.5, 2, 3, 4)  # by which a budget could be larger
_WORTHWHILE = 0.5  # a share of reads: the closing sentence names the smallest budget that saves so many


class StoreMeter:
    """Collects the counters of all ranks. Without cached tables, it does nothing."""

    def __init__(self, model: nn.Module, world: World) -> None:
        cached = cached_tables(model)
        self._caches = [tables.cache for tables in cached if isinstance(tables.cache, RowCache)]
        stores: Stores = getattr(model, "stores", Stores())
        self._is_used = bool(stores.in_files)
        self._budget_bytes = stores.budget_bytes
        self._keyed = [keyed for tables in cached for keyed in tables.dynamic.values()]
        self._is_dynamic = any(spec.dynamic for spec in getattr(model, "cached_specs", []))
        self._earlier_keys = self._key_totals()
        self._world = world
        self._earlier = self._totals()
        self._wait_seconds = 0.0

    def values(self, steps: int, seconds: float) -> dict[str, float]:
        """Return rates over the last `steps`, which took `seconds`. All ranks call this; use the result of rank 0."""
        dynamic = self._dynamic_values()
        if not self._is_used:
            return dynamic
        now = self._totals()
        by_rank = self._world.gather((self._earlier, now)) or [(self._earlier, now)]
        self._earlier = now
        done = {name: sum(getattr(b, name) - getattr(a, name) for a, b in by_rank) for name in Counters._fields}
        waited = max(b.wait_seconds - a.wait_seconds for a, b in by_rank)
        self._wait_seconds += waited
        steps, seconds = max(steps, 1), max(seconds, 1e-9)
        read_rows = done["misses"] + done["first_touches"]
        return dynamic | {
            "store_hit": 1 - read_rows / max(done["rows"], 1),
            "store_misses": done["misses"] / steps,
            "store_first": done["first_touches"] / steps,
            "store_read_mb_s": done["bytes_read"] / seconds / 1e6,
            "store_written_mb_s": done["bytes_written"] / seconds / 1e6,
            "store_wait_ms": 1e3 * waited / steps,
            "store_disk_gb": sum(b.disk_bytes for _, b in by_rank) / 1e9,
            "store_horizon": float(min(b.horizon for _, b in by_rank)),
        }

    def summary(self, seconds: float) -> str | None:
        """Return a line about how long training waited for the disk, and what would avoid it. All ranks call this.

        `seconds`: how long training took.
        """
        if not self._is_used:
            return None
        totals = self._world.gather((self._totals(), self._lacking_bytes(), self._forecasts())) or []
        rows = max(sum(total.rows for total, *_ in totals), 1)
        misses = sum(total.misses for total, *_ in totals)
        said = (
            f"cached_ssd: {misses / rows:.1%} of the rows that steps needed were read from the disk; training waited "
            f"for it {self._wait_seconds / max(seconds, 1e-9):.1%} of the time"
        )
        if not misses:
            return said
        lacking = max(lacking for _, lacking, _ in totals)
        saved = [1 - sum(reads) / misses for reads in zip(*(reads for *_, reads in totals), strict=True)]
        pairs = zip(_FACTORS, saved, strict=True)
        factor, share = next((pair for pair in pairs if pair[1] >= _WORTHWHILE), (_FACTORS[-1], saved[-1]))
        more = min(lacking, round(self._budget_bytes * (factor - 1)))
        effect = "no row" if more == lacking else f"{share:.0%} fewer rows"
        now, then = (-(-size // (1 << 20)) for size in (self._budget_bytes, self._budget_bytes + more))
        return f"{said}; with tables.cache_memory_budget_mb = {then} instead of {now}, {effect} would be read"

    def _lacking_bytes(self) -> int:
        """Estimate how much more memory this rank would need to hold every row that was ever trained."""
        lacking = [(c.counters().trained_rows - c.plan.slots) * c.layout.slot_bytes for c in self._caches]
        return sum(size for size in lacking if size > 0)

    def _forecasts(self) -> list[float]:
        """Estimate how many rows this rank would have read with each of _FACTORS times its budget."""
        caches = [cache for cache in self._caches if cache.plan.slots < cache.layout.rows]
        in_use = max(1, sum(cache.plan.memory_bytes for cache in caches))
        reads = [0.0] * len(_FACTORS)
        for cache in caches:
            share = self._budget_bytes * cache.plan.memory_bytes / in_use
            for i, factor in enumerate(_FACTORS):
                slots = cache.plan.slots + int(share * (factor - 1)) // cache.layout.slot_bytes
                reads[i] += cache.counters().misses * cache.forecast(slots)
        return reads

    def _dynamic_values(self) -> dict[str, float]:
        """Return how many ids have a row, and how many got or lost one since the last report."""
        if not self._is_dynamic:
            return {}
        now, earlier = self._key_totals(), self._earlier_keys
        self._earlier_keys = now
        done = now.rows, now.admitted - earlier.admitted, now.expired - earlier.expired
        sums = [sum(values) for values in zip(*(self._world.gather(done) or [done]), strict=True)]
        return dict(zip(("dynamic_rows", "dynamic_admitted", "dynamic_expired"), sums, strict=True))

    def _key_totals(self) -> Facts:
        """Add up the facts of this rank's dynamic tables."""
        facts = [keyed.facts() for keyed in self._keyed]
        return Facts(*map(sum, zip(*facts, strict=True))) if facts else Facts(*[0] * len(Facts._fields))

    def _totals(self) -> Counters:
        """Add up the counters of this rank's caches."""
        counters = [cache.counters() for cache in self._caches]
        return Counters(*map(sum, zip(*counters, strict=True))) if counters else Counters(*[0] * len(Counters._fields))


def note(values: dict[str, float]) -> str:
    """Return the part of a progress line that is about caches."""
    if "store_hit" not in values:
        return ""
    return f"  hit {values['store_hit']:.0%}  waits {values['store_wait_ms']:.1f} ms"
