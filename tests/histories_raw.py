"""Prepared histories as lists of (original item, time), for tests to compare with what they worked out by hand."""

from pathlib import Path

import numpy as np
import polars as pl


def histories_of(directory: Path) -> dict[str, list[str]]:
    """Original user -> original items, in order."""
    items = np.load(directory / "items.npy")
    offsets = np.load(directory / "offsets.npy")
    users = pl.read_parquet(directory / "users.parquet")["original_id"].to_list()
    names = pl.read_parquet(directory / "items.parquet")["original_id"].to_list()
    assert len(users) == len(offsets) - 1
    return {
        user: [names[item - 1] for item in items[start:stop]]
        for user, start, stop in zip(users, offsets[:-1], offsets[1:], strict=True)
    }
