"""Raw interactions for tests, and prepared histories as lists of original items."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill import prepare

COLUMNS: dict[str, Any] = {"user_column": "who", "item_column": "what"}
KEEP_ALL: dict[str, Any] = {"min_user_count": 0, "min_item_count": 0}


def write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    path.write_text("who,what,when\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def prepared(tmp_path: Path, rows: Sequence[Sequence[Any]], **options: Any) -> dict[str, list[str]]:
    """Prepare rows of (who, what, when) in tmp_path/d and return its histories."""
    raw = write_csv(tmp_path / "raw.csv", rows)
    prepare("histories", tmp_path / "d", input=raw, **COLUMNS, **{"time_column": "when", **options}, overwrite=True)
    return histories_of(tmp_path / "d")


def histories_of(directory: Path) -> dict[str, list[str]]:
    """Return the original items of each original user, in order."""
    items = np.load(directory / "items.npy")
    offsets = np.load(directory / "offsets.npy")
    users = pl.read_parquet(directory / "users.parquet")["original_id"].to_list()
    names = pl.read_parquet(directory / "items.parquet")["original_id"].to_list()
    assert len(users) == len(offsets) - 1
    return {
        user: [names[item - 1] for item in items[start:stop]]
        for user, start, stop in zip(users, offsets[:-1], offsets[1:], strict=True)
    }
