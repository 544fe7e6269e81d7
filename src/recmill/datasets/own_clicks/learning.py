"""Learn a recipe from the training rows: vocabularies by frequency, quantiles, means."""

from pathlib import Path

import numpy as np
import polars as pl

from recmill import rng
from recmill.data.recipes import vocabulary_file
from recmill.datasets.own_clicks.encoding import Learned, fixed_rows, owner, parts_of, table_of
from recmill.datasets.own_clicks.schema import (
    FIRST_VALUE,
    MISSING,
    UNSEEN,
    BucketFeature,
    CategoricalFeature,
    ClicksSchema,
    NumericFeature,
    TimeFeature,
)
from recmill.datasets.own_clicks.values import RawRows, Values, numbers, several_texts, texts
from recmill.datasets.writing import write_parquet

_MERGED_ROWS = 1 << 21  # counts that may wait to be added up
SAMPLE_ROWS = 4_000_000  # about as many of the training rows tell the quantiles, means and extremes of numbers


class Learner:
    """Sees blocks of training rows, then writes vocabularies and returns what was learned of each feature."""

    def __init__(self, log: ClicksSchema, training_rows: int) -> None:
        self._log = log
        self._counts: dict[str, list[pl.DataFrame]] = {}  # by the owner of a table
        self._code_counts: dict[str, tuple[Values, np.ndarray]] = {}  # by column
        self._longest: dict[str, int] = {}
        self._parts: dict[str, set[int]] = {}  # of times, by feature
        self._numbers: dict[str, list[np.ndarray]] = {}
        self._share = min(1.0, SAMPLE_ROWS / max(training_rows, 1))
        self._seen = 0

    def see(self, rows: RawRows) -> None:
        kept = rng.uniform(rng.stream_key("sample of numbers"), self._seen + np.arange(len(rows))) < self._share
        self._seen += len(rows)
        missing = self._log.input.missing
        columns = {f.column for f in self._log.feature if isinstance(f, NumericFeature | BucketFeature)}
        for column in sorted(columns):
            values = numbers(rows, column, missing)
            self._numbers.setdefault(column, []).append(values[kept & ~np.isnan(values)])
        for feature in self._log.tables:
            if isinstance(feature, TimeFeature):
                counts = np.bincount(parts_of(rows, self._log, feature))
                self._parts.setdefault(feature.name, set()).update(np.flatnonzero(counts).tolist())
        for column in dict.fromkeys(feature.column for feature in self._categorical):
            if column in rows.codes:
                self._count_codes(column, *rows.codes[column])
            else:
                self._count(rows, column, None)

    @property
    def _categorical(self) -> list[CategoricalFeature]:
        return [feature for feature in self._log.tables if isinstance(feature, CategoricalFeature)]

    def _count_codes(self, column: str, values: Values, codes: np.ndarray) -> None:
        """Add up how often each code occurs, until rows have other codes."""
        if column not in self._code_counts or self._code_counts[column][0] is not values:
            self._count_texts(column)
            self._code_counts[column] = values, np.zeros(len(values.series), np.int64)
        self._code_counts[column][1][:] += np.bincount(codes, minlength=len(values.series))

    def _count_texts(self, column: str) -> None:
        """Count the texts behind the codes of a column."""
        if column in self._code_counts:
            values, counts = self._code_counts.pop(column)
            occur = np.flatnonzero(counts)
            frame = values.series.alias(column).gather(occur).to_frame()
            self._count(RawRows(frame, "", range(frame.height)), column, counts[occur])

    def _count(self, rows: RawRows, column: str, counts: np.ndarray | None) -> None:
        """Count the texts of a column; without `counts`, each row counts once."""
        missing = self._log.input.missing
        for feature in (feature for feature in self._categorical if feature.column == column):
            given = several_texts(texts(rows, column, missing), feature, missing)
            frame = pl.DataFrame({"value": given, "count": np.ones(len(given), np.int64) if counts is None else counts})
            if isinstance(given.dtype, pl.List):
                longest = int(given.list.len().fill_null(0).to_numpy().max(initial=0))
                known = self._longest.get(feature.name, 1)
                self._longest[feature.name] = max(known, min(longest, feature.max_values))
                frame = frame.with_columns(pl.col("value").list.head(feature.max_values)).explode("value")
            if not fixed_rows(table_of(self._log, feature)):
                waiting = self._counts.setdefault(owner(feature), [])
                is_distinct = counts is not None and not isinstance(given.dtype, pl.List)
                found = frame.drop_nulls("value")
                waiting.append(found if is_distinct else _added_up([found]))
                if len(waiting) > 1 and sum(part.height for part in waiting[1:]) > _MERGED_ROWS:
                    waiting[:] = [_added_up(waiting)]

    def _all_counts(self, name: str) -> pl.DataFrame:
        counts = self._counts[name]
        return counts[0] if len(counts) == 1 else _added_up(counts)

    def learn(self, directory: Path) -> dict[str, Learned]:
        """Write the vocabularies to `directory`, and return what was learned by feature."""
        for column in list(self._code_counts):
            self._count_texts(column)
        learned: dict[str, Learned] = {}
        for feature in self._log.feature:
            if isinstance(feature, NumericFeature):
                learned[feature.name] = _learned_numbers(feature, np.concatenate(self._numbers[feature.column]))
            elif isinstance(feature, BucketFeature):
                boundaries = feature.boundaries
                if not isinstance(boundaries, list):
                    shares = np.arange(1, feature.num_quantiles) / feature.num_quantiles
                    boundaries = _quantiles(np.concatenate(self._numbers[feature.column]), shares)
                learned[feature.name] = Learned(rows=len(boundaries) + 2, boundaries=boundaries)
            else:
                rows = fixed_rows(feature)
                if isinstance(feature, CategoricalFeature) and feature.name in self._counts:
                    rows = _write_vocabulary(directory, feature, self._all_counts(feature.name))
                longest = self._longest.get(feature.name)
                learned[feature.name] = Learned(
                    rows=rows,
                    ids_per_row=longest or 1,
                    has_lists=longest is not None,
                    seen=sorted(self._parts.get(feature.name, ())),
                )
        return learned


def _added_up(parts: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(parts).group_by("value").agg(pl.col("count").sum())


def _write_vocabulary(directory: Path, feature: CategoricalFeature, counts: pl.DataFrame) -> int:
    """Write value, id and count of each id, those of missing and unseen values without a value. Return the rows."""
    frequent = counts.filter(pl.col("count") >= feature.min_frequency).sort(
        ["count", "value"], descending=[True, False]
    )
    if feature.table_size:
        frequent = frequent.head(feature.table_size - FIRST_VALUE)
    rare = int(counts["count"].sum()) - int(frequent["count"].sum())
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
    shift, scale = 0.0, 1.0
    if feature.transform == "standard":
        shift, scale = float(values.mean()), float(values.std()) or 1.0
    if feature.transform == "minmax":
        shift, scale = float(values.min()), float(np.ptp(values)) or 1.0
    return Learned(low=low, high=high, fill=fills[feature.missing], shift=shift, scale=scale)
