"""The schema of an own click log: a TOML file that says how to read its rows and which features to make of them.

It is as strict as a run config: an unknown key is an error that names the one that was meant.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from recmill.config.load import read_toml
from recmill.config.problems import Problem, report, validated
from recmill.config.sections import Section, key
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.times import FORMATS, is_format
from recmill.errors import ConfigError, UserError, did_you_mean, did_you_mean_path
from recmill.registry import unknown
from recmill.schema import Role

MISSING, UNSEEN, FIRST_VALUE = 0, 1, 2  # ids: no value; rare or not in the training rows; the most frequent value
_CONDITION = re.compile(r"(>=|<=|>|<|==|!=)\s*(-?\d+(?:\.\d+)?)", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[./\x00-\x1f]")
_MAX_NAME_BYTES = 200  # they are part of names of files
LOG_SQUARED = "log2-squared"
_BUCKETS = re.compile(r"quantiles:(\d{1,5})", re.ASCII)


class LabelSection(Section):
    column: str = key(..., "The column that says whether a row was clicked.")
    positive: list[str] | str = key([], "Its values that mean a click, or a condition like '> 3'. Default: 1 and true.")
    drop: str = key("", "Leave out rows whose label meets this condition, like '== 3'.")
    missing: Literal["fail", "drop"] = key("fail", "Rows without a label: an error, or left out.")

    def contradictions(self) -> list[str]:
        given = {"positive": self.positive, "drop": self.drop}
        return [
            f"label.{name} is '{text}': give a condition like '> 3', with one of >=, <=, >, <, ==, != and a number."
            for name, text in given.items()
            if isinstance(text, str) and text and not _CONDITION.fullmatch(text)
        ]


class TimeSection(Section):
    column: str = key(..., "The column that says when a row was recorded.")
    format: str = key("iso", FORMATS)

    def contradictions(self) -> list[str]:
        return [] if is_format(self.format) else [f"time.format is '{self.format}'. Give {FORMATS}"]


class SplitSection(Section):
    by: Literal["time", "rows", "random", "column", "files"] = key(
        "rows", "What decides: time, the order of rows, chance, a column, or the file."
    )
    val: Annotated[float, Field(gt=0, lt=1)] | list[str] = key(
        0.1, "A share; by = 'column': a list of values; by = 'files': names of files, without directories."
    )
    test: Annotated[float, Field(gt=0, lt=1)] | list[str] = key(0.1, "The same for the test.")
    val_from: str = key("", "by = 'time': when validation begins, as an ISO date; instead of shares.")
    test_from: str = key("", "by = 'time': when the test begins.")
    seed: int = key(1, "by = 'random': the seed.", ge=0, lt=2**63)
    group: str = key("", "by = 'random': rows with the same value in this column stay together.")
    column: str = key("", "by = 'column': the column.")

    def contradictions(self) -> list[str]:
        problems = []
        takes_names = self.by in ("column", "files")
        for name in ("val", "test"):
            if isinstance(getattr(self, name), list) != takes_names:
                form = "a list of names" if takes_names else "a share like 0.1"
                problems.append(f"split.{name}: with split.by = '{self.by}' it is {form}.")
        if isinstance(self.val, float) and isinstance(self.test, float) and self.val + self.test >= 1:
            problems.append(f"split.val + split.test is {self.val + self.test:g}: nothing is left to train on.")
        if isinstance(self.val, list) and isinstance(self.test, list) and (both := sorted({*self.val} & {*self.test})):
            problems.append(f"split.val and split.test both name '{both[0]}'. Name it in one of them.")
        if bool(self.val_from) != bool(self.test_from):
            problems.append("split.val_from and split.test_from go together: one of them is missing.")
        if bool(self.column) != (self.by == "column"):
            problems.append("split.column and split.by = 'column' go together: one of them is missing.")
        for name, value, by in (("val_from", self.val_from, "time"), ("group", self.group, "random")):
            if value and self.by != by:
                problems.append(f"split.{name} needs split.by = '{by}', it is '{self.by}'.")
        return problems


class SampleSection(Section):
    negatives: float = key(
        1.0, "The share of training rows without a click to keep; scores are corrected for it.", gt=0, le=1
    )
    seed: int = key(1, "The seed that chooses them.", ge=0, lt=2**63)


class KeepSection(Section):
    columns: list[str] = key([], "Columns to store beside the features, for metrics by group, for example.")
    weight: str = key("", "A column with the weight of each row, 0 or more. Default: all rows count the same.")


class Feature(Section):
    name: str = key("", "The feature's name; default: the column.")
    role: Role | None = key(None, "Whom it describes: user, item or context. A two-tower model needs it.")


class ColumnFeature(Feature):
    missing_values: list[str] = key([], "Texts that stand for no value here, besides those of input.missing.")


class CategoricalFeature(ColumnFeature):
    type: Literal["categorical"] = key(..., "Each value has a row of a table.")
    column: str = key(..., "The column of its values.")
    ids: Literal["vocabulary", "hash"] = key(
        "vocabulary", "vocabulary: a row for each value in training; hash: a row by the value's hash."
    )
    min_frequency: PositiveInt = key(2, "Values that occur less often in training share the row of unseen ones.")
    table_size: int = key(
        0, "Maximum rows of the table: the most frequent values. 0: no limit. Required for hashes.", ge=0
    )
    separator: str = key("", "Several values in one text, separated by this; lists of Parquet need none.")
    pooling: Literal["sum", "mean"] = key("mean", "How the vectors of several values are combined.")
    max_values: PositiveInt = key(16, "Use at most this many values of a field.", le=1000)
    normalize: list[Literal["strip", "lower"]] = key(
        [],
        "Changes of each text: strip removes spaces at both ends, lower makes letters lower case. Default: none.",
    )
    share_table: str = key("", "Another categorical feature, whose values and table this one uses.")

    @property
    def columns(self) -> list[str]:
        return [self.column]

    @model_serializer(mode="wrap")
    def without_an_empty_normalize(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values as versions without `normalize` did, so that the files of datasets stay the same."""
        values: dict[str, Any] = dump(self)
        if not self.normalize:
            values.pop("normalize", None)
        return values


class CrossFeature(ColumnFeature):
    type: Literal["cross"] = key(..., "The values of several columns together, by a hash.")
    columns: list[str] = key(..., "The columns.", min_length=2)
    table_size: int = key(..., "The rows of its table.", ge=3)


class BucketFeature(ColumnFeature):
    type: Literal["bucket"] = key(..., "Numbers between two boundaries have one row of a table.")
    column: str = key(..., "A column of numbers.")
    boundaries: list[float] | str = key(
        "quantiles:10",
        "The boundaries; 'quantiles:N': N buckets of equal size; 'log2-squared': floor(log(x)^2), if x > 2, else x.",
    )

    @property
    def columns(self) -> list[str]:
        return [self.column]

    @property
    def num_quantiles(self) -> int:
        match = _BUCKETS.fullmatch(self.boundaries) if isinstance(self.boundaries, str) else None
        return int(match[1]) if match else 0

    def contradictions(self) -> list[str]:
        if isinstance(self.boundaries, list) and self.boundaries != sorted(set(self.boundaries)):
            return [f"boundaries {self.boundaries} of '{self.name}': give numbers that grow."]
        is_text = isinstance(self.boundaries, str) and self.boundaries != LOG_SQUARED
        if is_text and not 2 <= self.num_quantiles <= 10_000:
            forms = f"numbers, '{LOG_SQUARED}', or 'quantiles:N', N = 2 to 10000"
            return [f"boundaries '{self.boundaries}' of '{self.name}': give {forms}."]
        return []


class TimeFeature(Feature):
    type: Literal["time"] = key(..., "A part of the column of [time] has a row of a table.")
    part: Literal["hour", "weekday", "is_weekend", "day", "month"] = key(
        ..., "hour, weekday, is_weekend, day (of the month) or month."
    )

    @property
    def columns(self) -> list[str]:
        return []


class NumericFeature(ColumnFeature):
    type: Literal["numeric"] = key(..., "A number that the network reads.")
    column: str = key(..., "A column of numbers.")
    transform: Literal["none", "log1p", "sqrt", "standard", "minmax", "rank", "power"] = key(
        "standard",
        "log1p and sqrt keep the sign. The others are learned from the training rows: rank is the share of smaller "
        "values; power (Yeo-Johnson) makes a skewed distribution more normal.",
    )
    clip: list[float] = key([], "Quantiles of the training rows beyond which values are clipped, like [0.001, 0.999].")
    missing: Literal["zero", "mean", "median"] | float = key(
        "median", "What stands for a missing number, before the transform: zero, mean, median, or a number."
    )
    flag_missing: bool = key(False, "Add a second number that is 1 where the value is missing, else 0.")

    @property
    def columns(self) -> list[str]:
        return [self.column]

    @property
    def dense_names(self) -> list[str]:
        return [self.name, *([f"{self.name} is missing"] if self.flag_missing else [])]

    def contradictions(self) -> list[str]:
        is_good = not self.clip or (len(self.clip) == 2 and 0 <= self.clip[0] < self.clip[1] <= 1)
        return [] if is_good else [f"clip {self.clip} of '{self.name}': give two quantiles, like [0.001, 0.999]."]


TableFeature = CategoricalFeature | CrossFeature | BucketFeature | TimeFeature
AnyFeature = TableFeature | NumericFeature
_TYPES: dict[str, type[Feature]] = {
    "categorical": CategoricalFeature,
    "cross": CrossFeature,
    "bucket": BucketFeature,
    "time": TimeFeature,
    "numeric": NumericFeature,
}


class ClicksSchema(Section):
    format: Literal[1] = key(1, "The version of this file's format.")
    input: InputSection = key(InputSection(), "How to read the files.")
    label: LabelSection = key(..., "What to predict.")
    time: TimeSection | None = key(None, "When a row was recorded.")
    split: SplitSection = key(SplitSection(), "Which rows are for training, validation and test.")
    sample: SampleSection = key(SampleSection(), "Which of the training rows to leave out.")
    keep: KeepSection = key(KeepSection(), "What else to store of each row.")
    feature: list[Annotated[AnyFeature, Field(discriminator="type")]] = key([], "The features, in order.")

    @property
    def numeric(self) -> list[NumericFeature]:
        return [feature for feature in self.feature if isinstance(feature, NumericFeature)]

    @property
    def tables(self) -> list[TableFeature]:
        return [feature for feature in self.feature if not isinstance(feature, NumericFeature)]

    @property
    def dense_names(self) -> list[str]:
        """The numbers that the network reads: those of the features, each with its flag behind it."""
        return [name for feature in self.numeric for name in feature.dense_names]

    @property
    def dense_roles(self) -> dict[str, Role]:
        return {name: feature.role for feature in self.numeric if feature.role for name in feature.dense_names}

    def missing_texts(self, feature: ColumnFeature) -> list[str]:
        """Return the texts that stand for no value of the feature."""
        return [*self.input.missing, *feature.missing_values]

    def feature_columns(self, without: Collection[str] = ()) -> list[str]:
        """Return the columns that the features are made of, except the features named in `without`."""
        features = [feature for feature in self.feature if feature.name not in without]
        of_time = [self.time.column] if self.time and any(isinstance(f, TimeFeature) for f in features) else []
        return list(dict.fromkeys([*of_time, *(column for f in features for column in f.columns)]))

    def coded_columns(self) -> list[str]:
        """Return the columns of which preparation stores numbers for the values: not those with measured numbers."""
        split = [self.label.column, self.time.column if self.time else "", self.split.column, self.split.group]
        of_values = [column for f in self.tables if not isinstance(f, BucketFeature) for column in f.columns]
        numbers = {self.keep.weight, *self.keep.columns, *(c for f in self.numeric for c in f.columns)}
        numbers |= {c for f in self.tables if isinstance(f, BucketFeature) for c in f.columns}
        return [column for column in dict.fromkeys([*filter(None, split), *of_values]) if column not in numbers]

    def columns(self) -> list[str]:
        """Return all columns that preparation reads."""
        others = [self.label.column, self.time.column if self.time else "", self.split.column, self.split.group]
        others += [self.keep.weight, *self.keep.columns]
        return list(dict.fromkeys([*filter(None, others), *self.feature_columns()]))


def load_schema(given: str | Path, columns_of_log: Callable[[InputSection], list[str]] = lambda _: []) -> ClicksSchema:
    """Read and check a schema, and name features after their columns. All problems are reported at once.

    `given`: a file, or the text of a schema, which has several lines.
    `columns_of_log`: is called if there are problems, to report columns that the log lacks, too.
    """
    if "\n" in str(given):
        try:
            values = tomllib.loads(str(given))
        except ValueError as error:
            raise ConfigError(f"--schema: not valid TOML: {error}.") from None
        return checked_schema(values, "--schema", columns_of_log)
    path = Path(given)
    if not path.exists():
        near = did_you_mean_path(path)
        raise ConfigError(
            f"--schema {path}: no such file. {near}Make one from the log: recmill schema --input LOG --label COLUMN "
            f"--output {path}."
        )
    return checked_schema(read_toml(path), str(path), columns_of_log)


def checked_schema(
    values: Mapping[str, Any], path: str, columns_of_log: Callable[[InputSection], list[str]] = lambda _: []
) -> ClicksSchema:
    """Return the schema with these values, which come from `path`."""
    listed = values.get("feature", [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{path}: 'feature' is a list: begin each feature with [[feature]].")
    common = {name: value for name, value in values.items() if name != "feature"}
    schema, problems = validated(ClicksSchema, common)
    features: list[Any] = []
    for entry in listed:
        named = {"name": feature_name(entry.get("column", "")), **entry}
        made, found = _checked_feature(named)
        problems += found
        features += [made] if made else []
    if not problems:
        schema = schema.model_copy(update={"feature": features})
        problems = [Problem(text, ()) for text in _contradictions(schema)]
    if problems:
        sections = [section for name, section in common.items() if name != "input"]
        with suppress(UserError):
            there = [] if schema.input.contradictions() else columns_of_log(schema.input)
            problems += _absent_columns([*sections, *listed], there)
        raise ConfigError(report(path, problems, {}))
    return schema


def _absent_columns(sections: Sequence[Any], there: list[str]) -> Iterator[Problem]:
    """Yield a problem for each column that these sections name and the log lacks, if its columns are known."""
    tables = [section for section in sections if isinstance(section, Mapping)]
    named = [table.get("column") for table in tables]
    named += [column for table in tables if isinstance(table.get("columns"), list) for column in table["columns"]]
    for column in dict.fromkeys(column for column in named if isinstance(column, str)):
        if there and column not in there:
            yield Problem(f"the log has no column '{column}'. {did_you_mean(column, there)}".rstrip(), ())


def feature_name(column: str) -> str:
    """Return the name of a feature of this column: names of tables cannot have dots or slashes, nor be empty."""
    return _NOT_IN_NAMES.sub("_", column) or "unnamed"


def _checked_feature(values: Mapping[str, Any]) -> tuple[Feature | None, list[Problem]]:
    where = f"feature.{values.get('name') or '?'}."
    kind = values.get("type")
    if kind not in _TYPES:
        return None, [Problem(f"'{where}type': {unknown('value', str(kind), _TYPES)}", (f"{where}type",))]
    return validated(_TYPES[kind], values, prefix=where)


def _contradictions(schema: ClicksSchema) -> Iterator[str]:
    sections = [schema.input, schema.label, *([schema.time] if schema.time else []), schema.split, *schema.feature]
    yield from (text for section in sections for text in section.contradictions())
    names = [*schema.dense_names, *(feature.name for feature in schema.tables)]
    for name, times in sorted(Counter(names).items()):
        facts = {
            "is empty": not name,
            f"is longer than {_MAX_NAME_BYTES} bytes": len(name.encode()) > _MAX_NAME_BYTES,
            "occurs twice": times > 1,
            "has a dot, a slash or a control character": name != feature_name(name),
        }
        if fact := next((fact for fact, is_so in facts.items() if is_so), ""):
            yield f"feature '{name[:80]}': the name {fact}. Give it another 'name'."
    if not schema.feature:
        yield "it has no feature. Add a [[feature]] for each column to use."
    elif not schema.tables:
        yield "all its features are numeric. The models here need at least one table: make one of them a 'bucket'."
    if schema.time is None and (schema.split.by == "time" or any(isinstance(f, TimeFeature) for f in schema.feature)):
        yield "split.by = 'time' and features of type 'time' need [time] with a column."
    if schema.keep.weight and schema.keep.weight in [schema.label.column, *schema.feature_columns()]:
        yield f"keep.weight: '{schema.keep.weight}' is the label or a feature, too. Use one of them."
    if len(set(schema.keep.columns)) < len(schema.keep.columns):
        yield f"keep.columns {schema.keep.columns}: a column occurs twice. Name it once."
    if schema.label.column in schema.feature_columns():
        yield f"'{schema.label.column}' is the label, so it cannot be a feature. Remove that feature."
    owners = {f.name: f for f in schema.feature if isinstance(f, CategoricalFeature) and not f.share_table}
    for feature in schema.feature:
        if not isinstance(feature, CategoricalFeature):
            continue
        if feature.share_table and feature.share_table not in owners:
            yield f"feature.{feature.name}.share_table: '{feature.share_table}' is no categorical feature with a table."
        of_table = {"ids", "min_frequency", "normalize", "table_size"}
        if feature.share_table and (own := of_table & set(feature.changed_keys())):
            yield f"feature.{feature.name}.{min(own)}: its table is that of '{feature.share_table}'. Set it there."
        if feature.ids == "hash" and feature.table_size < FIRST_VALUE + 1:
            yield f"feature.{feature.name}.ids = 'hash' needs table_size, 3 or more."
        if 0 < feature.table_size < FIRST_VALUE + 1:
            yield f"feature.{feature.name}.table_size is {feature.table_size}: give 3 or more, or 0 for all values."


def condition(text: str) -> tuple[str, float]:
    """Return the operator and the number of a condition like '> 3'."""
    match = _CONDITION.fullmatch(text)
    assert match
    return match[1], float(match[2])
