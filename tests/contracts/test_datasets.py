"""What every dataset in the registry must do."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare, registry
from recmill.data.opening import open_dataset
from recmill.datasets import writing
from recmill.schema import ClicksDescription, HistoriesDescription

from ..criteo_raw import write_days

# Options that make a dataset small; one whose defaults are small needs no entry. `raw_input` adds the input files.
SMALL: dict[str, dict[str, Any]] = {
    "criteo": {"shuffle": "global"},  # its seed has an effect only then
    "synthetic-clicks": {"rows": 1000, "tables": [3, 1000, 20]},
    "random-clicks": {"rows": 1000, "tables": [3, 1000, 20]},
    "synthetic-histories": {"users": 50, "items": 150, "interactions": 500},
}

CRITEO_ROWS = [400, 350, 250]

every_dataset = pytest.mark.parametrize("name", sorted(registry.DATASETS))


@pytest.fixture(autouse=True, scope="module")
def raw_input(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write the input of the datasets that have one."""
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
    if not has_seed:
        assert contents(tmp_path / "one") == contents(tmp_path / "other")
        return
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other")
    data_files = [file for file in one if file.endswith(".npy") and not file.startswith("offsets")]
    assert data_files
    assert any(one[file] != other[file] for file in data_files)


@every_dataset
def test_it_provides_what_the_protocol_says(name: str, tmp_path: Path) -> None:
    module = registry.load(registry.DATASETS, name, "dataset")
    assert module.__doc__
    assert all(field.description for field in module.Options.model_fields.values())
    options: dict[str, Any] = dict(SMALL.get(name, {}))
    if "input" in options:
        options["input"] = str(options["input"])
    plan = module.plan(module.Options(**options))
    assert json.loads(json.dumps(plan.recipe)) == plan.recipe
    assert bool(plan.inputs) == ("input" in options)
    assert prepare(name, tmp_path / "d", **options)["recipe"] == plan.recipe


@every_dataset
def test_interrupted_at_the_end_and_run_again_it_has_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(name, tmp_path / "expected", **SMALL.get(name, {}))
    with monkeypatch.context() as patch:
        patch.setattr(writing, "replace_directory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    assert not (tmp_path / "d").exists()
    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    assert contents(tmp_path / "d") == contents(tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "expected"]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@every_dataset
def test_it_is_complete_and_its_ids_are_in_range(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    dataset = open_dataset(tmp_path / "d", verify="digests")
    on_disk = {file.name for file in (tmp_path / "d").iterdir()}
    assert on_disk == {*dataset.description.files, "dataset.json"}


@every_dataset
def test_splits_are_disjoint_and_cover_all_rows(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path / "d", **SMALL.get(name, {}))
    description = open_dataset(tmp_path / "d").description
    if isinstance(description, ClicksDescription):
        rows = [(r.day, i) for ranges in description.splits.values() for r in ranges for i in range(r.start, r.stop)]
        assert set(description.splits) == {"train", "val", "test"}
        assert len(rows) == len(set(rows)) == (sum(CRITEO_ROWS) if name == "criteo" else description.recipe["rows"])
    else:  # leave-one-out: the last item, the one before it, the rest
        assert isinstance(description, HistoriesDescription)
        assert np.diff(np.load(tmp_path / "d" / "offsets.npy")).min() >= 3


@every_dataset
def test_histories_state_how_often_each_item_occurs(name: str, tmp_path: Path) -> None:
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
