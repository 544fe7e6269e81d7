"""What every registered dataset must do."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare, registry
from recmill.data.opening import open_dataset
from recmill.schema import ClicksDescription, HistoriesDescription

from ..criteo_raw import write_days

# Small, and quick to make; a dataset with defaults that are small enough needs no entry.
SMALL: dict[str, dict[str, Any]] = {
    "criteo": {"shuffle": "global"},  # what a seed is for; `raw_input` says of which rows
    "synthetic-clicks": {"rows": 1000, "tables": [3, 1000, 20]},
    "random-clicks": {"rows": 1000, "tables": [3, 1000, 20]},
    "synthetic-histories": {"users": 50, "items": 150, "interactions": 500},
}

CRITEO_ROWS = [400, 350, 250]

every_dataset = pytest.mark.parametrize("name", sorted(registry.DATASETS))


@pytest.fixture(autouse=True, scope="module")
def raw_input(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a dataset is made of, if it is made of something."""
    directory = tmp_path_factory.mktemp("raw")
    write_days(directory / "criteo", CRITEO_ROWS)
    SMALL["criteo"]["input"] = directory / "criteo"
    pairs = [(u, i) for u in range(20) for i in range(30) if (u + i) % 3]
    texts = {
        "ratings.dat": "".join(f"{u}::{i}::{i % 5}::{1000 - i}\n" for u, i in pairs),
        "movies.dat": "".join(f"{i}::Film {i}::Drama\n" for i in range(30)),
        "goodreads_interactions.csv": "user_id,book_id,is_read,rating,is_reviewed\n"
        + "".join(f"{u},{i},1,4,0\n" for u, i in pairs),
        "own.csv": "who,what\n" + "".join(f"{u},{i}\n" for u, i in pairs),
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    SMALL["movielens"] = {"input": directory}
    SMALL["goodreads"] = {"input": directory, "min_interactions": 5}
    SMALL["histories"] = {"input": directory / "own.csv", "user_column": "who", "item_column": "what"}


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@every_dataset
def test_twice_is_the_same_bytes_and_another_seed_is_not(name: str, tmp_path: Path) -> None:
    has_seed = "seed" in registry.load(registry.DATASETS, name, "dataset").Options.model_fields
    for folder, seed in (("one", 5), ("two", 5), ("other", 6)):
        options: dict[str, Any] = {"seed": seed} if has_seed else {}
        prepare(name, tmp_path / folder, **options, **SMALL.get(name, {}))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    if not has_seed:  # nothing in it is random
        return
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other")
    data_files = [file for file in one if file.endswith(".npy") and not file.startswith("offsets")]
    assert data_files
    assert any(one[file] != other[file] for file in data_files)


@every_dataset
def test_it_is_whole_and_its_ids_are_in_range(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    dataset = open_dataset(tmp_path / "d", verify="digests")
    on_disk = {file.name for file in (tmp_path / "d").iterdir()}
    assert on_disk == {*dataset.description.files, "dataset.json"}


@every_dataset
def test_splits_are_there_and_disjoint(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    description = open_dataset(tmp_path / "d").description
    if isinstance(description, ClicksDescription):
        rows = [(r.day, i) for ranges in description.splits.values() for r in ranges for i in range(r.start, r.stop)]
        assert set(description.splits) == {"train", "val", "test"}
        assert len(rows) == len(set(rows)) == (sum(CRITEO_ROWS) if name == "criteo" else description.recipe["rows"])
    else:  # by position: the last, the one before, the rest
        assert isinstance(description, HistoriesDescription)
        assert np.diff(np.load(tmp_path / "d" / "offsets.npy")).min() >= 3


@every_dataset
def test_histories_say_how_often_each_item_occurs(name: str, tmp_path: Path) -> None:
    import polars as pl

    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    description = open_dataset(tmp_path / "d").description
    if description.kind == "histories":
        items = np.load(tmp_path / "d" / "items.npy")
        table = pl.read_parquet(tmp_path / "d" / "items.parquet")
        assert table["id"].to_list() == list(range(1, table.height + 1))
        assert table["count"].to_list() == np.bincount(items, minlength=table.height + 1)[1:].tolist()
        assert table["original_id"].is_unique().all()
    else:
        assert not (tmp_path / "d" / "items.npy").exists()
