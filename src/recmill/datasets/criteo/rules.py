"""The options of `prepare criteo` and what they mean together: one set of rules, or an error before any work."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recmill.config.sections import Section
from recmill.datasets.criteo.log import NUM_SPARSE, ParsedLog
from recmill.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_ONEFLOW_SIZE = 40_000_000
_OFFSETS = {"log3": 3, "log2": 2}
_DEFAULT_BAD_ROWS = 1000
_NO_LIMIT = -(2**31)
_INT32 = 2**31 - 128  # the largest float32 that is an int32


class Options(Section):
    input: str = Field(description="Directory of the raw logs, or one log.")
    source: Literal["1tb", "kaggle"] | None = Field(
        None, description="1tb: day_0, day_1, ...; kaggle: train.txt and test.txt. Found out if not given."
    )
    ids: Literal["contiguous", "mod", "hash64"] | None = Field(
        None,
        description="contiguous: by vocabulary (default); mod: modulo table size; hash64: xxhash64. 0: missing.",
    )
    min_frequency: NonNegativeInt | None = Field(
        None, description="Ids that occur less often share id 1. 2 or more also trains that row for unseen ids."
    )
    id_order: Literal["frequency", "first-seen"] | None = Field(
        None, description="Contiguous ids: the most frequent first (default), or in order of occurrence."
    )
    table_size: list[Annotated[int, Field(ge=3, le=2**32)]] | None = Field(
        None, description="Most rows per table: one number, or 26. Contiguous ids beyond it share id 1."
    )
    dense: Literal["log3", "log-min", "log2", "log1-clip"] | None = Field(
        None,
        description="log(x+3) (default for 1tb); log(x-min+2) (default for kaggle); log(x+2); log(1+max(x,0)).",
    )
    last_day: Literal["val-first", "test-first", "none"] | None = Field(
        None, description="Which half of the last day is for validation (default val-first); none: all is for training."
    )
    val_fraction: float | None = Field(
        None,
        gt=0,
        lt=0.5,
        description="One log or --last-day none: share of the rows for val, and as much for test.",
    )
    shuffle: Literal["none", "day", "global"] | None = Field(
        None, description="New order of the training rows: none (default), within each day, over all days."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Of --shuffle and --multi-hot. Same seed, same bytes.")
    format: Literal["npy", "parquet"] | None = Field(None, description="npy (default) or parquet (default for spark).")
    multi_hot: list[PositiveInt] | None = Field(
        None, description="Ids per row and table, one number or 26: others are added to each by a fixed table."
    )
    multi_hot_distribution: Literal["uniform", "pareto"] | None = Field(
        None, description="Of the ids that --multi-hot adds (default uniform)."
    )
    memory_budget: str | None = Field(None, description="Most memory to use, like 4GB (default).")
    engine: Literal["polars", "spark"] = Field("polars", description="polars: this machine. spark: a Spark cluster.")
    spark_master: str | None = Field(None, description="Spark's address, like spark://host:7077 (default local[*]).")
    compat: Literal["torchrec", "mlperf-v2", "oneflow"] | None = Field(
        None, description="Do exactly as that system's scripts do, defects included; they are named in the log."
    )
    on_bad_row: Literal["fail", "skip"] = Field("fail", description="A row that cannot be read: stop, or leave it out.")
    max_bad_rows: NonNegativeInt | None = Field(
        None, description=f"With --on-bad-row skip: stop after so many (default {_DEFAULT_BAD_ROWS})."
    )

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self.memory_budget or "4GB")

    @model_validator(mode="after")
    def fit_together(self) -> "Options":
        problems = [text for is_wrong, text in self._contradictions() if is_wrong]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        ids = self.ids or ("mod" if self.compat == "oneflow" else "contiguous")
        by_vocabulary = ids == "contiguous"
        compat = f"--compat {self.compat}"
        as_torchrec = self.compat in ("torchrec", "mlperf-v2")
        dense_of = {"torchrec": "log-min", "mlperf-v2": "log3", "oneflow": "log2"}.get(self.compat or "", self.dense)
        return [
            (
                not by_vocabulary and self.min_frequency is not None,
                f"--min-frequency is for contiguous ids, not for {ids}.",
            ),
            (not by_vocabulary and self.id_order is not None, f"--id-order is for contiguous ids, not for {ids}."),
            (
                ids == "mod" and self.table_size is None and self.compat is None,
                "--ids mod needs --table-size. (With --compat torchrec and no size, raw ids are kept.)",
            ),
            (
                self.table_size is not None and len(self.table_size) not in (1, NUM_SPARSE),
                f"--table-size takes one number or {NUM_SPARSE}, not {len(self.table_size or [])}.",
            ),
            (
                self.multi_hot is not None and len(self.multi_hot) not in (1, NUM_SPARSE),
                f"--multi-hot takes one number or {NUM_SPARSE}, not {len(self.multi_hot or [])}.",
            ),
            (
                self.multi_hot_distribution is not None and self.multi_hot is None,
                "--multi-hot-distribution needs --multi-hot.",
            ),
            (self.multi_hot is not None and self.format == "parquet", "--multi-hot is written as npy, not as parquet."),
            (
                self.multi_hot is not None and ids != "contiguous" and self.table_size is None,
                f"--multi-hot with {ids} ids needs --table-size.",
            ),
            (
                self.multi_hot is not None and not by_vocabulary and max(self.table_size or [0]) > 2**31,
                "--multi-hot writes 32-bit ids: --table-size 2147483648 at most.",
            ),
            (self.multi_hot is not None and self.compat == "oneflow", f"{compat} has no --multi-hot."),
            (
                self.max_bad_rows is not None and self.on_bad_row == "fail",
                "--max-bad-rows needs --on-bad-row skip.",
            ),
            (self.spark_master is not None and self.engine != "spark", "--spark-master needs --engine spark."),
            (self.engine == "spark" and self.format == "npy", "--engine spark writes parquet, not npy."),
            (self.engine == "spark" and self.multi_hot is not None, "--engine spark has no --multi-hot."),
            (
                self.engine == "spark" and (self.id_order == "first-seen" or as_torchrec),
                "--engine spark has no first-seen order of ids: rows have no order on a cluster.",
            ),
            (self.engine == "spark" and self.memory_budget is not None, "--memory-budget is not for --engine spark."),
            (self.engine == "spark" and self.shuffle == "day", "--engine spark shuffles all (global) or nothing."),
            (
                (as_torchrec and ids == "hash64") or (self.compat == "mlperf-v2" and not by_vocabulary),
                f"{compat} has no {ids} ids.",
            ),
            (self.compat == "oneflow" and by_vocabulary, f"{compat} has no contiguous ids."),
            (
                self.compat == "oneflow" and self.table_size is not None and len(set(self.table_size)) > 1,
                f"{compat} has one --table-size for all columns.",
            ),
            (as_torchrec and self.id_order == "frequency", f"{compat} numbers ids in order of occurrence."),
            (as_torchrec and self.format == "parquet", f"{compat} writes npy."),
            (self.compat == "oneflow" and self.format == "npy", f"{compat} writes parquet."),
            (as_torchrec and self.shuffle == "day", f"{compat} shuffles all (global) or nothing."),
            (self.compat is not None and self.dense not in (None, dense_of), f"{compat} means --dense {dense_of}."),
            (
                self.compat == "oneflow" and ids == "hash64" and self.table_size is not None,
                f"{compat} has no --table-size for hash64.",
            ),
            (
                as_torchrec and ids == "mod" and self.shuffle == "global" and max(self.table_size or [2**32]) > _INT32,
                f"{compat} --shuffle global keeps 31 bits of an id: give --table-size, {_INT32} at most.",
            ),
            (
                as_torchrec and by_vocabulary and self.table_size is not None and self.multi_hot is None,
                f"{compat} applies table sizes when it loads: leave out --table-size.",
            ),
        ]


def memory_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"--memory-budget {text!r}: expected a size like 4GB or 512MB.")
    number, unit, binary = match.groups()
    scale = 1024 ** "KMGT".find(unit.upper()) * 1024 if binary and unit else _UNITS[unit.upper()]
    return int(float(number) * scale)


@dataclass(frozen=True)
class Rules:
    """The options with every default decided. `compat` is empty for our own rules."""

    ids: str
    id_order: str
    min_frequency: int
    table_size: tuple[int, ...]  # 26, or none
    dense: str
    last_day: str
    val_fraction: float
    shuffle: str
    seed: int
    format: str
    multi_hot: tuple[int, ...]  # 26, or none
    multi_hot_distribution: str
    compat: str
    on_bad_row: str
    max_bad_rows: int

    @property
    def fit_on(self) -> Literal["train", "all"]:
        """Which rows vocabularies are made from; those of the originals know the test rows too."""
        return "all" if self.compat else "train"

    @property
    def missing_is_zero(self) -> bool:
        """A missing id counts as raw id 0."""
        return self.compat in ("torchrec", "mlperf-v2")

    @property
    def is_rounded(self) -> bool:
        """Training ids pass through float32, and come out as int32, in TorchRec's shuffle."""
        return self.compat in ("torchrec", "mlperf-v2") and self.shuffle == "global"

    @property
    def wide_ids(self) -> bool:
        """Ids that need 64 bits, or are written so by the original."""
        too_large = not self.table_size if self.ids != "contiguous" else False
        return self.compat in ("torchrec", "oneflow") or too_large or max(self.table_size, default=0) > 2**31

    @property
    def smallest_dense(self) -> int:
        """What the logarithm can take."""
        return 1 - _OFFSETS[self.dense] if self.dense in _OFFSETS else _NO_LIMIT

    def dense_rule(self, logs: list[ParsedLog], index: int) -> Callable[[np.ndarray], np.ndarray]:
        """int32 [n, 13] -> float32. With log-min all logs share one minimum; TorchRec takes each file's own."""
        if self.compat == "oneflow":
            return lambda dense: (dense.astype(np.int64) + 1).astype(np.float32)
        if self.dense == "log1-clip":
            return lambda dense: np.log(np.maximum(dense, 0).astype(np.int64) + 1, dtype=np.float32)
        if self.dense == "log-min":
            judged = [logs[index]] if self.compat else logs
            offset = 2 - min(parsed.smallest_dense for parsed in judged)
        else:
            offset = _OFFSETS[self.dense]
        return lambda dense: np.log(dense.astype(np.int64) + offset, dtype=np.float32)

    @property
    def notes(self) -> list[str]:
        """Defects of the original that were asked for."""
        notes = []
        if self.compat == "oneflow" and self.ids == "mod":
            notes.append(
                "--compat oneflow: the missing id of each column equals the first id of the next, size * (column + 1); "
                "recmill's own loader keeps them apart, since it gives each column a table of its own"
            )
        if self.compat in ("torchrec", "mlperf-v2"):
            notes.append(f"--compat {self.compat}: a missing id counts as raw id 0")
            if self.ids == "contiguous":
                notes.append(f"--compat {self.compat}: vocabularies were made from val and test rows too")
        if self.compat == "torchrec":
            notes.append(
                "--compat torchrec: each file has its own dense minimum, so transforms may differ between files"
            )
        return notes


def rules_of(options: Options, names: list[str]) -> Rules:
    """`names` are those of the logs that were found: some defaults depend on them."""
    compat, is_kaggle = options.compat or "", "train" in names
    num_labelled = 1 if is_kaggle else len(names)
    ids = options.ids or ("mod" if compat == "oneflow" else "contiguous")
    dense = {"torchrec": "log-min", "mlperf-v2": "log3", "oneflow": "log2"}.get(compat)
    shuffle = "global" if compat in ("mlperf-v2", "oneflow") else "none"
    table_size = options.table_size or ([_ONEFLOW_SIZE] if compat == "oneflow" and ids == "mod" else [])
    last_day, val_fraction = _last_day(options, num_labelled)
    return Rules(
        ids=ids,
        id_order=options.id_order or ("first-seen" if compat else "frequency"),
        min_frequency=max(options.min_frequency or 1, 1),
        table_size=_for_every_column(table_size),
        dense=dense or options.dense or ("log-min" if is_kaggle else "log3"),
        last_day=last_day,
        val_fraction=val_fraction,
        shuffle=options.shuffle or shuffle,
        seed=options.seed,
        format=options.format or ("parquet" if compat == "oneflow" or options.engine == "spark" else "npy"),
        multi_hot=_for_every_column(options.multi_hot or []),
        multi_hot_distribution=options.multi_hot_distribution or "uniform",
        compat=compat,
        on_bad_row=options.on_bad_row,
        max_bad_rows=_DEFAULT_BAD_ROWS if options.max_bad_rows is None else options.max_bad_rows,
    )


def _last_day(options: Options, num_labelled: int) -> tuple[str, float]:
    if options.last_day == "none":
        return "none", options.val_fraction or 0.0
    if num_labelled == 1:
        if options.last_day:
            raise ConfigError(f"--last-day {options.last_day} needs two days or more. Use --val-fraction for one log.")
        return "none", options.val_fraction or 0.1
    if options.val_fraction:
        raise ConfigError("--val-fraction is for one log: with days, the last one is for val and test (--last-day).")
    return options.last_day or ("test-first" if options.compat == "oneflow" else "val-first"), 0.0


def _for_every_column(values: list[int]) -> tuple[int, ...]:
    return tuple(values) * (NUM_SPARSE if len(values) == 1 else 1)
