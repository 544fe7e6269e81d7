"""Writing prepared histories."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.datasets.writing import MADE_BY, seal, write_npy, write_parquet
from recmill.schema import Description, FileInfo, HistoriesDescription

MIN_HISTORY = 3  # leave-one-out needs one item each for training, validation and test


@dataclass(frozen=True)
class Histories:
    """What a dataset of histories says beside the interactions themselves.

    `users` has columns id, original_id, count; `items` has id, original_id, title, count. Both are sorted by id;
    users start at 0, items at 1.
    """

    name: str
    recipe: dict[str, Any]
    users: pl.DataFrame
    items: pl.DataFrame
    has_timestamps: bool = False
    truth: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def seal_histories(directory: Path, histories: Histories) -> Description:
    """Complete the dataset in `directory`, where items.npy (and timestamps.npy) are written already."""
    users, items = histories.users, histories.items
    offsets = np.concatenate([[0], np.cumsum(users["count"].to_numpy())])
    num_interactions = int(offsets[-1])
    write_npy(directory / "offsets.npy", offsets, np.int64)
    write_parquet(directory / "users.parquet", users)
    write_parquet(directory / "items.parquet", items)
    rows = {
        "items.npy": num_interactions,
        "offsets.npy": len(offsets),
        "users.parquet": users.height,
        "items.parquet": items.height,
    }
    if histories.has_timestamps:
        rows["timestamps.npy"] = num_interactions

    def describe(files: dict[str, FileInfo]) -> Description:
        return HistoriesDescription(
            name=histories.name,
            made_by=MADE_BY,
            recipe=histories.recipe,
            files=files,
            truth=histories.truth,
            notes=histories.notes,
            num_users=users.height,
            num_items=items.height,
            num_interactions=num_interactions,
            has_timestamps=histories.has_timestamps,
        )

    return seal(directory, describe, rows)
