"""Guess the schema of a click log from a sample of its rows, with a reason for every guess."""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tomli_w

from recmill.datasets.compressed import read_blocks
from recmill.datasets.own_clicks.reading import columns_of, read
from recmill.datasets.own_clicks.schema import InputSection
from recmill.errors import ConfigError, DataError
from recmill.metrics.auc import auroc

SAMPLE_ROWS = 40_000
_SEPARATORS = [",", "\t", ";", "|", "::"]
_INNER = ["|", ";", "^", ",", " "]  # between the values of one field
_LABELS = re.compile(r"(is_?)?(click(ed)?|label|target|y|conversion|converted|purchase[d]?)", re.I)
_IDS = re.compile(r".*(id|code|type|category|zip|C\d+)", re.I)
_AMOUNTS = re.compile(r".*(count|price|amount|age|num|number|duration|seconds|score|rating|size|length|I\d+)", re.I)
_OWN_ID = 0.95  # a larger share of different values is the row's own id
_MANY = 1000
_KNOWS_LABEL = 0.99
_EPOCHS = {9: ("s", 1), 10: ("s", 1), 13: ("ms", 1000), 16: ("us", 1_000_000)}  # digits of a time since 1970
_YEARS = (631_152_000, 2_208_988_800)  # 1990 to 2040, in seconds
_TIMES = re.compile(r".*(time|date|stamp).*", re.I)
_FORMATS = ["%y%m%d%H", "%Y%m%d%H", "%Y%m%d"]


@dataclass
class Guess:
    """What to do with a column, and why. Without a feature, the column is left out."""

    column: str
    why: str
    features: list[dict[str, Any]] = field(default_factory=list)
    time_format: str = ""

    @property
    def kind(self) -> str:
        if self.time_format:
            return "time"
        return self.features[0]["type"] if self.features else "left out"


def guess(files: list[Path], label: str | None) -> tuple[InputSection, list[Guess]]:
    """Return how to read the files, and a guess for every column but the label."""
    section = InputSection() if files[0].suffix == ".parquet" else InputSection(separator=_separator(files[0]))
    columns = columns_of(files[0], section)
    _check_header(files[0], columns, section)
    sample = _sample(files, section, columns)
    if label is None:
        raise ConfigError(_which_label(sample))
    if label not in columns:
        raise DataError(f"{files[0]}: no column '{label}'; it has {', '.join(columns)}. Correct --label.")
    texts = {name: _text(sample[name], section.missing) for name in columns}
    is_click = _clicks(texts[label])
    guesses = [_column(name, sample[name], texts[name], is_click) for name in columns if name != label]
    times = [found for found in guesses if found.time_format]
    for other in times[1:]:
        other.time_format, other.features, other.why = "", [], f"another time than {times[0].column}; add it by hand"
    return section, guesses


def as_toml(section: InputSection, label: str, guesses: list[Guess]) -> str:
    """Return the schema as a file to edit, with the reason of every guess."""
    by_time = next((found for found in guesses if found.time_format), None)
    parts = ["# Guessed from a sample of the rows: check every line. Keys: docs/own-data.md\nformat = 1\n"]
    if changed := section.model_dump(exclude_defaults=True):
        parts.append(tomli_w.dumps({"input": changed}))
    parts.append(tomli_w.dumps({"label": {"column": label}}))
    if by_time:
        parts.append(tomli_w.dumps({"time": {"column": by_time.column, "format": by_time.time_format}}))
    parts.append(tomli_w.dumps({"split": {"by": "time" if by_time else "rows", "val": 0.1, "test": 0.1}}))
    for found in guesses:
        name = found.column if found.column.isprintable() else repr(found.column)
        reason = f"# {name}: {found.why}\n" if found.features else f"# {name} is left out: {found.why}\n"
        parts.append(reason + "\n".join(f"[[feature]]\n{tomli_w.dumps(feature)}" for feature in found.features))
    return "\n".join(parts)


def _separator(file: Path) -> str:
    """Return the separator that occurs equally often in each of the first lines."""
    text = next(read_blocks(file, 1 << 18), b"").decode("utf-8", "replace")
    lines = text.splitlines()[: 1000 if text.endswith("\n") else -1][:1000]
    counts = {}
    for separator in _SEPARATORS:
        if len(separator) == 1:
            fields = {len(row) for row in csv.reader(lines, delimiter=separator)}
        else:
            fields = {line.count(separator) + 1 for line in lines}
        if len(fields) == 1 and max(fields) > 1:
            counts[separator] = max(fields)
    if not counts:
        raise DataError(
            f"{file}: none of {', '.join(map(repr, _SEPARATORS))} divides each of its first lines into the same number "
            "of fields. Write a schema by hand (docs/own-data.md), or correct the file."
        )
    return max(counts, key=lambda separator: counts[separator])


def _check_header(file: Path, columns: list[str], section: InputSection) -> None:
    is_number = [re.fullmatch(r"-?\d+(\.\d+)?", name) is not None for name in columns]
    if file.suffix != ".parquet" and sum(is_number) > len(columns) / 2:
        raise DataError(
            f"{file}: its first row is {section.separator.join(columns)[:80]!r}, which looks like data. "
            "Add a row with the names of the columns, or write a schema by hand with input.columns."
        )


def _sample(files: list[Path], section: InputSection, columns: list[str]) -> pl.DataFrame:
    """Return the first rows of every file, SAMPLE_ROWS together."""
    per_file = max(SAMPLE_ROWS // len(files), 1)
    parts = []
    for file in files:
        found: list[pl.DataFrame] = []
        for rows in read(file, section, columns):
            found.append(rows.frame)
            if sum(map(len, found)) >= per_file:
                break
        parts.append(pl.concat(found).head(per_file))
    return pl.concat(parts)


def _text(column: pl.Series, missing: list[str]) -> pl.Series:
    text = column.cast(pl.String) if not column.dtype.is_nested() else column.cast(pl.List(pl.String)).list.join("|")
    return text.set(text.is_in(missing), None)


def _which_label(sample: pl.DataFrame) -> str:
    two_valued = [
        name for name in sample.columns if not sample[name].dtype.is_nested() and sample[name].n_unique() == 2
    ]
    likely = [name for name in two_valued if _LABELS.fullmatch(name)] or two_valued
    hint = f"Likely: {', '.join(likely)}." if likely else f"The columns: {', '.join(sample.columns)}."
    return f"--label is missing: name the column that says whether a row was clicked. {hint}"


def _clicks(label: pl.Series) -> np.ndarray | None:
    """Return which rows are clicks, if the label is plain enough to tell."""
    lower = label.fill_null("").str.to_lowercase()
    is_click = lower.is_in(["1", "true", "yes"]).to_numpy()
    return is_click if 0 < is_click.sum() < len(is_click) else None


def _column(name: str, column: pl.Series, text: pl.Series, is_click: np.ndarray | None) -> Guess:
    filled = text.drop_nulls()
    distinct = filled.n_unique()
    rows = f"{len(column):,} rows"
    if distinct < 2:
        return Guess(name, f"one value only in {rows}")
    if form := _time_format(column, filled):
        parts = [{"name": f"{name}_{part}", "type": "time", "part": part} for part in ("hour", "weekday")]
        return Guess(name, f"times ({form})", parts, form)
    made = _feature(name, column, filled, distinct)
    if made.kind != "numeric" and "separator" not in made.features[0] and distinct > _OWN_ID * len(filled):
        return Guess(name, f"{distinct:,} different values in {rows}: it looks like the row's own id")
    if is_click is not None and (area := _area(made, text, is_click)) > _KNOWS_LABEL:
        return Guess(name, f"it knows the label: alone it reaches an AUROC of {area:.3f}")
    return made


def _feature(name: str, column: pl.Series, filled: pl.Series, distinct: int) -> Guess:
    plain = {"column": name, "type": "categorical"}
    if isinstance(column.dtype, pl.List):
        return Guess(name, "lists", [plain])
    numbers = filled.str.strip_chars().cast(pl.Float64, strict=False)
    if numbers.null_count():
        if inner := _inner_separator(filled, distinct):
            return Guess(name, f"several values, separated by {inner!r}", [{**plain, "separator": inner}])
        return Guess(name, f"text, {distinct:,} different values", [plain])
    has_decimals = bool(filled.str.contains(r"[.eE]").any()) or column.dtype.is_float()
    is_amount = bool(_AMOUNTS.fullmatch(name)) and not _IDS.fullmatch(name)
    if (
        not has_decimals
        and not (is_amount and distinct > 10)
        and (_IDS.fullmatch(name) or distinct <= _MANY or not is_amount)
    ):
        return Guess(name, f"whole numbers, {distinct:,} different values", [plain])
    values = numbers.to_numpy()
    is_skewed = values.min() >= 0 and values.mean() > 1.5 * max(float(np.median(values)), 1e-9)
    transform = "log1p" if is_skewed else "standard"
    why = f"numbers from {values.min():g} to {values.max():g}{', skewed' if is_skewed else ''}"
    return Guess(name, why, [{**plain, "type": "numeric", "transform": transform}])


def _inner_separator(filled: pl.Series, distinct: int) -> str:
    for separator in _INNER:
        is_divided = filled.str.contains(separator, literal=True).to_numpy()
        parts = filled.str.split(separator).explode()
        if is_divided.mean() > 0.5 and parts.n_unique() < min(distinct, len(parts) / 4):
            return separator
    return ""


def _time_format(column: pl.Series, filled: pl.Series) -> str:
    if isinstance(column.dtype, pl.Date | pl.Datetime):
        return "iso"
    digits = filled.str.len_chars()
    if filled.str.contains(r"^\d+$").all():
        length = int(digits[0])
        if (digits == length).all() and length in _EPOCHS and (length > 9 or _TIMES.fullmatch(column.name)):
            unit, factor = _EPOCHS[length]
            seconds = filled.cast(pl.Int64) // factor
            return unit if seconds.is_between(*_YEARS).all() else ""
        for form in _FORMATS:
            padded, wanted = (filled + " 00", f"{form} %M") if "%H" in form else (filled, form)
            dtype = pl.Datetime("us") if "%H" in form else pl.Date()
            parsed = padded.str.strptime(dtype, wanted, strict=False)
            if (digits == len(filled[0])).all() and length in (8, 10) and not parsed.null_count():
                return form
        return ""
    if not filled.str.contains(r"^\d{4}-\d{2}-\d{2}").all():
        return ""
    try:
        return "iso" if not filled.str.to_datetime(strict=False, time_unit="us").null_count() else ""
    except pl.exceptions.ComputeError:
        return ""


def _area(made: Guess, text: pl.Series, is_click: np.ndarray) -> float:
    """Return the AUROC of a column alone. What its values mean is learned from one half, and measured on the other."""
    is_known = np.arange(len(text)) % 2 == 0
    if made.kind == "numeric":
        scores = text.str.strip_chars().cast(pl.Float64, strict=False).fill_null(0.0).to_numpy()
    else:
        frame = pl.DataFrame({"value": text, "click": is_click.astype(np.float64)})
        means = frame.filter(pl.Series(is_known)).group_by("value").agg(pl.col("click").mean().alias("rate"))
        joined = frame.join(means, on="value", how="left", maintain_order="left", nulls_equal=True)
        scores = joined["rate"].fill_null(float(is_click.mean())).to_numpy()
    area = auroc(scores[~is_known].astype(np.float32), is_click[~is_known]) or 0.5
    return max(area, 1 - area)
