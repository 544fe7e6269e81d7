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
    rows = {"items.npy": len(items), "offsets.npy": len(lengths) + 1}
    write_npy(directory / "items.npy", items, np.int32)
    write_npy(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]), np.int64)
    if timestamps is not None:
        write_npy(directory / "timestamps.npy", timestamps, np.int64)
        rows["timestamps.npy"] = len(timestamps)
    write_parquet(directory / "users.parquet", users)
    write_parquet(directory / "items.parquet", item_names)
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
