"""Learn a recipe from the training rows: vocabularies by frequency, quantiles, means."""

import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from recmill import rng
from recmill.data.recipes import vocabulary_file
from recmill.datasets.own_clicks.coding import add_up
from recmill.datasets.own_clicks.encoding import (
    Learned,
    categories,
    fixed_rows,
    log_squared,
    owner,
    parts_of,
    table_of,
    yeo_johnson,
)
from recmill.datasets.own_clicks.schema import (
    FIRST_VALUE,
    LOG_SQUARED,
    MISSING,
    UNSEEN,
    BucketFeature,
    CategoricalFeature,
    ClicksSchema,
    NumericFeature,
    TimeFeature,
)
from recmill.datasets.own_clicks.values import RawRows, Values, numbers
from recmill.datasets.own_clicks.writing import read_arrow, write_arrow
from recmill.datasets.writing import write_parquet
from recmill.errors import DataError

_MAX_COUNTS = 1 << 22  # of all vocabularies together, that wait in memory to be added up
_SPILLED_PARTS = 32  # that are added up one after the other
_NUM_RANKS = 1001  # quantiles of transform rank
_POWER_ROWS = 100_000  # about as many numbers tell the power
_MAX_BUCKETS = 10_000_000
SAMPLE_ROWS = 4_000_000  # about as many of the training rows tell the quantiles, means and extremes of numbers


@dataclass(frozen=True)
class Found:
    """What training rows held, by feature; that of several parts of a log can be put together.

    `counts` has the values and the counts of each vocabulary, where rare ones may be missing, `totals` those of all.
    """

    longest: dict[str, int]  # the most values of a row
    times: dict[str, list[int]]
    numbers: dict[str, np.ndarray]  # a sample, in the order of the rows
    counts: dict[str, pl.DataFrame]
    totals: dict[str, int]


class Learner:
    """Sees blocks of training rows, and returns what they held. `seen`: how many training rows are before them.

    Counts that do not fit into memory go to files in `scratch`; without it, all stay in memory.
    """

    def __init__(self, log: ClicksSchema, training_rows: int, seen: int = 0, scratch: Path | None = None) -> None:
        self._log = log
        self._scratch = scratch
        self._spilled: dict[str, list[Path]] = {}  # by the owner of a table
        self._categorical: dict[str, list[CategoricalFeature]] = {}  # by column
        self._has_vocabulary: dict[str, bool] = {}  # by feature
        for feature in log.tables:
            if isinstance(feature, CategoricalFeature):
                self._categorical.setdefault(feature.column, []).append(feature)
                self._has_vocabulary[feature.name] = not fixed_rows(table_of(log, feature))
        self._counts: dict[str, list[pl.DataFrame]] = {}  # by the owner of a table
        self._code_counts: dict[str, tuple[Values, np.ndarray]] = {}  # by column
        self._longest: dict[str, int] = {}
        self._parts: dict[str, set[int]] = {}  # of times, by feature
        self._numbers: dict[str, list[np.ndarray]] = {}
        self._share = min(1.0, SAMPLE_ROWS / max(training_rows, 1))
        self._seen = seen

    def see(self, rows: RawRows) -> None:
        kept = rng.uniform(rng.stream_key("sample of numbers"), self._seen + np.arange(len(rows))) < self._share
        self._seen += len(rows)
        for feature in self._log.feature:
            if isinstance(feature, NumericFeature | BucketFeature):
                values = numbers(rows, feature.column, self._log.missing_texts(feature), self._log.input)
                self._numbers.setdefault(feature.name, []).append(values[kept & ~np.isnan(values)])
        for feature in self._log.tables:
            if isinstance(feature, TimeFeature):
                counts = np.bincount(parts_of(rows, self._log, feature))
                self._parts.setdefault(feature.name, set()).update(np.flatnonzero(counts).tolist())
        for column in self._categorical:
            if column in rows.codes:
                self._count_codes(column, *rows.codes[column])
            else:
                self._count(rows, column, None)

    def _count_codes(self, column: str, values: Values, codes: np.ndarray) -> None:
        """Add up how often each code occurs, until rows have other codes."""
        if column not in self._code_counts or self._code_counts[column][0] is not values:
            self._count_texts(column)
            self._code_counts[column] = values, np.zeros(len(values.series), np.int64)
        add_up(self._code_counts[column][1], codes)

    def _count_texts(self, column: str) -> None:
        """Count the texts behind the codes of a column."""
        if column in self._code_counts:
            values, counts = self._code_counts.pop(column)
            occur = np.flatnonzero(counts)
            frame = values.series.alias(column).gather(occur).to_frame()
            self._count(RawRows(frame, "", range(frame.height)), column, counts[occur])

    def _count(self, rows: RawRows, column: str, counts: np.ndarray | None) -> None:
        """Count the texts of a column; without `counts`, each row counts once."""
        for feature in self._categorical[column]:
            given = categories(rows, feature, self._log)
            frame = pl.DataFrame({"value": given, "count": np.ones(len(given), np.int64) if counts is None else counts})
            if isinstance(given.dtype, pl.List):
                longest = int(given.list.len().fill_null(0).to_numpy().max(initial=0))
                known = self._longest.get(feature.name, 1)
                self._longest[feature.name] = max(known, min(longest, feature.max_values))
                frame = frame.with_columns(pl.col("value").list.head(feature.max_values)).explode("value")
            if self._has_vocabulary[feature.name]:
                waiting = self._counts.setdefault(owner(feature), [])
                may_repeat = isinstance(given.dtype, pl.List) or bool(table_of(self._log, feature).normalize)
                is_distinct = counts is not None and not may_repeat
                found = frame.drop_nulls("value")
                waiting.append(found if is_distinct else _added_up([found]))
                most = _MAX_COUNTS // len(self._has_vocabulary)
                if len(waiting) > 1 and sum(part.height for part in waiting[1:]) > most:
                    waiting[:] = [_added_up(waiting)]
                    if self._scratch and waiting[0].height > most:
                        self._spill(owner(feature), waiting.pop())

    def _spill(self, name: str, counts: pl.DataFrame) -> None:
        """Write the counts in parts, so that all counts of a value are in the same part."""
        assert self._scratch
        which = counts["value"].hash() % _SPILLED_PARTS
        for part in range(_SPILLED_PARTS):
            self._spilled.setdefault(name, []).append(self._scratch / f"counts-{uuid.uuid4().hex}.arrow")
            write_arrow(self._spilled[name][-1], counts.filter(which == part))

    def _all_counts(self, name: str) -> tuple[pl.DataFrame, int]:
        """Return the counts, of those that were spilled without the rare values, and how many there are together."""
        waiting = self._counts.pop(name)
        if name not in self._spilled:
            counts = waiting[0] if len(waiting) == 1 else _added_up(waiting)
            return counts, int(counts["count"].sum())
        if waiting:
            self._spill(name, _added_up(waiting))
        files, total = self._spilled.pop(name), 0
        feature = next(feature for feature in self._log.tables if feature.name == name)
        assert isinstance(feature, CategoricalFeature)
        frequent = []
        for part in range(_SPILLED_PARTS):
            counts = _added_up([read_arrow(file) for file in files[part::_SPILLED_PARTS]])
            total += int(counts["count"].sum())
            frequent.append(counts.filter(pl.col("count") >= feature.min_frequency))
        for file in files:
            file.unlink()
        return pl.concat(frequent), total

    def found(self) -> Found:
        """Return what the rows held, and forget the numbers."""
        for column in list(self._code_counts):
            self._count_texts(column)
        numbers = {name: np.concatenate(self._numbers.pop(name)) for name in list(self._numbers)}
        counts = {name: self._all_counts(name) for name in list(self._counts)}
        times = {name: sorted(parts) for name, parts in self._parts.items()}
        frequent = {name: frame for name, (frame, _) in counts.items()}
        return Found(self._longest, times, numbers, frequent, {name: total for name, (_, total) in counts.items()})


def learned(log: ClicksSchema, found: Found, directory: Path) -> dict[str, Learned]:
    """Write the vocabularies to `directory`, and return what was learned by feature."""
    made: dict[str, Learned] = {}
    for feature in log.feature:
        if isinstance(feature, NumericFeature):
            made[feature.name] = _learned_numbers(feature, found.numbers[feature.name])
        elif isinstance(feature, BucketFeature):
            made[feature.name] = _learned_buckets(feature, found.numbers[feature.name])
        else:
            rows = fixed_rows(feature)
            if isinstance(feature, CategoricalFeature) and feature.name in found.counts:
                counts, total = found.counts[feature.name], found.totals[feature.name]
                rows = _write_vocabulary(directory, feature, counts, total)
            longest = found.longest.get(feature.name)
            made[feature.name] = Learned(
                rows=rows,
                ids_per_row=longest or 1,
                has_lists=longest is not None,
                seen=found.times.get(feature.name, []),
            )
    return made


def _added_up(parts: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(parts).group_by("value").agg(pl.col("count").sum())


def _write_vocabulary(directory: Path, feature: CategoricalFeature, counts: pl.DataFrame, total: int) -> int:
    """Write value, id and count of each id, those of missing and unseen values without a value. Return the rows."""
    frequent = counts.filter(pl.col("count") >= feature.min_frequency).sort(
        ["count", "value"], descending=[True, False]
    )
    if feature.table_size:
        frequent = frequent.head(feature.table_size - FIRST_VALUE)
    rare = total - int(frequent["count"].sum())
    special = pl.DataFrame(
        {"value": [None, None], "id": [MISSING, UNSEEN], "count": [0, rare]},
        schema={"value": pl.String, "id": pl.Int64, "count": pl.Int64},
    )
    numbered = frequent.with_row_index("id", FIRST_VALUE).select("value", pl.col("id").cast(pl.Int64), "count")
    write_parquet(directory / vocabulary_file(feature.name), pl.concat([special, numbered]))
    return numbered.height + FIRST_VALUE


def _quantiles(values: np.ndarray, shares: np.ndarray) -> list[float]:
    """Return different quantiles that occur among the values."""
    if not len(values):
        return []
    return sorted(set(np.quantile(values, shares, method="inverted_cdf").tolist()))


def _learned_numbers(feature: NumericFeature, values: np.ndarray) -> Learned:
    if not len(values):
        return Learned()
    low = high = None
    if feature.clip:
        low, high = np.quantile(values, feature.clip, method="inverted_cdf").tolist()
        values = np.clip(values, low, high)
    fills = {"zero": 0.0, "mean": float(values.mean()), "median": float(np.median(values))}
    found = Learned(
        low=low, high=high, fill=fills[feature.missing] if isinstance(feature.missing, str) else feature.missing
    )
    match feature.transform:
        case "standard":
            return found.model_copy(update=_standard(values))
        case "minmax":
            return found.model_copy(update={"shift": float(values.min()), "scale": float(np.ptp(values)) or 1.0})
        case "rank":
            return found.model_copy(update=_ranks(values))
        case "power":
            power = _best_power(values)
            return found.model_copy(update={"power": power, **_standard(yeo_johnson(values, power))})
    return found


def _standard(values: np.ndarray) -> dict[str, float]:
    is_constant = np.ptp(values) == 0  # its std may be 1e-17, the rounding error of its mean
    return {"shift": float(values.mean()), "scale": 1.0 if is_constant else float(values.std())}


def _ranks(values: np.ndarray) -> dict[str, list[float]]:
    """Return different quantiles, and the rank of each: the mean of those of equal values, from 0 to 1."""
    shares = np.linspace(0, 1, min(_NUM_RANKS, max(len(values), 2)))
    found, which = np.unique(np.quantile(values, shares), return_inverse=True)
    ranks = np.bincount(which, weights=shares) / np.bincount(which)
    ranks[0], ranks[-1] = 0, 1
    return {"boundaries": found.tolist(), "ranks": ranks.tolist()}


def _best_power(values: np.ndarray) -> float:
    """Return the power of the Yeo-Johnson transform that makes the values most likely under a normal distribution.

    The likelihood has one maximum: it is found between -5 and 5 by golden section.
    """
    values = values[:: max(len(values) // _POWER_ROWS, 1)]
    signed_logs = float(np.sum(np.copysign(np.log1p(np.abs(values)), values)))

    def likelihood(power: float) -> float:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            variance = yeo_johnson(values, power).var()
            score = -len(values) / 2 * np.log(variance) + (power - 1) * signed_logs
        return float(score) if np.isfinite(score) else -np.inf

    low, high = -5.0, 5.0
    section = (np.sqrt(5) - 1) / 2
    while high - low > 1e-6:
        left, right = high - section * (high - low), low + section * (high - low)
        low, high = (low, right) if likelihood(left) >= likelihood(right) else (left, high)
    return float((low + high) / 2) if np.ptp(values) else 1.0


def _learned_buckets(feature: BucketFeature, values: np.ndarray) -> Learned:
    if feature.boundaries == LOG_SQUARED:
        found = log_squared(values) if len(values) else np.zeros(1)
        low, high = float(found.min()), float(found.max())
        if (num_buckets := high - low + 1) > _MAX_BUCKETS:
            fact = f"feature {feature.name}: 'log2-squared' would make {num_buckets:,.0f} buckets from {low:,.0f} on"
            raise DataError(f"{fact}, one for each whole number below 2. Use boundaries = 'quantiles:N'.")
        return Learned(rows=int(high - low) + 2, low=low, high=high)
    boundaries = feature.boundaries
    if not isinstance(boundaries, list):
        boundaries = _quantiles(values, np.arange(1, feature.num_quantiles) / feature.num_quantiles)
    return Learned(rows=len(boundaries) + 2, boundaries=boundaries)
