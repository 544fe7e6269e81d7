"""From raw rows to what a network reads, by a recipe: one function for preparation, prediction and serving.

A recipe is the schema with what preparation learned from the training rows. It is data, never code.
"""

from collections.abc import Callable, Collection
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from recmill.data.click_rows import ClickRows
from recmill.data.recipes import NO_LABEL, RECIPE_FILE, Tally, vocabulary_file
from recmill.datasets.inputs.detection import changed
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.own_clicks.schema import (
    FIRST_VALUE,
    LOG_SQUARED,
    MISSING,
    UNSEEN,
    AnyFeature,
    BucketFeature,
    CategoricalFeature,
    ClicksSchema,
    CrossFeature,
    NumericFeature,
    TableFeature,
    TimeFeature,
)
from recmill.datasets.own_clicks.values import (
    RawRows,
    labels,
    normalized,
    numbers,
    several_texts,
    single_texts,
    texts,
    times,
    usable_numbers,
    usable_times,
)
from recmill.errors import ConfigError, DataError
from recmill.kernels.library import addresses, load_parser
from recmill.schema import SparseFeature

PARTS = {"hour": 24, "weekday": 7, "is_weekend": 2, "day": 31, "month": 12}
_JOINT = "\x1f"  # between the values of a cross
_DAY = 86_400_000_000


class Learned(BaseModel):
    """What was learned of one feature; which fields it has depends on its type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = 0  # of its table
    low: float | None = None  # numbers are clipped to low..high
    high: float | None = None
    fill: float = 0.0  # for missing numbers
    shift: float = 0.0  # of standard and minmax: (x - shift) / scale
    scale: float = 1.0
    boundaries: list[float] = []
    ranks: list[float] = []  # of the boundaries, for transform rank
    power: float = 1.0
    ids_per_row: int = 1
    seen: list[int] = []  # parts of times that occur in the training rows
    has_lists: bool = False  # a row may have several values, or none


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    log: ClicksSchema
    learned: dict[str, Learned]  # by feature
    training_rows: int = 0
    tally: dict[str, dict[str, int]] = {}  # of the training rows: see Tally


def load_recipe(directory: Path) -> Recipe:
    """Read recipe.json in `directory`, whose vocabularies are beside it."""
    path = directory / RECIPE_FILE
    try:
        return Recipe.model_validate_json(path.read_bytes(), strict=False)
    except FileNotFoundError:
        raise DataError(f"{directory}: no {RECIPE_FILE}, so new rows cannot be encoded. Prepare it again.") from None
    except ValidationError as error:
        raise DataError(f"{path}: corrupt ({error.errors()[0]['msg']}). Prepare the dataset again.") from None


def table_of(log: ClicksSchema, feature: CategoricalFeature) -> CategoricalFeature:
    """Return the feature whose vocabulary and table this one uses: another one, or itself."""
    if not feature.share_table:
        return feature
    found = next(f for f in log.tables if f.name == feature.share_table)
    assert isinstance(found, CategoricalFeature)
    return found


def categories(rows: RawRows, feature: CategoricalFeature, log: ClicksSchema) -> pl.Series:
    """Return the values of each row as texts or lists of texts, normalized as the schema says; null: no value."""
    missing = log.missing_texts(feature)
    given = several_texts(texts(rows, feature.column, missing), feature, missing)
    steps = table_of(log, feature).normalize
    return normalized(given, steps, missing) if steps else given


def owner(feature: TableFeature) -> str:
    """Return the name of the feature whose table this one uses."""
    return (feature.share_table if isinstance(feature, CategoricalFeature) else "") or feature.name


class Encoder:
    """Turns raw rows into dense values and ids, and counts what it met.

    The columns of the features in `without` are not read: these features are 0 and MISSING in every row.
    """

    def __init__(self, recipe: Recipe, directory: Path, without: Collection[str] = ()) -> None:
        self.recipe = recipe
        self._on_bad_value: Literal["fail", "missing"] = "fail"
        self._without = without
        self.tally = Tally()
        self._directory = directory
        self._vocabularies: dict[str, pl.Enum] = {}
        self.feature_columns = recipe.log.feature_columns(without)
        self.label_column = recipe.log.label.column
        self.trained_rows, self.trained_tally = recipe.training_rows, recipe.tally

    def input_section(self, count_fields: Callable[[], int]) -> InputSection:
        """Return how to read text, whatever its number of fields."""
        return self.recipe.log.input

    def adapt(self, new_rows: NewRowsFlags) -> None:
        """Read numbers and times as these flags say."""
        log = self.recipe.log
        log = log.model_copy(update={"input": changed(log.input, new_rows.given())})
        if new_rows.time_format is not None:
            if not log.time:
                raise ConfigError("--time-format: the schema of the training log has no [time]. Remove it.")
            time = log.time.model_copy(update={"format": new_rows.time_format})
            if problems := time.contradictions():
                raise ConfigError(problems[0].replace("time.format", "--time-format"))
            log = log.model_copy(update={"time": time})
        self.recipe = self.recipe.model_copy(update={"log": log})
        self._on_bad_value = new_rows.on_bad_value

    def encode(self, rows: RawRows, with_labels: bool = True, may_be_missing: bool = False) -> ClickRows:
        """Return the rows in their order, with NO_LABEL where there is no label."""
        log = self.recipe.log
        self.tally.rows += len(rows)
        dense = [values for feature in log.numeric for values in self._numbers(rows, feature)]
        sizes = [self.recipe.learned[feature.name].ids_per_row for feature in log.tables]
        places = dict(zip((feature.name for feature in log.tables), np.cumsum([0, *sizes]).tolist(), strict=False))
        ids: np.ndarray = np.full((len(rows), sum(sizes)), MISSING, self.id_type)
        done = {*self._without, *self._write_ids_of_codes(rows, places, ids)}
        for feature, size in zip(log.tables, sizes, strict=True):
            if feature.name not in done:
                ids[:, places[feature.name] : places[feature.name] + size] = self._ids(rows, feature)
        return ClickRows(
            np.stack(dense, axis=1).astype(np.float32) if dense else np.empty((len(rows), 0), np.float32),
            ids,
            labels(rows, log, may_be_missing) if with_labels else np.full(len(rows), NO_LABEL, np.int32),
        )

    @cached_property
    def id_type(self) -> type:
        """The type of ids, which lengths of lists fit in, too."""
        largest = max(learned.rows for learned in self.recipe.learned.values())
        return np.int32 if largest < 2**31 else np.int64

    def sparse_features(self) -> list[SparseFeature]:
        """Return the features with tables, as dataset.json describes them."""
        made = []
        learned = self.recipe.learned
        with_bags = {owner(f) for f in self.recipe.log.tables if learned[f.name].has_lists}
        for feature in self.recipe.log.tables:
            is_bag = learned[feature.name].has_lists
            made.append(
                SparseFeature(
                    name=feature.name,
                    rows=learned[owner(feature)].rows,
                    share_table=None if owner(feature) == feature.name else owner(feature),
                    padding_id=MISSING if owner(feature) in with_bags else None,
                    pooling=feature.pooling if is_bag and isinstance(feature, CategoricalFeature) else None,
                    role=feature.role,
                )
            )
        return made

    def _numbers(self, rows: RawRows, feature: NumericFeature) -> list[np.ndarray]:
        if feature.name in self._without:
            return [np.zeros(len(rows))] * len(feature.dense_names)
        learned = self.recipe.learned[feature.name]
        given = self._given_numbers(rows, feature)
        is_missing = np.isnan(given)
        clipped = given if learned.low is None else np.clip(given, learned.low, learned.high)
        self.tally.add(feature.name, missing=is_missing, clipped=(clipped != given) & ~is_missing)
        values = transformed(np.where(is_missing, learned.fill, clipped), feature, learned)
        if (is_bad := ~(np.abs(values) <= np.finfo(np.float32).max)).any():
            row = int(is_bad.argmax())
            fact = f"{given[row]:g} is too large for a 32-bit number after transform = '{feature.transform}'"
            raise rows.error(row, feature.column, fact, "Correct it, or use 'clip' or another transform.")
        return [values, is_missing.astype(np.float64)] if feature.flag_missing else [values]

    def _given_numbers(self, rows: RawRows, feature: NumericFeature | BucketFeature) -> np.ndarray:
        arguments = rows, feature.column, self.recipe.log.missing_texts(feature), self.recipe.log.input
        if self._on_bad_value == "fail":
            return numbers(*arguments)
        found, is_bad = usable_numbers(*arguments)
        self.tally.add(feature.name, bad=is_bad)
        return found

    def _ids(self, rows: RawRows, feature: TableFeature) -> np.ndarray:
        """Return int64 [rows, ids per row]."""
        if isinstance(feature, CategoricalFeature):
            return self._categories(rows, feature)
        if isinstance(feature, CrossFeature):
            missing = self.recipe.log.missing_texts(feature)
            parts = [single_texts(rows, column, missing) for column in feature.columns]
            joined = pl.DataFrame({str(i): part for i, part in enumerate(parts)}).select(
                pl.concat_str(pl.all(), separator=_JOINT)
            )
            given = joined.to_series()
            ids = hashed(given, feature.name, feature.table_size)
            self.tally.add(feature.name, missing=ids == MISSING)
            return ids[:, None]
        if isinstance(feature, BucketFeature):
            values = self._given_numbers(rows, feature)
            ids = np.where(np.isnan(values), MISSING, 1 + buckets(values, feature, self.recipe.learned[feature.name]))
            self.tally.add(feature.name, missing=ids == MISSING)
            return ids[:, None].astype(np.int64)
        return self._time_ids(rows, feature)

    def _time_ids(self, rows: RawRows, feature: TimeFeature) -> np.ndarray:
        is_seen = np.zeros(PARTS[feature.part], bool)
        is_seen[self.recipe.learned[feature.name].seen] = True
        if self._on_bad_value == "fail":
            of_times = parts_of(rows, self.recipe.log, feature)
            self.tally.add(feature.name, unseen=~is_seen[of_times])
            return 1 + of_times[:, None]
        found = usable_times(rows, self.recipe.log)
        is_bad = found.is_null().to_numpy()
        of_times = time_parts(found.fill_null(0).to_numpy(), feature.part)
        self.tally.add(feature.name, missing=is_bad, unseen=~is_bad & ~is_seen[of_times], bad=is_bad)
        return np.where(is_bad, MISSING, 1 + of_times)[:, None]

    def _write_ids_of_codes(self, rows: RawRows, places: dict[str, int], ids: np.ndarray) -> list[str]:
        """Write the ids of features whose values have codes, and one id each. Return the names of these features."""
        parser = load_parser()
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for feature in self.recipe.log.tables if parser else ():
            if not isinstance(feature, CategoricalFeature) or self.recipe.learned[feature.name].has_lists:
                continue
            if feature.column in rows.codes and feature.name not in self._without:
                table = rows.table(feature.column, f"ids of {feature.name}", partial(self._looked_up, feature))
                if table is not None:
                    found[feature.name] = table, rows.codes[feature.column][1]
        if parser and found:
            counts = np.zeros((len(found), 2), np.int64)
            tables, codes = (addresses(arrays) for arrays in zip(*found.values(), strict=True))
            columns = np.array([places[name] for name in found])
            shape = len(found), *ids.shape, ids.itemsize
            parser.call("look_up", tables, codes, columns, *shape, ids, counts)
            for name, (missing, unseen) in zip(found, counts.tolist(), strict=True):
                self.tally.add_counts(name, missing=missing, unseen=unseen)
        return [*found]

    def _categories(self, rows: RawRows, feature: CategoricalFeature) -> np.ndarray:
        """Return the ids of each row, and count what they stand for."""
        found = rows.per_value(feature.column, f"ids of {feature.name}", partial(self._looked_up, feature))
        if not self.recipe.learned[feature.name].has_lists:
            self.tally.add(feature.name, missing=found == MISSING, unseen=found == UNSEEN)
            return found
        ids, lengths = found[:, :-1], found[:, -1]
        is_clipped = lengths > ids.shape[1]
        self.tally.add(feature.name, missing=lengths == 0, unseen=(ids == UNSEEN).any(axis=1), clipped=is_clipped)
        return ids

    def _looked_up(self, feature: CategoricalFeature, rows: RawRows) -> np.ndarray:
        """Return the ids of each row; those of lists are followed by the length of the list."""
        given = categories(rows, feature, self.recipe.log)
        learned = self.recipe.learned[feature.name]
        if learned.has_lists != isinstance(given.dtype, pl.List):
            kinds = ("lists", "single values") if learned.has_lists else ("single values", "lists")
            fact = f"column {feature.column} holds {kinds[1]}, and in training it held {kinds[0]}"
            raise DataError(f"{rows.file}: {fact}. Give it the form that it had in training.")
        if not learned.has_lists:
            return self._ids_of(given, feature)[:, None].astype(self.id_type)
        size = learned.ids_per_row
        lengths = given.list.len().fill_null(0).cast(pl.Int64).to_numpy()
        kept = given.list.head(size)
        kept_lengths = np.minimum(lengths, size)
        flat = self._ids_of(kept.filter(pl.Series(kept_lengths > 0)).explode(), feature)
        row_of = np.repeat(np.arange(len(given)), kept_lengths)
        place = np.arange(len(flat)) - np.repeat(np.cumsum(kept_lengths) - kept_lengths, kept_lengths)
        ids: np.ndarray = np.full((len(given), size + 1), MISSING, self.id_type)
        ids[row_of, place] = flat
        ids[:, -1] = lengths
        return ids

    def _ids_of(self, given: pl.Series, feature: CategoricalFeature) -> np.ndarray:
        learned = self.recipe.learned[owner(feature)]
        if table_of(self.recipe.log, feature).ids == "hash":
            return hashed(given, owner(feature), learned.rows)
        codes = given.cast(self._vocabulary(owner(feature)), strict=False).to_physical().cast(pl.Int64)
        ids = codes.fill_null(UNSEEN - FIRST_VALUE).to_numpy() + FIRST_VALUE
        return np.where(given.is_null().to_numpy(), MISSING, ids)

    def _vocabulary(self, name: str) -> pl.Enum:
        if name not in self._vocabularies:
            frame = pl.read_parquet(self._directory / vocabulary_file(name), glob=False)
            self._vocabularies[name] = pl.Enum(frame.filter(pl.col("id") >= FIRST_VALUE).sort("id")["value"])
        return self._vocabularies[name]


def transformed(values: np.ndarray, feature: NumericFeature, learned: Learned) -> np.ndarray:
    """Apply the transform of a numeric feature to numbers without gaps."""
    if feature.transform == "log1p":
        return np.asarray(np.copysign(np.log1p(np.abs(values)), values))
    if feature.transform == "sqrt":
        return np.asarray(np.copysign(np.sqrt(np.abs(values)), values))
    if feature.transform == "rank":
        return np.interp(values, learned.boundaries, learned.ranks) if learned.boundaries else np.zeros(len(values))
    if feature.transform == "power":
        values = yeo_johnson(values, learned.power)
    return (values - learned.shift) / learned.scale


def yeo_johnson(values: np.ndarray, power: float) -> np.ndarray:
    """Return the Yeo-Johnson transform of the values (Biometrika 87, 2000): a power of |x| + 1, other below 0."""
    size = np.log1p(np.abs(values))
    exponent = np.where(values >= 0, power, 2 - power)
    is_log = np.abs(exponent) < 1e-12
    raised = np.where(is_log, size, np.expm1(exponent * size) / np.where(is_log, 1, exponent))
    return np.asarray(np.copysign(raised, values))


def buckets(values: np.ndarray, feature: BucketFeature, learned: Learned) -> np.ndarray:
    """Return the bucket of each number, from 0 on; anything for NaN."""
    if feature.boundaries != LOG_SQUARED:
        return np.searchsorted(np.array(learned.boundaries), values, side="right")
    assert learned.low is not None and learned.high is not None
    return np.nan_to_num(np.clip(log_squared(values), learned.low, learned.high) - learned.low)


def log_squared(values: np.ndarray) -> np.ndarray:
    """Return floor(log(x)^2) of numbers above 2, as the winners of Criteo's contest did; others lose decimals."""
    with np.errstate(invalid="ignore"):
        return np.where(values > 2, np.floor(np.log(np.maximum(values, 2)) ** 2), np.trunc(values))


def hashed(given: pl.Series, name: str, table_rows: int) -> np.ndarray:
    """Return an id of FIRST_VALUE..table_rows - 1 for each text, by its hash, and MISSING for null."""
    distinct = given.unique().drop_nulls()
    space, seed = table_rows - FIRST_VALUE, xxhash.xxh3_64_intdigest(name.encode())
    ids = [FIRST_VALUE + xxhash.xxh3_64_intdigest(value.encode(), seed=seed) % space for value in distinct]
    found = pl.DataFrame({"value": given}).join(
        pl.DataFrame({"value": distinct, "id": pl.Series(ids, dtype=pl.Int64)}),
        on="value",
        how="left",
        maintain_order="left",
    )
    return found["id"].fill_null(MISSING).to_numpy()


def parts_of(rows: RawRows, log: ClicksSchema, feature: TimeFeature) -> np.ndarray:
    """Return the part of each row's time that the feature is about."""
    assert log.time
    return rows.per_value(log.time.column, feature.part, lambda values: time_parts(times(values, log), feature.part))


def time_parts(microseconds: np.ndarray, part: str) -> np.ndarray:
    """Return a part of each time, in UTC, from 0 on: Monday, January and the first of a month are 0."""
    when = pl.Series(microseconds).cast(pl.Datetime("us")).dt
    weekday = (microseconds // _DAY + 3) % 7  # 1970 began on a Thursday
    found: Any
    match part:
        case "hour":
            found = when.hour().to_numpy()
        case "day":
            found = when.day().to_numpy() - 1
        case "month":
            found = when.month().to_numpy() - 1
        case "weekday":
            found = weekday
        case _:
            found = weekday >= 5
    return np.asarray(found, dtype=np.int64)


def fixed_rows(feature: AnyFeature) -> int:
    """Return the rows of a table whose size is not learned; 0 for others."""
    if isinstance(feature, CategoricalFeature):
        return feature.table_size if feature.ids == "hash" and not feature.share_table else 0
    if isinstance(feature, CrossFeature):
        return feature.table_size
    return PARTS[feature.part] + 1 if feature.type == "time" else 0
