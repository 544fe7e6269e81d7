"""Writing histories."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.datasets.writing import MADE_BY, seal, write_npy, write_parquet
from recmill.schema import Description, FileInfo, HistoriesDescription

MIN_HISTORY = 3  # leave-one-out: one item each for training, validation and test


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
    write_npy(directory / "items.npy", items, np.int32)
    if timestamps is not None:
        write_npy(directory / "timestamps.npy", timestamps, np.int64)
    return seal_written(
        directory, name, recipe, lengths, users, item_names, timestamps is not None, truth or {}, notes or []
    )


def seal_written(
    directory: Path,
    name: str,
    recipe: dict[str, Any],
    lengths: np.ndarray,
    users: pl.DataFrame,
    item_names: pl.DataFrame,
    has_timestamps: bool,
    truth: dict[str, dict[str, float]],
    notes: list[str],
) -> Description:
    """As `seal_histories`, for items.npy (and timestamps.npy) that stand in `directory` already."""
    num_interactions = int(lengths.sum())
    rows = {"items.npy": num_interactions, "offsets.npy": len(lengths) + 1}
    write_npy(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]), np.int64)
    if has_timestamps:
        rows["timestamps.npy"] = num_interactions
    write_parquet(directory / "users.parquet", users)
    write_parquet(directory / "items.parquet", item_names)
    rows |= {"users.parquet": users.height, "items.parquet": item_names.height}

    def describe(files: dict[str, FileInfo]) -> Description:
        return HistoriesDescription(
            name=name,
            made_by=MADE_BY,
            recipe=recipe,
            files=files,
            truth=truth,
            notes=notes,
            num_users=users.height,
            num_items=item_names.height,
            num_interactions=num_interactions,
            has_timestamps=has_timestamps,
        )

    return seal(directory, describe, rows)
