"""The options of `prepare criteo`, checked against each other, and the rules that follow from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recmill.config.sections import Section, key
from recmill.datasets.click_log import LogFormat
from recmill.datasets.clicks import held_out
from recmill.errors import ConfigError
from recmill.schema import ClicksLayout

CRITEO = LogFormat(num_dense=13, num_sparse=26)
_DEFAULT_BAD_ROWS = 1000
_OFFSETS = {"log3": 3, "log2": 2}  # the stored value is log(x + offset)
LOG_MIN = "log-min"  # log(x - smallest x + 2)
STORED = "stored"  # dense values of npy files, which are transformed already


@dataclass(frozen=True)
class System:
    """The data scripts of a system: with --compat, `dense` and `format` are fixed and the rest are defaults."""

    ids: tuple[str, ...]  # the kinds of ids that it supports, the default first
    dense: str
    format: ClicksLayout
    shuffle: str = "none"
    last_day: str = "val-first"
    table_size: tuple[int, ...] = ()  # for ids by modulo
    is_torchrec: bool = False  # or derived from it: ids in order of occurrence, a missing id counts as raw id 0


_SYSTEMS = {
    "": System(("contiguous", "mod", "hash64"), dense="log3", format="npy"),  # our own defaults
    "torchrec": System(("contiguous", "mod"), dense="log-min", format="npy", is_torchrec=True),
    "torchrec-fixed": System(("contiguous", "mod"), dense="log-min", format="npy", is_torchrec=True),
    "mlperf-v2": System(("contiguous",), dense="log3", format="npy", shuffle="global", is_torchrec=True),
    "oneflow": System(("mod", "hash64"), "log2", "parquet", "global", "test-first", table_size=(40_000_000,)),
}


class Options(Section):
    input: str = key(..., "Directory of the raw logs, or a single log; or of TorchRec's npy files.")
    sparse_input: str | None = key(None, "Directory of day_N_sparse.npy, if they are not with the other npy files.")
    source: Literal["1tb", "kaggle"] | None = key(
        None, "1tb: day_0, day_1, ...; kaggle: train.txt and test.txt. By default found by their names."
    )
    ids: Literal["contiguous", "mod", "hash64"] | None = key(
        None, "contiguous: by vocabulary (default); mod: modulo table size; hash64: xxhash64. 0: missing."
    )
    min_frequency: NonNegativeInt | None = key(
        None, "Ids that occur less often share id 1. 2 or more also trains that row for unseen ids."
    )
    id_order: Literal["frequency", "first-seen"] | None = key(
        None, "Contiguous ids: the most frequent first (default), or in order of occurrence."
    )
    table_size: list[Annotated[int, Field(ge=3, le=2**32)]] | None = key(
        None, "Maximum rows per table: one number, or 26. Contiguous ids beyond it share id 1."
    )
    dense: Literal["log3", "log-min", "log2", "log1-clip"] | None = key(
        None, "log(x+3) (default for 1tb); log(x-min+2) (default for kaggle); log(x+2); log(1+max(x,0))."
    )
    last_day: Literal["val-first", "test-first", "none"] | None = key(
        None, "Which half of the last day is for val (default val-first); none: no day is held out."
    )
    val_fraction: float | None = key(
        None, "One log or --last-day none: fraction of rows for val, and the same for test.", gt=0, lt=0.5
    )
    shuffle: Literal["none", "day", "global"] | None = key(
        None, "Shuffle the training rows: not at all (default), within each day, or over all days."
    )
    seed: int = key(0, "Seed of --shuffle and --multi-hot. Same seed, same bytes.", ge=0, lt=2**32)
    format: ClicksLayout | None = key(
        None, "npy (default), parquet (default for spark), or bin: records, as TorchRec's NVTabular scripts."
    )
    multi_hot: list[PositiveInt] | None = key(
        None, "Ids per row and table, one number or 26: a fixed table adds others to each id."
    )
    multi_hot_distribution: Literal["uniform", "pareto"] | None = key(
        None, "Distribution of the ids that --multi-hot adds (default uniform)."
    )
    memory_budget: str | None = key(None, "Maximum memory to use, like 4GB (default).")
    engine: Literal["polars", "spark"] = key("polars", "polars: this machine. spark: a Spark cluster.")
    spark_master: str | None = key(None, "Spark's address, like spark://host:7077 (default local[*]).")
    compat: Literal["torchrec", "torchrec-fixed", "mlperf-v2", "oneflow"] | None = key(
        None,
        "Do exactly what that system's scripts do, including their defects, which the log names. "
        "torchrec-fixed: with one dense minimum for all files, exact ids, and our own shuffled order.",
    )
    on_bad_row: Literal["fail", "skip"] = key("fail", "Stop at a row that cannot be parsed, or skip it.")
    max_bad_rows: NonNegativeInt | None = key(
        None, f"With --on-bad-row skip: stop after more than this many (default {_DEFAULT_BAD_ROWS})."
    )

    @model_validator(mode="after")
    def fit_together(self) -> "Options":
        problems = [*self._id_problems(), *self._multi_hot_problems(), *self._engine_problems()]
        if self.compat:
            problems += self._compat_problems(f"--compat {self.compat}")
        if self.max_bad_rows is not None and self.on_bad_row == "fail":
            problems.append("--max-bad-rows needs --on-bad-row skip.")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def system(self) -> System:
        return _SYSTEMS[self.compat or ""]

    @property
    def kind_of_ids(self) -> str:
        return self.ids or self.system.ids[0]

    def _id_problems(self) -> Iterator[str]:
        ids = self.kind_of_ids
        if ids != "contiguous" and self.min_frequency is not None:
            yield f"--min-frequency is for contiguous ids, not for {ids}."
        if ids != "contiguous" and self.id_order is not None:
            yield f"--id-order is for contiguous ids, not for {ids}."
        if self.format == "bin" and ids != "contiguous" and not 0 < max(self.table_size or [0]) <= 2**31:
            yield f"--format bin has 32-bit ids: --ids {ids} needs --table-size, 2147483648 at most."
        if ids == "mod" and not self.table_size and not self.compat:
            yield "--ids mod needs --table-size. (With --compat torchrec and no size, raw ids are kept.)"
        for option, values in (("--table-size", self.table_size), ("--multi-hot", self.multi_hot)):
            if values is not None and len(values) not in (1, CRITEO.num_sparse):
                yield f"{option} takes one number or {CRITEO.num_sparse}, not {len(values)}."

    def _multi_hot_problems(self) -> Iterator[str]:
        if self.multi_hot is None:
            if self.multi_hot_distribution is not None:
                yield "--multi-hot-distribution needs --multi-hot."
            return
        ids = self.kind_of_ids
        if self.format not in (None, "npy"):
            yield f"--multi-hot is written as npy, not as {self.format}."
        if ids != "contiguous" and self.table_size is None:
            yield f"--multi-hot with {ids} ids needs --table-size."
        if ids != "contiguous" and max(self.table_size or [0]) > 2**31:
            yield "--multi-hot writes 32-bit ids: --table-size can be 2147483648 at most."

    def _engine_problems(self) -> Iterator[str]:
        if self.engine != "spark":
            if self.spark_master is not None:
                yield "--spark-master needs --engine spark."
            return
        if self.format not in (None, "parquet"):
            yield f"--engine spark writes parquet, not {self.format}."
        if self.multi_hot is not None:
            yield "--engine spark has no --multi-hot."
        if self.id_order == "first-seen" or self.system.is_torchrec:
            yield "--engine spark has no first-seen order of ids: rows have no order on a cluster."
        if self.memory_budget is not None:
            yield "--memory-budget is not for --engine spark."
        if self.shuffle == "day":
            yield "--engine spark shuffles over all days (global) or not at all."

    def _compat_problems(self, name: str) -> Iterator[str]:
        ids = self.kind_of_ids
        if ids not in self.system.ids:
            yield f"{name} has no {ids} ids."
        if self.format not in (None, self.system.format):
            yield f"{name} writes {self.system.format}."
        if self.dense not in (None, self.system.dense):
            yield f"{name} means --dense {self.system.dense}."
        if not self.system.is_torchrec:
            if self.multi_hot is not None:
                yield f"{name} has no --multi-hot."
            if self.table_size is not None and len(set(self.table_size)) > 1:
                yield f"{name} has one --table-size for all columns."
            if ids == "hash64" and self.table_size is not None:
                yield f"{name} has no --table-size for hash64."
            return
        if self.id_order == "frequency":
            yield f"{name} numbers ids in order of occurrence."
        if self.shuffle == "day":
            yield f"{name} shuffles over all days (global) or not at all."
        most = 2**31 - 128  # the largest float32 that int32 can hold
        is_rounded = self.shuffle == "global" and self.compat != "torchrec-fixed"
        if ids == "mod" and is_rounded and max(self.table_size or [2**32]) > most:
            yield f"{name} --shuffle global keeps 31 bits of an id: --table-size is needed, {most} at most."
        if ids == "contiguous" and self.table_size is not None and self.multi_hot is None:
            yield f"{name} applies table sizes when it loads: leave out --table-size."


@dataclass(frozen=True)
class Rules:
    """The options with every default decided. `compat` is empty for our own rules."""

    ids: str
    id_order: Literal["frequency", "first-seen"]
    min_frequency: int
    table_size: tuple[int, ...]  # 26, or none
    dense: str
    last_day: str
    val_fraction: float
    shuffle: str
    seed: int
    format: ClicksLayout
    multi_hot: tuple[int, ...]  # 26, or none
    multi_hot_distribution: str
    compat: str
    on_bad_row: str
    max_bad_rows: int

    @property
    def is_torchrec(self) -> bool:
        """Whether the rules of TorchRec apply: for example, a missing id counts as raw id 0."""
        return _SYSTEMS[self.compat].is_torchrec

    @property
    def is_rounded(self) -> bool:
        """Whether training ids are rounded to float32 and stored as int32, as TorchRec's shuffle does."""
        return self.is_torchrec and self.shuffle == "global" and self.compat != "torchrec-fixed"

    @property
    def wide_ids(self) -> bool:
        """Whether ids are stored in 64 bits: they need them, or the system of --compat does so."""
        if self.compat in ("torchrec", "torchrec-fixed", "oneflow") or (
            self.ids != "contiguous" and not self.table_size
        ):
            return True
        return max(self.table_size, default=0) > 2**31

    @property
    def label_type(self) -> type:
        return np.float32 if self.compat == "oneflow" else np.int32

    def log_format(self, has_labels: bool) -> LogFormat:
        """Return the format of a raw log. A row is bad if the logarithm of an integer does not exist."""
        smallest = 1 - _OFFSETS[self.dense] if self.dense in _OFFSETS else CRITEO.smallest_dense
        return replace(CRITEO, has_labels=has_labels, smallest_dense=smallest)

    def bad_rows_allowed(self, bad_rows: int) -> int | None:
        """Return how many more bad rows are allowed after `bad_rows`, or None if the first one is an error."""
        return None if self.on_bad_row == "fail" else self.max_bad_rows - bad_rows

    def dense_offset(self, smallest: int) -> int:
        """Return what is added before the logarithm; `smallest` is the smallest integer of the log or logs."""
        return _OFFSETS.get(self.dense, 2 - smallest)

    def dense_values(self, integers: np.ndarray, smallest: int) -> np.ndarray:
        """Transform integers int32 [n, 13] to the stored values float32 [n, 13]."""
        if self.dense == STORED:
            return integers.view(np.float32)
        integers = integers.astype(np.int64)
        if self.compat == "oneflow":
            return (integers + 1).astype(np.float32)
        if self.dense == "log1-clip":
            return np.log(np.maximum(integers, 0) + 1, dtype=np.float32)
        return np.log(integers + self.dense_offset(smallest), dtype=np.float32)

    @property
    def notes(self) -> list[str]:
        """Return the defects of the other system that --compat repeats."""
        notes = []
        if self.compat == "oneflow" and self.ids == "mod":
            notes.append(
                "--compat oneflow: the missing id of each column equals the first id of the next, size * (column + 1); "
                "recmill's own loader keeps them apart, since it gives each column a table of its own"
            )
        if self.is_torchrec:
            notes.append(f"--compat {self.compat}: a missing id counts as raw id 0")
            if self.ids == "contiguous":
                notes.append(f"--compat {self.compat}: vocabularies were made from val and test rows too")
        if self.compat == "torchrec":
            minimum = "each file has its own dense minimum, so transforms may differ between files"
            notes.append(f"--compat torchrec: {minimum}")
        return notes


def rules_in(recipe: Mapping[str, Any]) -> Rules:
    """Return the rules by which a dataset with this recipe was prepared."""
    given: dict[str, Any] = {field.name: recipe[field.name] for field in fields(Rules)}
    return Rules(**given | {name: tuple(value) for name, value in given.items() if isinstance(value, list)})


def rules_of(options: Options, log_names: list[str], *, are_npy: bool = False) -> Rules:
    """Decide every default; some depend on which logs were found, and whether they are npy files."""
    if are_npy and (options.dense or options.engine == "spark"):
        flag = f"--dense {options.dense}" if options.dense else "--engine spark"
        raise ConfigError(f"{flag} is for raw logs: the npy files in --input hold transformed values. Leave it out.")
    if options.sparse_input and not are_npy:
        raise ConfigError("--sparse-input is for npy files, and --input has raw logs. Leave it out.")
    is_kaggle = "train" in log_names
    system = options.system
    num_days = 1 if is_kaggle else len(log_names)
    last_day, val_fraction = held_out(options.last_day, options.val_fraction, num_days, system.last_day)
    return Rules(
        ids=options.kind_of_ids,
        id_order=options.id_order or ("first-seen" if options.compat else "frequency"),
        min_frequency=max(options.min_frequency or 1, 1),
        table_size=_for_every_column(options.table_size or (system.table_size if options.kind_of_ids == "mod" else ())),
        dense=STORED if are_npy else options.dense or ("log-min" if is_kaggle and not options.compat else system.dense),
        last_day=last_day,
        val_fraction=val_fraction,
        shuffle=options.shuffle or system.shuffle,
        seed=options.seed,
        format=options.format or ("parquet" if options.engine == "spark" else system.format),
        multi_hot=_for_every_column(options.multi_hot or ()),
        multi_hot_distribution=options.multi_hot_distribution or "uniform",
        compat=options.compat or "",
        on_bad_row=options.on_bad_row,
        max_bad_rows=_DEFAULT_BAD_ROWS if options.max_bad_rows is None else options.max_bad_rows,
    )


def _for_every_column(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values) * (CRITEO.num_sparse if len(values) == 1 else 1)
