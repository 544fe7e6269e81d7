"""Guess the schema of a click log from a sample of its rows, with a reason for every guess."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import tomli_w

from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.parquet import converted_type
from recmill.datasets.inputs.reading import check_columns, columns_of, frames, types_of, wrong_header
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.inputs.times import parsed_times
from recmill.datasets.own_clicks.schema import LabelSection, feature_name
from recmill.datasets.own_clicks.values import CLICK, NO_CLICK, grouped, plain_numbers
from recmill.errors import ConfigError, DataError, did_you_mean
from recmill.metrics.auc import auroc_alone

SAMPLE_ROWS = 40_000
_INNER = ["|", ";", "^", ",", " "]  # between the values of one field
_LABELS = re.compile(r"(is_?)?(click(ed)?|label|target|y|conversion|converted|purchase[d]?)", re.I)
_IDS = re.compile(r"(.*_)?(id|code|type|category|zip)|.*[a-z]Id|C\d+", re.I)
_AMOUNTS = re.compile(
    r"(.*[_-])?(count|cnt|price|amount|age|num|number|quantity|duration|seconds|hours|days|score|rating|size|length|"
    r"gain|loss)([_-]per[_-][a-z]+)?|I\d+",
    re.I,
)
_GAPS = 0.01  # a larger share of missing numbers gets a flag of its own
_HAVE_UNIT = 0.9  # of the values, if a column holds numbers with a unit
_OWN_ID = 0.95  # a larger share of different values is the row's own id
_FEW = 10  # whole numbers with no more different values are names, whatever they are called
_KNOWS_LABEL = 0.99
_FEW_ROWS = 100  # in fewer, ids and numbers are unique, or separate the clicks, by chance
_FEW_TEXTS = 0.5  # a smaller share of texts among numbers is worth a remark
_MISSING = [
    "n/a",
    "N/A",
    "NA",
    "na",
    "nan",
    "null",
    "None",
    "none",
    "-",
    "?",
]  # if the column's other values are numbers
_LISTS = "lists"
_EPOCHS = {9: ("s", 1), 10: ("s", 1), 13: ("ms", 1000), 16: ("us", 1_000_000)}  # digits of a time since 1970
_FORMATS = {8: ["%Y%m%d", "%y%m%d%H"], 10: ["%Y%m%d%H"]}  # by digits
_YEARS = (631_152_000, 2_208_988_800)  # 1990 to 2040, in seconds
_TIMES = re.compile(r".*(time|date|stamp).*", re.I)
_DATES = ["%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d"]  # if day and month cannot be told apart, the day is first
_YES = ["yes", "y", "t", "click", "clicked"]
_PLAIN = r"^\s*-?\d+(?:{}\d+)?\s*$"  # a number without separated thousands
_UNIT = r"(?:[€$£¥₹%]|EUR|USD|GBP|CHF|kg|km)"
_WITH_UNIT = rf"^\s*(?:{_UNIT}\s*-?\d[\d.,]*|-?\d[\d.,]*\s*{_UNIT})\s*$"


@dataclass
class Guess:
    """What to do with a column, and why. Without a feature, the column is left out."""

    column: str
    why: str
    features: list[dict[str, Any]] = field(default_factory=list)
    time_format: str = ""
    instead: dict[str, Any] = field(default_factory=dict)  # another feature, which the schema has as a comment

    @property
    def kind(self) -> str:
        if self.time_format:
            return "time"
        return self.features[0]["type"] if self.features else "left out"


@dataclass
class LabelGuess:
    """What is a click. `others`: values that may or may not mean a click, the rarest first."""

    section: LabelSection
    others: list[str]

    @property
    def why(self) -> str:
        if self.others:
            return f"values {', '.join(map(repr, self.others[:_FEW]))}: set label.positive to those that mean a click"
        return f"clicks: {', '.join(self.section.positive) or '1, true'}"


def guess(
    files: Sequence[InputFile], label: str | None, section: InputSection
) -> tuple[InputSection, LabelGuess, list[Guess]]:
    """Return the section with texts for missing values, what is a click, and a guess for every other column."""
    there = columns_of(files[0], section, "--")
    if label not in there and (hint := wrong_header(files[0], section, there, [label] if label else [], "--")):
        fact = f"no column '{label}'" if label else "no names of columns"
        raise DataError(f"{files[0]}: {fact}{hint}")
    refused = _refused(files[0], section)
    columns = [column for column in there if column not in refused]
    sample = _sample(files, section, columns)
    if label is None:
        raise ConfigError(_which_label(sample))
    section, written = _with_number_style(section, sample)
    sample = sample.with_columns(plain_numbers(sample[name], section).alias(name) for name in written)
    section = _with_missing(section, sample)
    if label not in columns:
        near = did_you_mean(label, columns)
        raise DataError(f"{files[0]}: no column '{label}'; it has {', '.join(there)}. {near}Correct --label.")
    texts = {name: _text(sample[name], section.missing) for name in columns}
    clicks = _clicks(label, texts[label])
    is_click = texts[label].fill_null("").is_in([*CLICK, *clicks.section.positive]).to_numpy()
    guesses = [_column(name, sample[name], texts[name], is_click) for name in columns if name != label]
    for found in guesses:
        found.why += _style_remark(section) * (found.column in written)
    guesses += [Guess(name, why) for name, why in refused.items()]
    times = [found for found in guesses if found.time_format]
    for other in times[1:]:
        other.time_format, other.features, other.why = "", [], f"another time than {times[0].column}; add it by hand"
    if not any(found.features for found in guesses):
        reasons = "".join(f"\n  {found.column}: {found.why}" for found in guesses)
        remedy = "Add such a column, or write a schema by hand: docs/own-data.md."
        raise DataError(f"{files[0]}: no column beside the label {label} can be a feature:{reasons}\n{remedy}")
    _make_names_unique(guesses)
    return section, clicks, guesses


def _make_names_unique(guesses: list[Guess]) -> None:
    """Give a name of its own to each feature whose default name another one has, like a.b and a_b."""
    used: set[str] = set()
    for feature in (feature for found in guesses for feature in found.features):
        name = wanted = feature.get("name") or feature_name(feature["column"])
        number = 2
        while name in used or f"{name} is missing" in used:
            name, number = f"{wanted}_{number}", number + 1
        used |= {name, f"{name} is missing"} if feature.get("flag_missing") else {name}
        if name != wanted:
            feature["name"] = name


def as_toml(section: InputSection, label: LabelGuess, guesses: list[Guess]) -> str:
    """Return the schema as a file to edit, with the reason of every guess."""
    by_time = next((found for found in guesses if found.time_format), None)
    parts = ["# Guessed from a sample of the rows: check every line. Keys: docs/own-data.md\nformat = 1\n"]
    if changed := section.model_dump(exclude_defaults=True):
        parts.append(tomli_w.dumps({"input": changed}))
    remark = f"# {label.why}, for example:\n# positive = [{_quoted(label.others[0])}]\n" if label.others else ""
    parts.append(tomli_w.dumps({"label": label.section.model_dump(exclude_defaults=True)}) + remark)
    if by_time:
        parts.append(tomli_w.dumps({"time": {"column": by_time.column, "format": by_time.time_format}}))
    parts.append(tomli_w.dumps({"split": {"by": "time" if by_time else "rows", "val": 0.1, "test": 0.1}}))
    for found in guesses:
        name = found.column if found.column.isprintable() else repr(found.column)
        is_used = found.features or found.time_format
        reason = f"# {name}: {found.why}\n" if is_used else f"# {name} is left out: {found.why}\n"
        if found.instead:
            other = f"or, instead of it:\n[[feature]]\n{tomli_w.dumps(found.instead)}"
            reason += "".join(f"# {line}\n" for line in other.splitlines())
        parts.append(reason + "\n".join(f"[[feature]]\n{tomli_w.dumps(feature)}" for feature in found.features))
    return "\n".join(parts)


def _refused(file: InputFile, section: InputSection) -> dict[str, str]:
    """Return the columns of which no feature can be made, like objects and maps, and why."""
    found = {}
    for column, dtype in types_of(file, section).items() if section.kind_of(file) != "text" else ():
        try:
            converted_type(str(file), column, dtype)
        except DataError as error:
            found[column] = str(error).partition(f"column {column} ")[2].partition(", ")[0]
    return found


def _sample(files: Sequence[InputFile], section: InputSection, columns: list[str]) -> pl.DataFrame:
    """Return the first rows of every file, SAMPLE_ROWS together."""
    per_file = max(SAMPLE_ROWS // len(files), 1)
    check_columns(files, section, columns)
    parts: list[pl.DataFrame] = []
    for file in files:
        found: list[pl.DataFrame] = []
        for frame in frames(file, section, columns, "--"):
            found.append(frame)
            if sum(map(len, found)) >= per_file:
                break
        if not found:  # a Parquet file without rows
            continue
        parts.append(pl.concat(found).head(per_file))
        types, first = parts[-1].schema, parts[0].schema
        if differing := [name for name in columns if types[name] != first[name]]:
            kinds = f"{types[differing[0]]}, and in the files before it {first[differing[0]]}"
            raise DataError(f"{file}: column {differing[0]} holds {kinds}. Make them the same.")
    if not parts:
        raise DataError(f"{files[0]}: no rows. Give files that have some.")
    return pl.concat(parts)


def _with_missing(section: InputSection, sample: pl.DataFrame) -> InputSection:
    """Return the section with the texts that stand for no value in columns whose other values are numbers."""
    found: set[str] = set()
    for column in sample.get_columns():
        if column.dtype == pl.String:
            filled = _text(column, section.missing).drop_nulls()
            others = filled.filter(filled.str.strip_chars().cast(pl.Float64, strict=False).is_null()).unique()
            if len(others) and others.is_in(_MISSING).all() and others.len() < filled.n_unique():
                found |= {*others}
    return section.model_copy(update={"missing": [*section.missing, *sorted(found)]}) if found else section


def _quoted(value: str) -> str:
    return tomli_w.dumps({"": value}).partition(" = ")[2].strip()


def _with_number_style(section: InputSection, sample: pl.DataFrame) -> tuple[InputSection, list[str]]:
    """Add how numbers are written, if some are like 4,32 or 1.234,50 or 1,234.50; return the columns of these."""
    texts = [column for column in sample.get_columns() if column.dtype == pl.String]
    filled = {column.name: column.filter(~column.is_in([*section.missing, *_MISSING])) for column in texts}
    for decimal, thousands, evidence in ((",", ".", r",|\.\d{3}\."), (".", ",", r",\d{3}[,.]")):
        form = f"{_PLAIN.format(re.escape(decimal))}|{grouped(thousands, decimal)}"
        written = [name for name, values in filled.items() if len(values) and values.str.contains(form).all()]
        written = [name for name in written if filled[name].str.contains("[.,]").any()]
        if any(filled[name].str.contains(evidence).any() for name in written):
            is_grouped = any(filled[name].str.contains(grouped(thousands, decimal)).any() for name in written)
            found = {"decimal": decimal, "thousands": thousands if is_grouped else ""}
            return section.model_copy(update=found), written
    return section, []


def _style_remark(section: InputSection) -> str:
    thousands = f" and {section.thousands!r} for thousands" if section.thousands else ""
    if section.decimal == ",":
        return f", with decimal commas{thousands} (if they are lists, remove input.decimal)"
    return f", with {section.thousands!r} for thousands"


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


def _clicks(name: str, label: pl.Series) -> LabelGuess:
    """Return what is a click: 1 and true need not be named. Of other labels, only a plain yes is understood."""
    counted = label.drop_nulls().value_counts().sort("count", label.name)
    found = counted[label.name].to_list()
    known = {*CLICK, *NO_CLICK}
    yes = [value for value in found if value.lower() in _YES]
    if len(found) == 2 and len(yes) == 1 and not known >= {value.lower() for value in found}:
        return LabelGuess(LabelSection(column=name, positive=yes), [])
    if len(found) > _FEW and (other := next((value for value in found if value.lower() not in known), None)):
        raise DataError(
            f"column {name} has {len(found):,} different values, like {other[:20]!r}, but a label is click or none. "
            "Name another --label; or name any column of 0 and 1, and then write what is a click into the schema's "
            f'[label]: column = {name!r}, positive = "> 3".'
        )
    return LabelGuess(LabelSection(column=name), [value for value in found if value.lower() not in known])


def _column(name: str, column: pl.Series, text: pl.Series, is_click: np.ndarray) -> Guess:
    filled = text.drop_nulls()
    distinct = filled.n_unique()
    rows = f"{len(column):,} rows"
    if distinct < 2:
        return Guess(name, f"one value only in {rows}")
    if form := _time_format(column, filled):
        if missing := len(text) - len(filled):
            why = f"times ({form}), but {missing:,} of {rows} have none: to split by time, correct them, add [time]"
            return Guess(name, why)
        return _time(name, filled, form)
    made = _feature(name, column, filled, distinct)
    is_plain = made.kind == "categorical" and made.why != _LISTS and "separator" not in made.features[0]
    if is_plain and distinct > _OWN_ID * len(filled):
        if len(column) < _FEW_ROWS:
            made.why += f"; {rows} are too few to judge whether it is the row's own id"
            return made
        return Guess(name, f"{distinct:,} different values in {rows}: it looks like the row's own id")
    if 0 < is_click.sum() < len(is_click) and (alone := _auroc_of(made, text, is_click)) > _KNOWS_LABEL:
        if len(column) < _FEW_ROWS:
            made.why += f"; {rows} are too few to judge whether it gives the label away"
            return made
        return Guess(name, f"it gives the label away: alone it reaches an AUROC of {alone:.3f}")
    return made


def _time(name: str, filled: pl.Series, form: str) -> Guess:
    """Return a guess with those parts of the time whose values repeat.

    On average, each value must occur on two dates: of a log of one day, the hours of validation were never trained.
    """
    moments = pl.from_epoch(parsed_times(filled, form), time_unit="us")
    days = moments.dt.date()
    parts, reasons = [], []
    for part, values in {"hour": moments.dt.hour(), "weekday": moments.dt.weekday()}.items():
        dates = pl.DataFrame({"day": days, "part": values}).n_unique()
        if 2 <= values.n_unique() <= dates / 2:
            parts.append({"name": f"{feature_name(name)}_{part}", "type": "time", "part": part})
        else:
            fact = "one value only" if values.n_unique() < 2 else "too few days"
            reasons.append(f"no {part} ({fact})")
    if form.startswith("%d/") and not parsed_times(filled, form.replace("%d/%m/", "%m/%d/")).null_count():
        reasons.append("check the format: it fits with the month first, too")
    covered = f"{days.n_unique():,} day{'s' if days.n_unique() > 1 else ''} in the sample"
    return Guess(name, "; ".join([f"times ({form}), {covered}", *reasons]), parts, form)


def _feature(name: str, column: pl.Series, filled: pl.Series, distinct: int) -> Guess:
    plain = {"column": name, "type": "categorical"}
    if isinstance(column.dtype, pl.List):
        return Guess(name, _LISTS, [plain])
    numbers = filled.str.strip_chars().cast(pl.Float64, strict=False)
    if numbers.null_count():
        if filled.str.contains(_WITH_UNIT).sum() > _HAVE_UNIT * len(filled):
            why = (
                f"text, {distinct:,} different values, which look like numbers with a unit, such as {filled[0][:20]!r}"
            )
            return Guess(name, f"{why}; to use them as numbers, remove the unit from the file", [plain])
        if inner := _inner_separator(filled, distinct):
            return Guess(name, f"several values, separated by {inner!r}", [{**plain, "separator": inner}])
        why = f"text, {distinct:,} different values"
        if numbers.null_count() < _FEW_TEXTS * len(numbers):
            texts = filled.filter(numbers.is_null())
            first = texts.filter(~texts.is_in(_MISSING))[0]  # those alone would be missing values
            why += f"; most are numbers, but not {first[:20]!r}"
            instead = {"column": name, "type": "numeric", "missing_values": texts.unique().sort().to_list()}
            return Guess(name, why, [plain], instead=instead if texts.n_unique() <= _FEW else {})
        remarks, instead = _remarks(filled, plain)
        return Guess(name, "; ".join([why, *remarks]), [plain], instead=instead)
    has_decimals = bool(filled.str.contains(r"[.eE]").any()) or column.dtype.is_float()
    is_amount = bool(_AMOUNTS.fullmatch(name)) and not _IDS.fullmatch(name)
    if not has_decimals and not (is_amount and distinct > _FEW):
        return Guess(name, f"whole numbers, {distinct:,} different values", [plain])
    values = numbers.to_numpy()
    is_skewed = values.min() >= 0 and values.mean() > 1.5 * max(float(np.median(values)), 1e-9)
    transform = "log1p" if is_skewed else "standard"
    missing = 1 - len(filled) / len(column)
    why = f"numbers from {values.min():g} to {values.max():g}{', skewed' if is_skewed else ''}"
    flag = {"flag_missing": True} if missing > _GAPS else {}
    why += f", {missing:.0%} missing" if flag else ""
    return Guess(name, why, [{**plain, "type": "numeric", "transform": transform, **flag}])


def _remarks(filled: pl.Series, plain: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return remarks on texts that may stand for no value, or be the same, and the feature that takes them so."""
    texts = filled.unique().sort()
    missing = texts.filter(texts.is_in(_MISSING)).to_list()
    remarks = [f"{', '.join(map(repr, missing))} may stand for no value"] if missing else []
    instead: dict[str, Any] = {"missing_values": missing} if missing else {}
    first: dict[str, str] = {}
    for text in texts:
        other = first.setdefault(text.strip().lower(), text)
        if other != text:
            fact = f"{other[:20]!r} and {text[:20]!r} differ only in spaces or case"
            remarks.append(f"{fact} (normalize makes them the same)")
            instead["normalize"] = ["strip", "lower"]
            break
    return remarks, {**plain, **instead} if instead else {}


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
    length = int(digits[0])
    if filled.str.contains(r"^\d+$").all():
        if not (digits == length).all() and not digits.is_in([9, 10]).all():  # seconds had nine digits until 2001
            return ""
        length = int(digits.to_numpy().min())
        for form in _FORMATS.get(length, []):
            if _is_recent(parsed_times(filled, form) // 1_000_000):
                return form
        unit, factor = _EPOCHS.get(length, ("", 1))
        is_named = length > 9 or _TIMES.fullmatch(column.name)
        return unit if unit and is_named and _is_recent(filled.cast(pl.Int64) // factor) else ""
    if filled.str.contains(r"^\d{1,4}[./]\d{1,2}[./]\d{1,4}").all():
        forms = (f"{date}{time}" for date in _DATES for time in ("", " %H:%M", " %H:%M:%S"))
        return next((form for form in forms if not parsed_times(filled, form).null_count()), "")
    return "iso" if not parsed_times(filled, "iso").null_count() else ""


def _is_recent(seconds: pl.Series) -> bool:
    return not seconds.null_count() and seconds.is_between(*_YEARS).all()


def _auroc_of(made: Guess, text: pl.Series, is_click: np.ndarray) -> float:
    """Return the AUROC of a column alone."""
    if made.kind == "numeric":
        values = text.str.strip_chars().cast(pl.Float64, strict=False).fill_null(0.0).to_numpy()
    else:
        values = text.rank("dense").fill_null(0).to_numpy()[:, None]
    return auroc_alone(values, is_click) or 0.5
