"""Writing prepared histories."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.datasets.writing import MADE_BY, seal, write_npy, write_parquet
from recmill.schema import Description, FileInfo, HistoriesDescription

MIN_HISTORY = 3  # leave-one-out needs one item each for training, validation and test


def id_table(original_ids: Iterable[str], counts: np.ndarray, first_id: int) -> pl.DataFrame:
    """Number users or items in the order given; return columns id, original_id, count."""
    ids = range(first_id, first_id + len(counts))
    return pl.DataFrame({"id": ids, "original_id": original_ids, "count": counts})


def seal_histories(
    directory: Path,
    name: str,
    recipe: dict[str, Any],
    users: pl.DataFrame,
    items: pl.DataFrame,
    truth: dict[str, dict[str, float]] | None = None,
    notes: list[str] | None = None,
) -> Description:
    """Complete the dataset in `directory`, where items.npy (and timestamps.npy, if there are any) are written already.

    `users` has columns id (from 0), original_id, count; `items` has id (from 1), original_id, title, count.
    """
    offsets = np.concatenate([[0], np.cumsum(users["count"].to_numpy())])
    num_interactions = int(offsets[-1])
    write_npy(directory / "offsets.npy", offsets, np.int64)
    write_parquet(directory / "users.parquet", users)
    write_parquet(directory / "items.parquet", items.select("id", "original_id", "title", "count"))
    rows = {"offsets.npy": len(offsets), "users.parquet": users.height, "items.parquet": items.height}
    has_timestamps = (directory / "timestamps.npy").is_file()
    rows |= dict.fromkeys(["items.npy", "timestamps.npy"] if has_timestamps else ["items.npy"], num_interactions)

    def describe(files: dict[str, FileInfo]) -> Description:
        return HistoriesDescription(
            name=name,
            made_by=MADE_BY,
            recipe=recipe,
            files=files,
            truth=truth or {},
            notes=notes or [],
            num_users=users.height,
            num_items=items.height,
            num_interactions=num_interactions,
            has_timestamps=has_timestamps,
        )

    return seal(directory, describe, rows)
