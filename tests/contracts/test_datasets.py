"""What every dataset in the registry must do."""

from pathlib import Path
from typing import Any

import pytest

from recmill import prepare, registry
from recmill.contracts import datasets
from recmill.data.opening import open_dataset
from recmill.schema import ClicksDescription

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
        "clicks.csv": "click,who\n" + "".join(f"{(u * i) % 2},{u}\n" for u, i in pairs),
        "clicks.toml": "[label]\ncolumn = 'click'\n[[feature]]\ncolumn = 'who'\ntype = 'categorical'\n",
        "own.csv": "who,what\n" + "".join(f"{u},{i}\n" for u, i in pairs),
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    SMALL["clicks"] = {"input": directory / "clicks.csv", "schema": str(directory / "clicks.toml")}
    SMALL["movielens"] = {"input": directory}
    SMALL["goodreads"] = {"input": directory, "min_interactions": 5}
    SMALL["histories"] = {"input": directory / "own.csv", "user_column": "who", "item_column": "what"}


@every_dataset
@pytest.mark.parametrize("check", datasets.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: datasets.Check, name: str, tmp_path: Path) -> None:
    check(name, SMALL.get(name, {}), tmp_path)


@every_dataset
def test_its_files_to_read_and_its_rows_are_those_of_its_input(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        key: str(value) if key == "input" else value for key, value in SMALL.get(name, {}).items()
    }
    module = registry.load(registry.DATASETS, name, "dataset")
    assert bool(module.plan(module.Options(**options)).inputs) == ("input" in options)
    prepare(name, tmp_path / "d", **options)
    description = open_dataset(tmp_path / "d").description
    if isinstance(description, ClicksDescription):
        rows = sum(part.stop - part.start for parts in description.splits.values() for part in parts)
        raw_rows = {"criteo": sum(CRITEO_ROWS), "clicks": 400}
        assert rows == raw_rows.get(name, description.recipe.get("rows"))
        assert not (tmp_path / "d" / "items.npy").exists()
