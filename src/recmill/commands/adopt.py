"""`recmill adopt`: npy files of TorchRec's or MLPerf's scripts -> a prepared dataset, by a `dataset.json` alone."""

import logging
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy_format
from pydantic import Field, PositiveInt

from recmill.config.options import checked_options
from recmill.config.sections import Section
from recmill.data.click_rows import (
    ClickRows,
    StoredDay,
    bad_id_text,
    feature_of_column,
    first_bad_id,
    id_limits,
    npz_arrays,
)
from recmill.datasets.clicks import split_rows
from recmill.datasets.writing import MADE_BY, seal
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.observe.progress import Progress
from recmill.schema import (
    DESCRIPTION_FILE,
    SPLITS,
    ClicksDescription,
    Dataset,
    FileInfo,
    RowRange,
    SparseFeature,
    open_dataset,
)

log = logging.getLogger(__name__)

NAME = "adopted"
VAL_FRACTION = 0.1  # of a single day, if not told
_DENSE, _LABELS, _ONE_HOT, _MULTI_HOT = "dense.npy", "labels.npy", "sparse.npy", "sparse_multi_hot.npz"
_NOT_RENAMED = "sparse_contig_freq.npy"  # as TorchRec's contiguous_preproc_criteo.py calls what it writes
_DTYPES = {_DENSE: ["float32"], _LABELS: ["int32"], _ONE_HOT: ["int32", "int64"], _MULTI_HOT: ["int32", "int64"]}
_FILE = re.compile(rf"(day_\d+|train|test)_({'|'.join(map(re.escape, [*_DTYPES, _NOT_RENAMED]))})")
_ANY_ID = 2**63 - 1  # stands for a table size that is not known yet


class Options(Section):
    last_day: Literal["val-first", "test-first", "none"] = "val-first"
    val_fraction: float | None = Field(None, gt=0.0, lt=0.5)
    table_size: list[PositiveInt] | None = Field(None, min_length=1)
    dense_transform: str | None = None


def adopt(path: str | Path, **options: Any) -> dict[str, Any]:
    """Describe the files in `path` and return the description. Nothing but `dataset.json` is written.

    Options are those of `recmill adopt --help`, with underscores: adopt("d", last_day="none", table_size=[1000]).
    """
    checked: Options = checked_options("adopt", Options, options)
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: no such directory. Give the one that holds day_0_dense.npy or train_dense.npy.")
    if _is_adopted(path, checked):
        log.info("%s is already adopted: nothing to do", path)
    else:
        _write_description(path, checked)
        log.info("adopted %s", path)
    return open_dataset(path).description.model_dump(mode="json")


def _is_adopted(path: Path, options: Options) -> bool:
    file = path / DESCRIPTION_FILE
    if not file.exists():
        if not os.access(path, os.W_OK):  # told now, not after hours of reading
            raise ResourceError(f"{path}: no permission to write {DESCRIPTION_FILE}. Change that, or adopt a copy.")
        return False
    try:
        description = open_dataset(path).description
        if description.name == NAME and description.recipe == options.model_dump():
            open_dataset(path, verify="digests")
            return True
    except DataError as error:
        raise DataError(f"{error}\nIf the files are as they should be, remove {file} and adopt them again.") from None
    raise DataError(
        f"{file} is there already ({description.name}, {description.recipe}, {description.made_by}). "
        "Remove it if the files beside it are to be adopted with other options."
    )


def _write_description(path: Path, options: Options) -> None:
    """Names, headers and labels come first: what they tell, nobody should learn after hours of reading."""
    description, day_rows = _from_headers(path, options.table_size)
    splits = _splits(path, day_rows, options)
    with Progress(f"reading {path}", sum(day_rows.values()), "rows") as progress:
        largest_ids = _largest_ids(Dataset(path, description, fingerprint=""), list(day_rows), progress)
    notes = [f"dense values: {options.dense_transform or 'transformed elsewhere; nobody told how'}"]
    notes += [f"{part.day}: all labels are -1, so it is split unlabelled" for part in splits.get("unlabelled", [])]
    if options.table_size is None:
        description = description.model_copy(update={"sparse": _features(largest_ids + 1)})
        notes.append("table sizes: the largest id + 1 of each column")
    description = description.model_copy(update={"recipe": options.model_dump(), "splits": splits, "notes": notes})
    log.info("every value is good; now the files are read once more for their digests")
    seal(
        path,
        lambda files: description.model_copy(update={"files": files}),
        {n: f.rows for n, f in description.files.items()},
    )


def _raise_if_any(path: Path, problems: list[str]) -> None:
    if problems:
        remedy = "Make these files again, or move away what does not belong here; then run the same command again."
        raise DataError(f"{path} cannot be adopted:\n" + "\n".join(f"  {p}" for p in problems) + f"\n{remedy}")


def _features(sizes: np.ndarray) -> list[SparseFeature]:
    return [SparseFeature(name=f"C{i + 1}", rows=rows) for i, rows in enumerate(sizes.tolist())]


def _from_headers(path: Path, table_size: list[int] | None) -> tuple[ClicksDescription, dict[str, int]]:
    """All but splits, digests and table sizes that were not told; rows per day."""
    days = _days(path)
    sparse = _MULTI_HOT if any((path / f"{day}_{_MULTI_HOT}").exists() for day in days) else _ONE_HOT
    shapes = _checked_shapes(path, days, sparse)
    day_rows = {day: shapes[day, _LABELS][0][0] for day in days}
    hot = [columns for _, columns in shapes[days[0], sparse]]
    num_tables = len(hot) if sparse == _MULTI_HOT else hot[0]
    if table_size and len(table_size) not in (1, num_tables):
        raise ConfigError(f"--table-size: {len(table_size)} sizes, {num_tables} columns of ids. Give one each, or one.")
    description = ClicksDescription(
        name=NAME,
        made_by=MADE_BY,
        recipe={},
        files={},
        dense=[f"I{i + 1}" for i in range(shapes[days[0], _DENSE][0][1])],
        sparse=_features(np.broadcast_to(table_size or [_ANY_ID], num_tables)),
        multi_hot=hot if sparse == _MULTI_HOT else [],
        splits={},
    )
    rows = {name: rows for day, rows in day_rows.items() for name in description.day_files(day)}
    files = {name: FileInfo(bytes=(path / name).stat().st_size, rows=n, xxh3="") for name, n in rows.items()}
    return description.model_copy(update={"files": files}), day_rows


def _days(path: Path) -> list[str]:
    parts = defaultdict(set)
    for file in path.iterdir():
        if match := _FILE.fullmatch(file.name):
            parts[match[1]].add(match[2])
    if not parts:
        raise DataError(f"{path}: no day_0_dense.npy, no train_dense.npy. Give the directory TorchRec's scripts wrote.")
    numbers = [int(day.removeprefix("day_")) for day in parts if day.startswith("day_")]
    days = [f"day_{number}" for number in range(max(numbers) + 1)] if numbers else sorted(parts, reverse=True)
    problems = [f"{day}: no files; days are numbered from 0 without gaps" for day in days if day not in parts]
    problems += [f"{day}: its files do not go with those of {days[0]}" for day in parts if day not in days]
    for day in days:
        kinds = [f"{day}_{kind}" for kind in (_ONE_HOT, _MULTI_HOT, _NOT_RENAMED) if kind in parts[day]]
        if len(kinds) > 1:
            problems.append(f"{day}: which are its ids, {' or '.join(kinds)}? Keep one of them here")
    _raise_if_any(path, problems)
    return days


def _checked_shapes(path: Path, days: list[str], sparse: str) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(day, part) -> (rows, columns) of its arrays: as many rows as labels, and the columns of the first day."""
    problems: list[str] = []
    parts = (_LABELS, _DENSE, sparse)
    shapes = {(day, part): _shapes(path / f"{day}_{part}", _DTYPES[part], problems) for day in days for part in parts}
    _raise_if_any(path, problems)
    for day, part in shapes:
        rows = shapes[day, _LABELS][0][0]
        expected = [(rows, 1 if part == _LABELS else columns) for _, columns in shapes[days[0], part]]
        if shapes[day, part] != expected:
            found, wanted = (" ".join(str(list(shape)) for shape in which) for which in (shapes[day, part], expected))
            problems.append(f"{day}_{part}: {found}, expected {wanted}, as its labels and {days[0]} have it")
    _raise_if_any(path, problems)
    return shapes


def _shapes(file: Path, dtypes: list[str], problems: list[str]) -> list[tuple[int, int]]:
    """(rows, columns) of the array in an npy file, or of each one in an npz."""
    try:
        arrays = _npz(file) if file.suffix == ".npz" else [np.load(file, mmap_mode="r", allow_pickle=False)]
    except FileNotFoundError:
        other = file.with_name(file.name.replace(_ONE_HOT, _NOT_RENAMED))
        problems.append(f"{file.name}: missing" + (f"; rename {other.name} to it" if other.exists() else ""))
        return []
    except (DataError, ValueError, EOFError, IndexError, KeyError, zipfile.BadZipFile) as error:
        problems.append(f"{file.name}: not a whole NumPy file ({error})")
        return []
    for array in arrays:
        if array.ndim != 2 or not array.size or not array.flags.c_contiguous or str(array.dtype) not in dtypes:
            expected = f"{' or '.join(dtypes)} [rows, columns], row by row"
            problems.append(f"{file.name}: {array.dtype} {list(array.shape)}, expected {expected}")
    return [array.shape for array in arrays]


def _npz(file: Path) -> list[np.ndarray]:
    shapes = []
    with zipfile.ZipFile(file) as archive:
        for index in range(len(archive.namelist())):
            with archive.open(f"{index}.npy") as member:
                npy_format.read_magic(member)
                shapes.append(npy_format.read_array_header_1_0(member)[0])
    return npz_arrays(file, [shape[1] for shape in shapes], shapes[0][0])


def _splits(path: Path, day_rows: dict[str, int], options: Options) -> dict[str, list[RowRange]]:
    """Labelled rows are numbered through over their days; the last of them are for validation and test."""
    problems: list[str] = []
    labelled = {day: rows for day, rows in day_rows.items() if _has_labels(path / f"{day}_{_LABELS}", problems)}
    unlabelled = {day: rows for day, rows in day_rows.items() if day not in labelled}
    if not labelled:
        problems.append("no labels but -1: there is nothing to train on")
    _raise_if_any(path, problems)
    splits = split_rows(labelled, *_last_day(len(labelled), options))
    splits["unlabelled"] = [RowRange(day=day, start=0, stop=rows) for day, rows in unlabelled.items()]
    if not all(splits[split] for split in SPLITS) and (options.last_day != "none" or options.val_fraction):
        fact = f"{sum(labelled.values()):,} labelled rows are too few for all of train, val and test"
        raise DataError(f"{path}: {fact}. Use --last-day none, or more rows.")
    return {split: ranges for split, ranges in splits.items() if ranges}


def _has_labels(file: Path, problems: list[str]) -> bool:
    labels = np.load(file, mmap_mode="r")[:, 0]
    is_bad = (labels != 0) & (labels != 1)
    if is_bad.any() and not (labels == -1).all():
        row = int(np.argmax(is_bad))
        problems.append(f"{file.name}: row {row:,}: label {labels[row]} is neither 0 nor 1 (nor are all of them -1)")
    return not is_bad.all()


def _last_day(num_days: int, options: Options) -> tuple[str, float]:
    if options.last_day == "none":
        return "none", options.val_fraction or 0.0
    if num_days == 1:
        return "none", options.val_fraction or VAL_FRACTION
    if options.val_fraction is not None:
        fact = f"--val-fraction {options.val_fraction}: of {num_days} days the last one is for val and test"
        raise ConfigError(f"{fact}. Leave it out, or say --last-day none as well: then it is a share of all rows.")
    return options.last_day, 0.0


def _largest_ids(dataset: Dataset, days: list[str], progress: Progress) -> np.ndarray:
    """int64, one per table; every value is checked on the way."""
    description = dataset.description
    assert isinstance(description, ClicksDescription)
    largest = np.zeros(len(id_limits(description)), dtype=np.int64)
    bad: dict[str, str] = {}
    for day in days:
        for start, rows in StoredDay(dataset, day).blocks():
            for file, problem in _bad_values(description, day, start, rows):
                bad.setdefault(file, problem)  # the first of each file is enough
            np.maximum(largest, rows.ids.max(axis=0), out=largest)
            progress.advance(len(rows))
    _raise_if_any(dataset.path, list(bad.values()))
    first_columns = np.cumsum([0, *description.multi_hot[:-1]]) if description.multi_hot else np.arange(len(largest))
    return np.maximum.reduceat(largest, first_columns)


def _bad_values(description: ClicksDescription, day: str, start: int, rows: ClickRows) -> Iterator[tuple[str, str]]:
    """(file, problem)."""
    if not np.isfinite(rows.dense).all():
        file, (row, column) = f"{day}_{_DENSE}", np.argwhere(~np.isfinite(rows.dense))[0]
        place = f"{file}: row {start + row:,}, column {description.dense[column]}"
        yield file, f"{place}: {rows.dense[row, column]} is not a finite number"
    if bad := first_bad_id(rows.ids, id_limits(description)):
        file, feature, value = description.sparse_file(day), feature_of_column(description, bad[1]), int(rows.ids[bad])
        place = f"{file}: row {start + bad[0]:,}, column {feature.name}"
        is_negative = f"{place}: id {value} is negative; was a hash cut to int32?"
        is_large = f"{bad_id_text(file, start + bad[0], feature, value)}; give a larger --table-size"
        yield file, is_negative if value < 0 else is_large
