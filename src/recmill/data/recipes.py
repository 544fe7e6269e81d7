"""The recipe of a click log in the run that was trained on it: new rows can be scored when the dataset is gone."""

import shutil
from pathlib import Path

import xxhash

from recmill.errors import ConfigError
from recmill.files.atomic import new_directory
from recmill.schema import DESCRIPTION_FILE, Dataset, from_json

RECIPE_FILE = "recipe.json"
_KEPT = "recipe"  # a directory of the run


def vocabulary_file(feature: str) -> str:
    return f"vocabulary_{feature}.parquet"


def keep_recipe(dataset: Dataset, run: Path) -> None:
    """Copy the recipe of the dataset, if it has one, its vocabularies and its description into the run directory."""
    if RECIPE_FILE not in dataset.description.files or (run / _KEPT).is_dir():
        return
    vocabularies = [name for name in dataset.description.files if name.startswith("vocabulary_")]
    with new_directory(run / _KEPT) as directory:
        for name in (*vocabularies, RECIPE_FILE, DESCRIPTION_FILE):
            shutil.copyfile(dataset.path / name, directory / name)


def has_recipe(run: Path) -> bool:
    return (run / _KEPT / DESCRIPTION_FILE).is_file()


def kept_dataset(run: Path) -> Dataset:
    """Return the dataset that a run was trained on, as far as it was copied: without its rows."""
    path = run / _KEPT
    if not has_recipe(run):
        raise ConfigError(
            f"{run}: it was trained on a dataset without a recipe, so new rows cannot be encoded. Prepare the log with "
            "`recmill prepare clicks`, and train on that."
        )
    text = (path / DESCRIPTION_FILE).read_bytes()
    return Dataset(path, from_json(text), fingerprint=xxhash.xxh3_128_hexdigest(text))
