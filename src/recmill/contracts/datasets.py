"""The contract of a dataset: prepared with small options, in a directory of its own."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from recmill import registry
from recmill.commands.prepare import prepare
from recmill.config.options import checked_options
from recmill.contracts import expect
from recmill.data.opening import open_dataset
from recmill.datasets.protocol import DatasetModule
from recmill.datasets.writing import PREPARATION_FILE, resumable_directory
from recmill.schema import ClicksDescription

Options = dict[str, Any]
Check = Callable[[str, Options, Path], None]


def contents(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.iterdir() if file.name != PREPARATION_FILE)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _module(name: str) -> DatasetModule:
    return cast(DatasetModule, registry.load(registry.DATASETS, name, "dataset"))


def it_describes_itself_and_its_options(name: str, options: Options, directory: Path) -> None:
    """The module and each option have a help text, and dataset.json holds the recipe of the plan."""
    module = _module(name)
    expect(bool(getattr(module, "__doc__", None)), "the module has no docstring, which is the help of its command")
    without = [key for key, field in module.Options.model_fields.items() if not field.description]
    expect(not without, f"options without a description, which is the help of their flags: {', '.join(without)}")
    plan = module.plan(checked_options(name, module.Options, options))
    expect(json.loads(json.dumps(plan.recipe)) == plan.recipe, "plan.recipe is not made of JSON values")
    description = prepare(name, directory / "described", **options)
    expect(description["recipe"] == plan.recipe, "dataset.json has another recipe than the plan")
    names = (name, name.rpartition(".")[2])
    expect(description["name"] in names, f"dataset.json says '{description['name']}', expected {' or '.join(names)}")


def it_gives_the_same_bytes_twice_and_others_with_another_seed(name: str, options: Options, directory: Path) -> None:
    """The same options and seed give the same files."""
    has_seed = "seed" in _module(name).Options.model_fields
    for folder, seed in (("one", 5), ("two", 5), ("other", 6)):
        prepare(name, directory / folder, **options | ({"seed": seed} if has_seed else {}))
    one, two, other = (contents(directory / folder) for folder in ("one", "two", "other"))
    expect(one == two, f"files differ: {', '.join(file for file in one if one[file] != two.get(file))}")
    data = [file for file in one if file.endswith(".npy") and not file.startswith("offsets")]
    is_other = any(one[file] != other.get(file) for file in data)
    expect(is_other or not has_seed or not data, "another seed gives the same data")


def interrupted_and_resumed_it_gives_the_same_bytes(name: str, options: Options, directory: Path) -> None:
    """A preparation that was interrupted can be repeated, and leaves nothing behind."""
    module = _module(name)
    plan = module.plan(checked_options(name, module.Options, options))
    with (
        suppress(KeyboardInterrupt),
        resumable_directory(directory / "again", plan.recipe, plan.inputs, discard=False) as work,
    ):
        module.write(plan, work)
        raise KeyboardInterrupt
    expect(not (directory / "again").exists(), "an interrupted preparation left a dataset behind")
    for folder in ("again", "uninterrupted"):
        prepare(name, directory / folder, **options)
    expect(contents(directory / "again") == contents(directory / "uninterrupted"), "a resumed preparation differs")
    expect(len(list(directory.iterdir())) == 2, "a finished preparation left files beside the dataset")


def it_is_complete_and_its_ids_are_in_range(name: str, options: Options, directory: Path) -> None:
    """dataset.json lists every file, and no id is beyond its table."""
    prepare(name, directory / "d", **options)
    dataset = open_dataset(directory / "d", verify="digests")
    found = {file.name for file in (directory / "d").iterdir()} - {PREPARATION_FILE}
    listed = {*dataset.description.files, "dataset.json"}
    expect(found == listed, f"files that dataset.json does not list: {', '.join(sorted(found - listed))}")


def its_splits_are_disjoint_and_cover_all_rows(name: str, options: Options, directory: Path) -> None:
    """Each row belongs to one of train, val and test; each history has an item for each of them."""
    prepare(name, directory / "d", **options)
    description = open_dataset(directory / "d").description
    if isinstance(description, ClicksDescription):
        ranges = [part for parts in description.splits.values() for part in parts]
        rows = [(part.day, row) for part in ranges for row in range(part.start, part.stop)]
        stored = sum(description.files[description.day_files(day)[-1]].rows for day in {part.day for part in ranges})
        expect({"train", "val", "test"} <= description.splits.keys(), "one of train, val and test is missing")
        expect(len(set(rows)) == len(rows) == stored, f"the splits have {len(rows):,} of {stored:,} rows")
    else:  # leave-one-out: the last item, the one before it, the rest
        shortest = np.diff(np.load(directory / "d" / "offsets.npy")).min()
        expect(shortest >= 3, f"a history has {shortest} items, and train, val and test need one each")


def its_histories_state_how_often_each_item_occurs(name: str, options: Options, directory: Path) -> None:
    """items.parquet lists the ids 1, 2, 3, ... with their original ids and counts."""
    prepare(name, directory / "d", **options)
    if open_dataset(directory / "d").description.kind == "clicks":
        return
    items = np.load(directory / "d" / "items.npy")
    table = pl.read_parquet(directory / "d" / "items.parquet", glob=False)
    expect(table["id"].to_list() == list(range(1, table.height + 1)), "the ids of items.parquet are not 1, 2, 3, ...")
    counts = np.bincount(items, minlength=table.height + 1)[1:].tolist()
    expect(table["count"].to_list() == counts, "the counts of items.parquet are not those of items.npy")
    expect(bool(table["original_id"].is_unique().all()), "an original_id occurs twice in items.parquet")


CHECKS: tuple[Check, ...] = (
    it_describes_itself_and_its_options,
    it_gives_the_same_bytes_twice_and_others_with_another_seed,
    interrupted_and_resumed_it_gives_the_same_bytes,
    it_is_complete_and_its_ids_are_in_range,
    its_splits_are_disjoint_and_cover_all_rows,
    its_histories_state_how_often_each_item_occurs,
)
