"""The prepared-dataset contract: what `dataset.json` says, and whether the files beside it agree.

`dataset.json` is written last: a directory without it is not a dataset. Two kinds: `clicks` (one row per impression,
in TorchRec's npy layout or in Parquet) and `histories` (one run of items per user).
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from numpy.lib import format as npy_format
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from recmill.errors import DataError
from recmill.files.digests import digest

DESCRIPTION_FILE = "dataset.json"
SPLITS = ("train", "val", "test")
MAX_TABLE_ROWS = 2**40  # ids beyond that are 64-bit hashes, which no table can be as long as


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileInfo(_Strict):
    bytes: NonNegativeInt
    rows: NonNegativeInt
    xxh3: str  # xxh3_128 of the whole file


class SparseFeature(_Strict):
    name: str
    rows: PositiveInt  # ids are 0..rows-1
    first_id: int = 0  # of those stored: stored id - first_id is the row of the table


class SourceFile(_Strict):
    """A raw file that the dataset was made from. `sample` tells quickly whether it is still the same one."""

    name: str
    bytes: NonNegativeInt
    rows: NonNegativeInt
    bad_rows: NonNegativeInt = 0  # skipped
    sample: str


class RowRange(_Strict):
    """Rows start..stop of a day.

    A day is the files day_dense.npy, day_sparse.npy (or day_sparse_multi_hot.npz) and day_labels.npy, or day.parquet.
    """

    day: str
    start: NonNegativeInt
    stop: NonNegativeInt


class _Description(_Strict):
    format: Literal[1] = 1
    name: str
    made_by: str
    recipe: dict[str, Any]  # the options of `prepare`: the same recipe gives the same bytes
    files: dict[str, FileInfo]
    truth: dict[str, dict[str, float]] = {}  # split -> metric -> the best that any model can reach
    notes: list[str] = []  # what was dropped or changed on the way


class ClicksDescription(_Description):
    """Beside train, val and test there may be a split `unlabelled`, whose labels are all -1."""

    kind: Literal["clicks"] = "clicks"
    layout: Literal["npy", "parquet"] = "npy"
    dense: list[str]
    dense_stored: Literal["ready", "plus-one"] = "ready"  # plus-one: x + 1, and log(x + 2) is what a model gets
    sparse: list[SparseFeature]
    multi_hot: list[PositiveInt] = []  # ids per row of each sparse feature; empty: one
    splits: dict[str, list[RowRange]]
    source: list[SourceFile] = []

    def day_files(self, day: str) -> list[str]:
        if self.layout == "parquet":
            return [f"{day}.parquet"]
        return [f"{day}_dense.npy", self.sparse_file(day), f"{day}_labels.npy"]

    def sparse_file(self, day: str) -> str:
        if self.layout == "parquet":
            return f"{day}.parquet"
        return f"{day}_sparse_multi_hot.npz" if self.multi_hot else f"{day}_sparse.npy"

    @property
    def days(self) -> list[str]:
        return list(dict.fromkeys(r.day for ranges in self.splits.values() for r in ranges))


class HistoriesDescription(_Description):
    """Items are numbered 1..num_items (0 is padding), users 0..num_users-1.

    Leave-one-out by position: the last item of a history is its test target, the one before its
    validation target, the rest is for training.
    """

    kind: Literal["histories"] = "histories"
    num_users: PositiveInt
    num_items: PositiveInt
    num_interactions: PositiveInt
    has_timestamps: bool = False


Description = ClicksDescription | HistoriesDescription
_ADAPTER: TypeAdapter[Description] = TypeAdapter(Annotated[Description, Field(discriminator="kind")])


@dataclass(frozen=True)
class Dataset:
    """A checked dataset: `path` is its directory, `description` what dataset.json says."""

    path: Path
    description: Description
    fingerprint: str  # digest of dataset.json, which holds the digests of all the files

    def array(self, file: str) -> np.ndarray:
        """Memory-mapped: nothing is read before it is used."""
        return np.load(self.path / file, mmap_mode="r", allow_pickle=False)


def open_dataset(path: str | Path, verify: Literal["sizes", "digests"] = "sizes") -> Dataset:
    """Sizes, shapes, types and counts are always checked; `digests` reads every byte as well."""
    path = Path(path)
    description_file = path / DESCRIPTION_FILE
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: data.path is the directory of a prepared dataset.")
    if not path.is_dir():
        raise DataError(f"{path}: no such directory. Make the dataset first: recmill prepare NAME --output {path}.")
    try:
        text = description_file.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: no {DESCRIPTION_FILE}, so this is not a whole prepared dataset "
            f"(it is written last). Move it away, then prepare it again: recmill prepare NAME --output {path}."
        ) from None
    try:
        description = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{description_file}: '{place}': {first['msg']}. Prepare the dataset again: "
            f"recmill prepare NAME --output {path} --overwrite."
        ) from None
    dataset = Dataset(path, description, fingerprint=xxhash.xxh3_128_hexdigest(text))
    problems = _file_problems(dataset)
    if verify == "digests" and not problems:
        problems = _digest_problems(dataset)
    if not problems:
        problems = _clicks_problems(dataset) if description.kind == "clicks" else _histories_problems(dataset)
    if not problems and verify == "digests" and description.kind == "clicks":
        from recmill.data.click_rows import id_problems  # which itself needs to know what a Dataset is

        problems = id_problems(dataset)
    if problems:
        remedy = "Copy the dataset again, or prepare it again with --overwrite."
        raise DataError(f"{path} is not whole:\n" + "\n".join(f"  {p}" for p in problems) + f"\n{remedy}")
    return dataset


def _file_problems(dataset: Dataset) -> list[str]:
    problems = [
        f"{DESCRIPTION_FILE}: '{n}' is not the name of a file in here" for n in dataset.description.files if "/" in n
    ]
    if problems:
        return problems
    for name, info in dataset.description.files.items():
        file = dataset.path / name
        if not file.is_file():
            problems.append(f"{name}: missing")
        elif file.stat().st_size != info.bytes:
            problems.append(f"{name}: {file.stat().st_size:,} bytes, expected {info.bytes:,}: cut short or changed")
    return problems


def _digest_problems(dataset: Dataset) -> list[str]:
    return [
        f"{name}: its content changed (xxh3 {found}, expected {info.xxh3})"
        for name, info in dataset.description.files.items()
        if (found := digest(dataset.path / name)) != info.xxh3
    ]


def _npy_problem(dataset: Dataset, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> list[str]:
    """The header must agree with what the description says of this file."""
    if name not in dataset.description.files:
        return []  # reported already
    if dataset.description.files[name].rows != shape[0]:
        return [f"{name}: {dataset.description.files[name].rows:,} rows listed, expected {shape[0]:,}"]
    try:
        with (dataset.path / name).open("rb") as file:
            version = npy_format.read_magic(file)
            read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
            found_shape, fortran, dtype = read(file)
    except ValueError as error:
        return [f"{name}: not a NumPy file ({error})"]
    if fortran or found_shape != shape or dtype.str[1:] not in dtypes:
        return [f"{name}: {dtype} {list(found_shape)}, expected {' or '.join(dtypes)} {list(shape)}"]
    return []


def _clicks_problems(dataset: Dataset) -> list[str]:
    description = dataset.description
    assert isinstance(description, ClicksDescription)
    problems = []
    if not description.splits.get("train"):
        problems.append(f"{DESCRIPTION_FILE}: no rows for split train")
    if description.multi_hot and len(description.multi_hot) != len(description.sparse):
        problems.append(
            f"{DESCRIPTION_FILE}: {len(description.multi_hot)} multi-hot sizes, {len(description.sparse)} features"
        )
    names = [*description.dense, *(feature.name for feature in description.sparse)]
    for name in sorted({n for n in names if names.count(n) > 1 or "." in n or not n}):
        problems.append(f"{DESCRIPTION_FILE}: feature name '{name}' occurs twice, is empty or has a dot in it")
    ranges = sorted((r.day, r.start, r.stop) for part in description.splits.values() for r in part)
    problems += [
        f"{DESCRIPTION_FILE}: {day}: rows {start} to {stop} are no rows" for day, start, stop in ranges if start >= stop
    ]
    for (day, _, stop), (next_day, start, _) in pairwise(ranges):
        if day == next_day and start < stop:
            problems.append(f"{DESCRIPTION_FILE}: {day}: row {start:,} is in two splits, or twice in one")
    days: dict[str, int] = {}
    for day_range in (r for ranges in description.splits.values() for r in ranges):
        days[day_range.day] = max(day_range.stop, days.get(day_range.day, 0))
    for day, stop in days.items():
        names = description.day_files(day)
        info = description.files.get(names[-1])
        rows = info.rows if info else stop
        if stop > rows:
            problems.append(f"{day}: a split ends at row {stop:,} but there are {rows:,}")
        problems += [f"{name}: not listed in {DESCRIPTION_FILE}" for name in names if name not in description.files]
        if description.layout == "parquet":
            continue  # its columns are checked when they are read
        problems += _npy_problem(dataset, f"{day}_dense.npy", (rows, len(description.dense)), ("f4",))
        problems += _npy_problem(dataset, f"{day}_labels.npy", (rows, 1), ("i4",))
        if not description.multi_hot:
            problems += _npy_problem(dataset, f"{day}_sparse.npy", (rows, len(description.sparse)), ("i4", "i8"))
    return problems


def _histories_problems(dataset: Dataset) -> list[str]:
    description = dataset.description
    assert isinstance(description, HistoriesDescription)
    needed = ["items.npy", "offsets.npy", *(["timestamps.npy"] if description.has_timestamps else [])]
    problems = [f"{name}: not listed in {DESCRIPTION_FILE}" for name in needed if name not in description.files]
    problems += _npy_problem(dataset, "items.npy", (description.num_interactions,), ("i4",))
    problems += _npy_problem(dataset, "offsets.npy", (description.num_users + 1,), ("i8",))
    if description.has_timestamps:
        problems += _npy_problem(dataset, "timestamps.npy", (description.num_interactions,), ("i8",))
    for name, rows in (("users.parquet", description.num_users), ("items.parquet", description.num_items)):
        if name not in description.files or description.files[name].rows != rows:
            problems.append(f"{name}: expected {rows:,} rows to be listed in {DESCRIPTION_FILE}")
    if problems:
        return problems
    offsets, items = dataset.array("offsets.npy"), dataset.array("items.npy")
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(items):
        problems.append(f"offsets.npy: runs from {offsets[0]} to {offsets[-1]}, expected 0 to {len(items)}")
    elif lengths.min() < 3:
        user = int(lengths.argmin())
        problems.append(
            f"offsets.npy: user {user} has {lengths[user]} items; leave-one-out needs 3 (train, validation, test)"
        )
    bad = np.flatnonzero((items < 1) | (items > description.num_items))
    if len(bad):
        problems.append(f"items.npy: row {bad[0]}: item {items[bad[0]]} is not in 1..{description.num_items}")
    return problems


def to_json(description: Description) -> str:
    return json.dumps(description.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
