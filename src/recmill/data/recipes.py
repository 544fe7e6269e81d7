"""The recipe of a click log in the run that was trained on it: new rows can be scored when the dataset is gone."""

import shutil
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from recmill.errors import ConfigError, DataError
from recmill.files.atomic import new_directory
from recmill.files.digests import digest
from recmill.schema import DESCRIPTION_FILE, Dataset, Description, from_json

NO_LABEL = -1
RECIPE_FILE = "recipe.json"
_KEPT = "recipe"  # a directory of the run
_ITEMS = "items.parquet"  # of histories


@dataclass
class Tally:
    """How many rows were encoded, and by feature how many had no value, an unseen or rare one, or a clipped one."""

    rows: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, feature: str, **found: np.ndarray) -> None:
        self.add_counts(feature, **{name: int(np.count_nonzero(is_so)) for name, is_so in found.items()})

    def add_counts(self, feature: str, **counted: int) -> None:
        with self._lock:
            self.counts.setdefault(feature, Counter()).update(counted)


def vocabulary_file(feature: str) -> str:
    return f"vocabulary_{feature}.parquet"


def keep_recipe(dataset: Dataset, run: Path) -> None:
    """Copy the recipe of the dataset, if it has one, its vocabularies and its description into the run directory."""
    if RECIPE_FILE not in dataset.description.files or (run / _KEPT).is_dir():
        return
    with new_directory(run / _KEPT) as directory:
        for name in (*_files_of_recipe(dataset.description), DESCRIPTION_FILE):
            shutil.copyfile(dataset.path / name, directory / name)


def _files_of_recipe(description: Description) -> list[str]:
    return [RECIPE_FILE, *(name for name in description.files if name.startswith("vocabulary_"))]


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
    description = from_json(text)
    for name in _files_of_recipe(description):
        file = path / name
        if not file.is_file() or description.files[name].xxh3 != digest(file):
            raise DataError(
                f"{file}: missing, corrupt or changed since training, so rows would be encoded in another way. "
                "Copy it from the prepared dataset again."
            )
    return Dataset(path, description, fingerprint=xxhash.xxh3_128_hexdigest(text))


def features_with_other_ids(run: Path, trained_on: Path, dataset: Dataset) -> list[str]:
    """Return the features whose values have other ids in the dataset than in the one that the run was trained on.

    The items of histories are compared if the directory `trained_on` is still there. Tables of other sizes are not
    compared: loading finds them.
    """
    import polars as pl

    new = dataset.description.files
    pairs = []
    if has_recipe(run):
        before = kept_dataset(run)
        names = [name for name in _files_of_recipe(before.description)[1:] if name in new]
        pairs = [(before.path / name, name, ["value", "id"]) for name in names]  # counts may differ
    elif _ITEMS in new and (trained_on / _ITEMS).is_file():
        pairs = [(trained_on / _ITEMS, _ITEMS, ["original_id"])]
    found = []
    for old, name, columns in pairs:
        ids = [pl.read_parquet(file, columns=columns, glob=False) for file in (old, dataset.path / name)]
        if ids[0].height == ids[1].height and not ids[0].equals(ids[1]):
            found.append(name.removeprefix("vocabulary_").removesuffix(".parquet"))
    return found
