"""Click logs as prepared datasets: splits by day; TorchRec's npy files, Parquet or records, written block by block."""

import contextlib
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from recmill.config.sections import Section
from recmill.data.click_rows import BLOCK_ROWS as STORED_BLOCK_ROWS
from recmill.data.click_rows import ClickRows
from recmill.datasets.writing import MADE_BY, NpyWriter, seal, write_parquet
from recmill.errors import ConfigError
from recmill.schema import SPLITS, ClicksDescription, Description, FileInfo, RowRange, SparseFeature

BLOCK_ROWS = 1 << 17
PARQUET_ROWS = 1 << 19  # per file
_MAX_TABLES = 10_000
VAL_FRACTION = 0.1  # of a single day, by default
PARTS = ("dense", "sparse", "labels")  # the files of a day
Truth = dict[str, dict[str, float]]  # split -> metric -> the best value that any model can reach


def dense_names(count: int) -> list[str]:
    return [f"I{i + 1}" for i in range(count)]


def sparse_names(count: int) -> list[str]:
    return [f"C{i + 1}" for i in range(count)]


def _default_tables(count: int) -> list[int]:
    """Return table sizes that grow from 4 to 20,000 rows by a constant factor."""
    return [round(4 * (20_000 / 4) ** (i / max(count - 1, 1))) for i in range(count)]


class ClickOptions(Section):
    """Options that random and synthetic click logs have in common."""

    rows: PositiveInt = Field(
        500_000, lt=2**40, description="Total number of rows, at least 2 per day; the last day is for val and test."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Same seed, same bytes.")
    days: int = Field(5, ge=2, lt=10_000, description="Number of days, a file each; the last one is for val and test.")
    dense: PositiveInt = Field(13, lt=10_000, description="Number of dense features.")
    tables: list[Annotated[int, Field(gt=0, lt=2**40)]] = Field(
        _default_tables(26),
        min_length=1,
        description="Table sizes, like 10,1000,50000. A single number is the number of tables.",
    )

    @field_validator("tables", mode="after")
    @classmethod
    def one_number_is_a_count(cls, tables: list[int]) -> list[int]:
        if len(tables) > 1:
            return tables
        if tables[0] > _MAX_TABLES:
            raise ValueError(
                f"--tables {tables[0]}: a single number is the number of tables, at most {_MAX_TABLES:,}. "
                f"To set table sizes, give several numbers, like {tables[0]},500."
            )
        return _default_tables(tables[0])

    @model_validator(mode="after")
    def every_split_gets_a_row(self) -> "ClickOptions":
        if self.rows < 2 * self.days:
            raise ValueError(f"--rows {self.rows}: {self.days} days need {2 * self.days} rows or more.")
        return self

    @property
    def id_dtype(self) -> type:
        return np.int32 if max(self.tables) < 2**31 else np.int64


def write_day(directory: Path, day: str, num_rows: int | None, blocks: Iterator[ClickRows], id_dtype: type) -> None:
    """Write the blocks to the three files of a day, one block in memory at a time. `num_rows`: None if not known."""
    with contextlib.ExitStack() as stack:
        files: list[NpyWriter] = []
        for block in blocks:
            parts = (block.dense, block.ids, block.labels[:, None])
            if not files:
                for name, dtype, part in zip(PARTS, (np.float32, id_dtype, np.int32), parts, strict=True):
                    path = directory / f"{day}_{name}.npy"
                    files.append(stack.enter_context(NpyWriter(path, dtype, (num_rows, part.shape[1]))))
            for file, part in zip(files, parts, strict=True):
                file.append(part)


def write_records(path: Path, first_row: int, blocks: Iterator[ClickRows]) -> None:
    """Write the blocks into the file of records `path`, from row `first_row` on; see `ClicksLayout`."""
    with path.open("r+b" if path.exists() else "wb") as file:
        for block in blocks:
            words = [
                block.labels[:, None].astype("<i4"),
                block.dense.astype("<f4").view("<i4"),
                block.ids.astype("<i4"),
            ]
            records = np.concatenate(words, axis=1)
            if not file.tell():
                file.seek(first_row * records[0].nbytes)
            file.write(records.data)


def write_parquet_parts(
    directory: Path, stem: str, blocks: Iterator[ClickRows], label_type: type, id_type: type, rows_per_file: int
) -> dict[str, int]:
    """Write the blocks to stem-00000.parquet, stem-00001.parquet, ... Return the number of rows of each file."""
    import polars as pl

    file_rows: dict[str, int] = {}
    pending = pl.DataFrame()

    def write_part(frame: pl.DataFrame) -> None:
        name = f"{stem}-{len(file_rows):05d}.parquet"
        write_parquet(directory / name, frame.rechunk(), row_group_size=STORED_BLOCK_ROWS)
        file_rows[name] = len(frame)

    for block in blocks:
        columns: dict[str, np.ndarray] = {"label": block.labels.astype(label_type)}
        columns |= zip(dense_names(block.dense.shape[1]), block.dense.T.astype(np.float32), strict=True)
        columns |= zip(sparse_names(block.ids.shape[1]), block.ids.T.astype(id_type), strict=True)
        pending = pl.concat([pending, pl.DataFrame(columns)]) if len(pending) else pl.DataFrame(columns)
        while len(pending) >= rows_per_file:
            write_part(pending[:rows_per_file])
            pending = pending[rows_per_file:]
    if len(pending):
        write_part(pending)
    return file_rows


def held_out(
    last_day: str | None, val_fraction: float | None, num_days: int, usual: str = "val-first"
) -> tuple[str, float]:
    """Return `last_day` and `val_fraction` of `split_rows`; raise ConfigError if they do not suit the days."""
    if last_day == "none":
        return "none", val_fraction or 0.0
    if num_days == 1:
        if last_day:
            raise ConfigError(f"--last-day {last_day} needs two days or more. Use --val-fraction for one log.")
        return "none", val_fraction or VAL_FRACTION
    if val_fraction is not None:
        fact = f"--val-fraction {val_fraction}: with {num_days} days the last one is for val and test"
        raise ConfigError(f"{fact}. Leave it out, or add --last-day none: then it is a share of all rows.")
    return last_day or usual, 0.0


def split_rows(day_rows: dict[str, int], last_day: str, val_fraction: float) -> dict[str, list[RowRange]]:
    """Return the row ranges of each split: the last day is halved into val and test, the other days are for train.

    The first half is the larger one if the number is odd; with `last_day` "test-first" it is test. With "none" the
    days are one long log: its last rows are val, then test, `val_fraction` of all rows each.
    """
    total = sum(day_rows.values())
    last = list(day_rows.values())[-1]
    sizes = [total - last, (last + 1) // 2, last // 2]
    if last_day == "none":
        held_out = int(total * val_fraction)
        sizes = [total - 2 * held_out, held_out, held_out]
    names = ["train", "test", "val"] if last_day == "test-first" else ["train", "val", "test"]
    edges = pairwise(accumulate(sizes, initial=0))
    ranges = {name: _ranges(day_rows, *edge) for name, edge in zip(names, edges, strict=True)}
    return {name: ranges[name] for name in SPLITS}


def _ranges(day_rows: dict[str, int], start: int, stop: int) -> list[RowRange]:
    """Return rows start..stop of all days, one after the other."""
    ranges = []
    first = 0
    for day, rows in day_rows.items():
        low, high = max(start - first, 0), min(stop - first, rows)
        if low < high:
            ranges.append(RowRange(day=day, start=low, stop=high))
        first += rows
    return ranges


def rows_per_day(rows: int, days: int) -> list[int]:
    return [rows * (d + 1) // days - rows * d // days for d in range(days)]


def seal_clicks(
    directory: Path, name: str, recipe: dict[str, Any], day_rows: list[int], options: ClickOptions, truth: Truth
) -> Description:
    """Digest the files of the days and write the description of generated clicks."""
    names = sparse_names(len(options.tables))
    sparse = [SparseFeature(name=name, rows=rows) for name, rows in zip(names, options.tables, strict=True)]
    splits = split_rows({f"day_{d}": rows for d, rows in enumerate(day_rows)}, "val-first", 0.0)

    def describe(files: dict[str, FileInfo]) -> Description:
        return ClicksDescription(
            name=name,
            made_by=MADE_BY,
            recipe=recipe,
            files=files,
            truth=truth,
            dense=dense_names(options.dense),
            sparse=sparse,
            splits=splits,
        )

    return seal(directory, describe, {f"day_{d}_{p}.npy": n for d, n in enumerate(day_rows) for p in PARTS})
