"""Open a prepared dataset and check that its files agree with its `dataset.json`."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import ValidationError

from recmill.data.checks import REMEDY, value_problems
from recmill.data.npy_files import read_header
from recmill.data.verification import digest_problems
from recmill.errors import DataError, did_you_mean_path
from recmill.files.reading import read_small
from recmill.schema import DESCRIPTION_FILE, Dataset, HistoriesDescription, from_json

Checks = Literal["sizes", "once", "digests"]


def open_dataset(path: str | Path, verify: Checks = "sizes") -> Dataset:
    """Open the prepared dataset in `path`, or raise a DataError that lists its problems.

    `sizes` checks what is cheap: the description, sizes and headers of files, splits, and lengths of histories.
    `once` also compares the digests of files that are not known to be correct. `digests` reads every byte and checks
    every value. Otherwise values are checked when they are read: click rows by `SplitRows` in every batch, items of
    histories once, by `checks.checked_items`.
    """
    dataset = _described(Path(path))
    checks: list[Callable[[Dataset], Iterable[str]]] = [_click_problems]
    if isinstance(dataset.description, HistoriesDescription):
        checks = [_history_problems, _length_problems]
    if verify == "once":
        checks = [partial(digest_problems, which="new"), *checks]
    if verify == "digests":
        checks = [partial(digest_problems, which="all"), *checks, value_problems]
    for check in (_file_problems, *checks):
        if problems := "".join(f"  {problem}\n" for problem in check(dataset)):
            raise DataError(f"{dataset.path} is incomplete or corrupt:\n{problems}{REMEDY}")
    return dataset


def _described(path: Path) -> Dataset:
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: data.path is the directory of a prepared dataset.")
    if not path.is_dir():
        near = did_you_mean_path(path)
        raise DataError(
            f"{path}: no such directory. {near}data.path is the directory of a prepared dataset; make "
            f"it first: recmill prepare NAME --output {path}."
        )
    try:
        text = read_small(path / DESCRIPTION_FILE)
        return Dataset(path, from_json(text), fingerprint=xxhash.xxh3_128_hexdigest(text))
    except FileNotFoundError:
        if (path / "config.toml").is_file():
            raise DataError(f"{path} is a run: its dataset is the data.path in {path / 'config.toml'}.") from None
        raise DataError(
            f"{path}: no {DESCRIPTION_FILE}, so this is not a complete prepared dataset "
            f"(it is written last). Move it away, then prepare it again: recmill prepare NAME --output {path}."
        ) from None
    except ValueError as error:
        fact = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fact = f"'{'.'.join(str(part) for part in first['loc'])}': {first['msg']}"
        raise DataError(
            f"{path / DESCRIPTION_FILE}: {fact}. Prepare the dataset again: "
            f"recmill prepare NAME --output {path} --overwrite."
        ) from None


def _file_problems(dataset: Dataset) -> Iterator[str]:
    for name, info in dataset.description.files.items():
        file = dataset.path / name
        if "/" in name:
            yield f"{DESCRIPTION_FILE}: '{name}' is not the name of a file in this directory"
        elif not file.is_file():
            yield f"{name}: missing"
        elif file.stat().st_size != info.bytes:
            yield f"{name}: {file.stat().st_size:,} bytes, expected {info.bytes:,}: truncated or changed"


def _npy_problems(dataset: Dataset, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
    """Check the number of rows that the description lists for an npy file, and the header of the file."""
    info = dataset.description.files.get(name)
    if info is None:
        yield f"{name}: not listed in {DESCRIPTION_FILE}"
        return
    if info.rows != shape[0]:
        yield f"{name}: {info.rows:,} rows listed, expected {shape[0]:,}"
        return
    try:
        with (dataset.path / name).open("rb") as file:
            found_shape, is_fortran, dtype = read_header(file)
            size = file.tell() + math.prod(found_shape) * dtype.itemsize
    except ValueError as error:
        yield f"{name}: not a NumPy file ({error})"
        return
    if is_fortran or found_shape != shape or dtype.str[1:] not in dtypes:
        yield f"{name}: {dtype} {list(found_shape)}, expected {' or '.join(dtypes)} {list(shape)}"
    elif info.bytes != size:
        yield f"{name}: {info.bytes:,} bytes, but its header says {size:,}"


def _click_problems(dataset: Dataset) -> Iterator[str]:
    """Check the description by itself, then the headers of the files."""
    description = dataset.clicks
    if not description.splits.get("train"):
        yield f"{DESCRIPTION_FILE}: no rows for split train"
    if len(description.ids_per_row) != len(description.sparse):
        yield f"{DESCRIPTION_FILE}: {len(description.multi_hot)} multi-hot sizes, {len(description.sparse)} features"
    names = [*description.dense, *(feature.name for feature in description.sparse)]
    for name in sorted({n for n in names if names.count(n) > 1 or "." in n or not n}):
        yield f"{DESCRIPTION_FILE}: feature name '{name}' occurs twice, is empty or has a dot in it"
    owners = {feature.name: feature.share_table or feature.name for feature in description.sparse}
    for feature in description.sparse:
        name, owner = feature.name, owners[feature.name]
        if (feature.padding_id or 0) >= feature.rows:
            yield f"{DESCRIPTION_FILE}: '{name}' has the padding id {feature.padding_id} and {feature.rows:,} rows"
        if owners.get(owner) != owner:
            yield f"{DESCRIPTION_FILE}: '{name}' shares the table of '{owner}', which is no feature with its own table"
    ranges = sorted(chain(*description.splits.values()), key=lambda part: (part.day, part.start, part.stop))
    for part in ranges:
        if part.start >= part.stop:
            yield f"{DESCRIPTION_FILE}: {part.day}: the range of rows {part.start} to {part.stop} is empty"
    for part, following in pairwise(ranges):
        if part.day == following.day and following.start < part.stop:
            yield f"{DESCRIPTION_FILE}: {part.day}: row {following.start:,} is in two splits, or twice in one"
    used_rows: dict[str, int] = {}
    for part in chain(*description.splits.values()):
        used_rows[part.day] = max(part.stop, used_rows.get(part.day, 0))
    for day, used in used_rows.items():
        yield from _day_problems(dataset, day, used)


def _day_problems(dataset: Dataset, day: str, used_rows: int) -> Iterator[str]:
    description = dataset.clicks
    files = description.day_files(day)
    info = description.files.get(files[-1])
    rows = info.rows if info else used_rows
    if used_rows > rows:
        yield f"{day}: a split ends at row {used_rows:,} but there are {rows:,}"
    expected = {  # multi-hot ids and the columns of Parquet are checked when they are read
        f"{day}_dense.npy": ((rows, len(description.dense)), ("f4",)),
        f"{day}_sparse.npy": ((rows, len(description.sparse)), ("i4", "i8")),
        f"{day}_labels.npy": ((rows, 1), ("i4",)),
        description.weights_file(day): ((rows,), ("f4",)),
    }
    weights = [description.weights_file(day)] if description.weights else []
    kept = [description.keep_file(day)] if description.keep else []
    for name in dict.fromkeys([*files, *weights, *kept]):
        if info and description.layout == "bin" and info.bytes != (size := rows * 4 * description.record_words):
            yield f"{name}: {info.bytes:,} bytes, expected {size:,}: {rows:,} records"
        if name in expected:
            yield from _npy_problems(dataset, name, *expected[name])
        elif name not in description.files:
            yield f"{name}: not listed in {DESCRIPTION_FILE}"


def _history_problems(dataset: Dataset) -> Iterator[str]:
    description = dataset.histories
    yield from _npy_problems(dataset, "items.npy", (description.num_interactions,), ("i4",))
    yield from _npy_problems(dataset, "offsets.npy", (description.num_users + 1,), ("i8",))
    if description.has_timestamps:
        yield from _npy_problems(dataset, "timestamps.npy", (description.num_interactions,), ("i8",))
    for name, rows in (("users.parquet", description.num_users), ("items.parquet", description.num_items)):
        if name not in description.files or description.files[name].rows != rows:
            yield f"{name}: expected {rows:,} rows to be listed in {DESCRIPTION_FILE}"


def _length_problems(dataset: Dataset) -> Iterator[str]:
    """Check that each history is long enough, and that together they hold all interactions."""
    offsets = dataset.array("offsets.npy")
    lengths = np.diff(offsets)
    num_interactions = dataset.histories.num_interactions
    if offsets[0] != 0 or offsets[-1] != num_interactions:
        yield f"offsets.npy: goes from {offsets[0]} to {offsets[-1]}, expected 0 to {num_interactions}"
    elif lengths.min() < 3:
        user = int(lengths.argmin())
        yield f"offsets.npy: user {user} has {lengths[user]} items; leave-one-out needs 3 (train, validation, test)"
