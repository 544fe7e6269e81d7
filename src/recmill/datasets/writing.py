"""Writing prepared datasets: all or nothing, `dataset.json` last."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill import __version__
from recmill.errors import DataError, as_user_error
from recmill.schema import (
    DESCRIPTION_FILE,
    ClicksDescription,
    Description,
    FileInfo,
    HistoriesDescription,
    RowRange,
    SparseFeature,
    digest,
    open_dataset,
    to_json,
)

MADE_BY = f"recmill {__version__}"
MIN_HISTORY = 3  # leave-one-out: one item each for training, validation and test

Progress = Callable[[int, int], None]  # rows done, rows in all


def is_to_be_written(output: Path, name: str, recipe: dict[str, Any], overwrite: bool) -> bool:
    """False if `output` holds exactly this dataset already; an error if writing would destroy anything else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return True
    if not (output / DESCRIPTION_FILE).is_file():
        raise DataError(f"{output} exists and is not a prepared dataset. Choose another --output, or move it away.")
    if overwrite:
        return True
    about = open_dataset(output).about
    if about.name == name and about.recipe == recipe and about.made_by == MADE_BY:
        return False
    raise DataError(
        f"{output} holds another dataset ({about.name}, {about.recipe}, {about.made_by}). "
        "Choose another --output, or replace it with --overwrite."
    )


@contextmanager
def dataset_directory(output: Path) -> Iterator[Path]:
    """A new directory beside `output` that takes its place when the block ends well, and vanishes otherwise."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.parent / f".{output.name}.partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise as_user_error(error) or error from error
    try:
        yield partial
        _replace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(output: Path, partial: Path) -> None:
    old = output.parent / f".{output.name}.old-{os.getpid()}"
    if output.exists():
        os.rename(output, old)
    os.rename(partial, output)
    shutil.rmtree(old, ignore_errors=True)


def seal(directory: Path, describe: Callable[[dict[str, FileInfo]], Description], rows: dict[str, int]) -> Description:
    """Digest every file and write the description; `rows` gives the row count of each file."""
    files = {}
    for name in sorted(rows):
        file = directory / name
        files[name] = FileInfo(bytes=file.stat().st_size, rows=rows[name], xxh3=digest(file))
    about = describe(files)
    temporary = directory / f"{DESCRIPTION_FILE}.tmp"
    temporary.write_text(to_json(about), encoding="utf-8")
    os.replace(temporary, directory / DESCRIPTION_FILE)
    return about


@dataclass(frozen=True)
class ClickRows:
    """A block of rows: dense float32 [n, features], ids int [n, tables], labels int32 [n]."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray


def write_day(directory: Path, day: str, num_rows: int, blocks: Iterator[ClickRows], id_dtype: type) -> None:
    """Stream blocks into the three files of a day; memory stays at one block."""
    start = 0
    files: list[np.ndarray] = []
    for block in blocks:
        if not files:
            shapes = ((np.float32, block.dense.shape[1]), (id_dtype, block.ids.shape[1]), (np.int32, 1))
            files = [
                np.lib.format.open_memmap(directory / f"{day}_{part}.npy", "w+", dtype, (num_rows, width))
                for part, (dtype, width) in zip(("dense", "sparse", "labels"), shapes, strict=True)
            ]
        stop = start + len(block.labels)
        files[0][start:stop], files[1][start:stop] = block.dense, block.ids
        files[2][start:stop, 0] = block.labels
        start = stop
    assert start == num_rows, (start, num_rows)
    for file in files:
        file.flush()  # type: ignore[attr-defined]


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

    parts = ("dense", "sparse", "labels")
    return seal(directory, describe, {f"day_{d}_{p}.npy": n for d, n in enumerate(day_rows) for p in parts})


def seal_histories(
    directory: Path,
    name: str,
    recipe: dict[str, Any],
    items: np.ndarray,
    lengths: np.ndarray,
    users: pl.DataFrame,
    item_names: pl.DataFrame,
    timestamps: np.ndarray | None = None,
    truth: dict[str, dict[str, float]] | None = None,
    notes: list[str] | None = None,
) -> Description:
    """`users` and `item_names` have columns id, original_id, title (items only), count; in the order of the ids."""
    rows = {"items.npy": len(items), "offsets.npy": len(lengths) + 1}
    np.save(directory / "items.npy", items.astype(np.int32))
    np.save(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    if timestamps is not None:
        np.save(directory / "timestamps.npy", timestamps.astype(np.int64))
        rows["timestamps.npy"] = len(timestamps)
    users.write_parquet(directory / "users.parquet")
    item_names.write_parquet(directory / "items.parquet")
    rows |= {"users.parquet": users.height, "items.parquet": item_names.height}

    def describe(files: dict[str, FileInfo]) -> Description:
        return HistoriesDescription(
            name=name,
            made_by=MADE_BY,
            recipe=recipe,
            files=files,
            truth=truth or {},
            notes=notes or [],
            num_users=users.height,
            num_items=item_names.height,
            num_interactions=len(items),
            has_timestamps=timestamps is not None,
        )

    return seal(directory, describe, rows)
