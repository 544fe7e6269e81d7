"""Writing click logs in TorchRec's layout, block by block."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from recmill.config.sections import Section
from recmill.datasets.writing import MADE_BY, NpyWriter, seal, write_parquet
from recmill.schema import ClicksDescription, Description, FileInfo, RowRange, SparseFeature
from recmill.stored import BLOCK_ROWS as STORED_BLOCK_ROWS
from recmill.stored import ClickRows

BLOCK_ROWS = 1 << 17
PARQUET_ROWS = 1 << 19  # per file
PARTS = ("dense", "sparse", "labels")  # of a day, a file each


def default_tables(count: int = 26, smallest: int = 4, largest: int = 20_000) -> list[int]:
    return [round(smallest * (largest / smallest) ** (i / max(count - 1, 1))) for i in range(count)]


class ClickOptions(Section):
    """What random and synthetic click logs have in common."""

    rows: PositiveInt = Field(
        500_000, lt=2**40, description="Rows in all, 2 a day at least; the last day is for val and test."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Same seed, same bytes.")
    days: int = Field(5, ge=2, lt=10_000, description="Files; the last one is for validation and test.")
    dense: PositiveInt = Field(13, lt=10_000, description="Number of dense features.")
    tables: list[Annotated[int, Field(gt=0, lt=2**40)]] = Field(
        default_tables(), min_length=1, description="Table sizes, like 10,1000,50000; a single number: so many tables."
    )

    @field_validator("tables", mode="after")
    @classmethod
    def one_number_is_a_count(cls, tables: list[int]) -> list[int]:
        return default_tables(tables[0]) if len(tables) == 1 else tables

    @model_validator(mode="after")
    def every_split_gets_a_row(self) -> "ClickOptions":
        if self.rows < 2 * self.days:
            raise ValueError(f"--rows {self.rows}: {self.days} days need {2 * self.days} rows or more.")
        return self

    @property
    def id_dtype(self) -> type:
        return np.int32 if max(self.tables) < 2**31 else np.int64


def write_day(directory: Path, day: str, num_rows: int, blocks: Iterator[ClickRows], id_dtype: type) -> None:
    """Stream blocks into the three files of a day; memory stays at one block."""
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


def write_parquet_parts(
    directory: Path, stem: str, blocks: Iterator[ClickRows], label_type: type, id_type: type
) -> dict[str, int]:
    """Stream blocks into stem-00000.parquet, stem-00001.parquet, ...; returns the rows of each."""
    import polars as pl

    rows_of: dict[str, int] = {}
    waiting: list[ClickRows] = []

    def write_part(rows: list[ClickRows]) -> None:
        name = f"{stem}-{len(rows_of):05d}.parquet"
        dense, ids = np.concatenate([r.dense for r in rows]), np.concatenate([r.ids for r in rows])
        columns: dict[str, np.ndarray] = {"label": np.concatenate([r.labels for r in rows]).astype(label_type)}
        columns |= {f"I{i + 1}": np.ascontiguousarray(dense[:, i]) for i in range(dense.shape[1])}
        columns |= {f"C{i + 1}": np.ascontiguousarray(ids[:, i], dtype=id_type) for i in range(ids.shape[1])}
        write_parquet(directory / name, pl.DataFrame(columns), row_group_size=STORED_BLOCK_ROWS)
        rows_of[name] = len(dense)

    count = 0
    for block in blocks:
        while count + len(block) >= PARQUET_ROWS:
            cut = PARQUET_ROWS - count
            write_part([*waiting, block[:cut]])
            waiting, count, block = [], 0, block[cut:]
        waiting.append(block)
        count += len(block)
    if count:
        write_part(waiting)
    return rows_of


def split_last_day(rows_per_day: list[int]) -> dict[str, list[RowRange]]:
    """train: all days but the last; val: the first half of the last day (the larger, if odd); test: the rest."""
    last, middle = len(rows_per_day) - 1, (rows_per_day[-1] + 1) // 2
    return {
        "train": [RowRange(day=f"day_{d}", start=0, stop=rows_per_day[d]) for d in range(last)],
        "val": [RowRange(day=f"day_{last}", start=0, stop=middle)],
        "test": [RowRange(day=f"day_{last}", start=middle, stop=rows_per_day[-1])],
    }


def rows_per_day(rows: int, days: int) -> list[int]:
    return [rows * (d + 1) // days - rows * d // days for d in range(days)]


def seal_clicks(
    directory: Path,
    name: str,
    recipe: dict[str, Any],
    day_rows: list[int],
    num_dense: int,
    table_rows: list[int],
    truth: dict[str, dict[str, float]],
) -> Description:
    def describe(files: dict[str, FileInfo]) -> Description:
        return ClicksDescription(
            name=name,
            made_by=MADE_BY,
            recipe=recipe,
            files=files,
            truth=truth,
            dense=[f"I{i + 1}" for i in range(num_dense)],
            sparse=[SparseFeature(name=f"C{i + 1}", rows=rows) for i, rows in enumerate(table_rows)],
            splits=split_last_day(day_rows),
        )

    return seal(directory, describe, {f"day_{d}_{p}.npy": n for d, n in enumerate(day_rows) for p in PARTS})
