"""The prepared-dataset contract: what `dataset.json` says, and whether the files beside it agree.

`dataset.json` is written last: a directory without it is not a dataset. Two kinds: `clicks` (TorchRec's
npy layout, one row per impression) and `histories` (one run of items per user).
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

DESCRIPTION_FILE = "dataset.json"
SPLITS = ("train", "val", "test")
PAD_ITEM = 0  # item ids start at 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileInfo(_Strict):
    bytes: NonNegativeInt
    rows: NonNegativeInt
    xxh3: str  # xxh3_128 of the whole file


class SparseFeature(_Strict):
    name: str
    rows: PositiveInt  # ids are 0..rows-1


class RowRange(_Strict):
    """Rows start..stop of the three files day_dense.npy, day_sparse.npy, day_labels.npy."""

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
    kind: Literal["clicks"] = "clicks"
    dense: list[str]
    sparse: list[SparseFeature]
    splits: dict[str, list[RowRange]]


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
    """A checked dataset: `path` is its directory, `about` what its description says."""

    path: Path
    about: Description
    fingerprint: str  # digest of dataset.json, which holds the digests of all the files

    def array(self, file: str) -> np.ndarray:
        """Memory-mapped: nothing is read before it is used."""
        return np.load(self.path / file, mmap_mode="r", allow_pickle=False)


@dataclass(frozen=True)
class TableSpec:
    """An embedding table as a model declares it. Rows start uniform in [-init_bound, init_bound]."""

    name: str
    feature: str
    rows: int
    dim: int
    init_bound: float


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
        about = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{description_file}: '{place}': {first['msg']}. Prepare the dataset again: "
            f"recmill prepare NAME --output {path} --overwrite."
        ) from None
    dataset = Dataset(path, about, fingerprint=xxhash.xxh3_128_hexdigest(text))
    problems = _file_problems(dataset)
    if verify == "digests" and not problems:
        problems = _digest_problems(dataset)
    if not problems:
        problems = _clicks_problems(dataset) if about.kind == "clicks" else _histories_problems(dataset)
    if not problems and verify == "digests":
        problems = _id_problems(dataset)
    if problems:
        remedy = "Copy the dataset again, or prepare it again with --overwrite."
        raise DataError(f"{path} is not whole:\n" + "\n".join(f"  {p}" for p in problems) + f"\n{remedy}")
    return dataset


def digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def _file_problems(dataset: Dataset) -> list[str]:
    problems = [f"{DESCRIPTION_FILE}: '{n}' is not the name of a file in here" for n in dataset.about.files if "/" in n]
    if problems:
        return problems
    for name, info in dataset.about.files.items():
        file = dataset.path / name
        if not file.is_file():
            problems.append(f"{name}: missing")
        elif file.stat().st_size != info.bytes:
            problems.append(f"{name}: {file.stat().st_size:,} bytes, expected {info.bytes:,}: cut short or changed")
    return problems


def _digest_problems(dataset: Dataset) -> list[str]:
    return [
        f"{name}: its content changed (xxh3 {found}, expected {info.xxh3})"
        for name, info in dataset.about.files.items()
        if (found := digest(dataset.path / name)) != info.xxh3
    ]


def _npy_problem(dataset: Dataset, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> list[str]:
    """The header must agree with what the description says of this file."""
    if name not in dataset.about.files:
        return [f"{name}: not listed in {DESCRIPTION_FILE}"]
    if dataset.about.files[name].rows != shape[0]:
        return [f"{name}: {dataset.about.files[name].rows:,} rows listed, expected {shape[0]:,}"]
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
    about = dataset.about
    assert isinstance(about, ClicksDescription)
    problems = []
    missing = [split for split in SPLITS if not about.splits.get(split)]
    if missing:
        problems.append(f"{DESCRIPTION_FILE}: no rows for split {', '.join(missing)}")
    names = [*about.dense, *(feature.name for feature in about.sparse)]
    for name in sorted({n for n in names if names.count(n) > 1 or "." in n or not n}):
        problems.append(f"{DESCRIPTION_FILE}: feature name '{name}' occurs twice, is empty or has a dot in it")
    ranges = sorted((r.day, r.start, r.stop) for part in about.splits.values() for r in part)
    problems += [
        f"{DESCRIPTION_FILE}: {day}: rows {start} to {stop} are no rows" for day, start, stop in ranges if start >= stop
    ]
    for (day, _, stop), (next_day, start, _) in pairwise(ranges):
        if day == next_day and start < stop:
            problems.append(f"{DESCRIPTION_FILE}: {day}: row {start:,} is in two splits, or twice in one")
    days: dict[str, int] = {}
    for day_range in (r for ranges in about.splits.values() for r in ranges):
        days[day_range.day] = max(day_range.stop, days.get(day_range.day, 0))
    for day, stop in days.items():
        info = about.files.get(f"{day}_labels.npy")
        rows = info.rows if info else stop
        if stop > rows:
            problems.append(f"{day}: a split ends at row {stop:,} but there are {rows:,}")
        problems += _npy_problem(dataset, f"{day}_dense.npy", (rows, len(about.dense)), ("f4",))
        problems += _npy_problem(dataset, f"{day}_sparse.npy", (rows, len(about.sparse)), ("i4", "i8"))
        problems += _npy_problem(dataset, f"{day}_labels.npy", (rows, 1), ("i4",))
    return problems


def _histories_problems(dataset: Dataset) -> list[str]:
    about = dataset.about
    assert isinstance(about, HistoriesDescription)
    problems = _npy_problem(dataset, "items.npy", (about.num_interactions,), ("i4",))
    problems += _npy_problem(dataset, "offsets.npy", (about.num_users + 1,), ("i8",))
    if about.has_timestamps:
        problems += _npy_problem(dataset, "timestamps.npy", (about.num_interactions,), ("i8",))
    for name, rows in (("users.parquet", about.num_users), ("items.parquet", about.num_items)):
        if name not in about.files or about.files[name].rows != rows:
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
    bad = np.flatnonzero((items < 1) | (items > about.num_items))
    if len(bad):
        problems.append(f"items.npy: row {bad[0]}: item {items[bad[0]]} is not in 1..{about.num_items}")
    return problems


def _id_problems(dataset: Dataset) -> list[str]:
    """Every id of every row; training checks the same per batch (histories are always checked whole)."""
    about = dataset.about
    if not isinstance(about, ClicksDescription):
        return []
    problems = []
    for day in sorted({r.day for ranges in about.splits.values() for r in ranges}):
        file = f"{day}_sparse.npy"
        ids = dataset.array(file)
        for start in range(0, len(ids), 1 << 20):
            if bad := first_bad_id(ids[start : start + (1 << 20)], about.sparse):
                row, column = bad
                problems.append(bad_id_text(file, start + row, about.sparse[column], int(ids[start + row, column])))
                break
    return problems


def first_bad_id(ids: np.ndarray, sparse: list[SparseFeature]) -> tuple[int, int] | None:
    """(row, column) of the first id outside 0..rows-1; one unsigned comparison finds negatives too."""
    limits = np.array([feature.rows for feature in sparse], dtype=np.uint64)
    bad = ids.astype(np.int64).view(np.uint64) >= limits
    if not bad.any():
        return None
    row, column = np.argwhere(bad)[0]
    return int(row), int(column)


def bad_id_text(file: str, row: int, feature: SparseFeature, value: int) -> str:
    fact = f"id {value} is not in 0..{feature.rows - 1} (table of {feature.rows:,} rows)"
    return f"{file}: row {row:,}, column {feature.name}: {fact}"


def to_json(about: Description) -> str:
    return json.dumps(about.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
