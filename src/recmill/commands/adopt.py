"""`recmill adopt`: make a prepared dataset of TorchRec's or MLPerf's npy or bin files by adding a `dataset.json`."""

import hashlib
import logging
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from pydantic import PositiveInt

from recmill.commands.keywords import checked_keywords
from recmill.config.options import checked_options, given_path
from recmill.config.sections import Section, key
from recmill.data.checks import BadValues, ClickChecks, bad_labels
from recmill.data.click_rows import split_blocks
from recmill.data.npy_files import npy_array, npz_arrays
from recmill.data.opening import open_dataset
from recmill.datasets.clicks import VAL_FRACTION, dense_names, held_out, sparse_names, split_rows
from recmill.datasets.criteo.checksums import published_md5s
from recmill.datasets.criteo.options import CRITEO
from recmill.datasets.writing import ADOPTED, MADE_BY, recipe_changes, seal
from recmill.errors import ConfigError, DataError, ResourceError, did_you_mean_path
from recmill.hardware.cpu import num_cores
from recmill.observe.printed import Printed, print_dataset
from recmill.observe.progress import Progress
from recmill.schema import (
    DESCRIPTION_FILE,
    RECORDS,
    UNLABELLED,
    ClicksDescription,
    Dataset,
    FileInfo,
    RowRange,
    SparseFeature,
)

log = logging.getLogger(__name__)

_DENSE = "dense.npy"
_LABELS = "labels.npy"
_ONE_HOT = "sparse.npy"
_MULTI_HOT = "sparse_multi_hot.npz"
_NOT_RENAMED = "sparse_contig_freq.npy"  # output of TorchRec's contiguous_preproc_criteo.py, to be renamed by the user
_DTYPES = {_DENSE: ["float32"], _LABELS: ["int32"], _ONE_HOT: ["int32", "int64"], _MULTI_HOT: ["int32", "int64"]}
_FILE = re.compile(rf"(day_\d+|train|test)_({'|'.join(map(re.escape, [*_DTYPES, _NOT_RENAMED]))})")
_RECORD_FILES = {"train": "train", "val": "validation", "test": "test"}  # by split; the layout is Criteo's alone
_RECORD_NAMES = {f"{day}{RECORDS}" for day in _RECORD_FILES.values()}
_UNKNOWN_SIZE = 2**63 - 1  # of a table, until all ids were read


class Options(Section):
    last_day: Literal["val-first", "test-first", "none"] | None = key(
        None, "Which half of the last day is for validation (default: val-first). none: train on all."
    )
    val_fraction: float | None = key(
        None,
        f"Share of the rows for val, and the same for test (default for a single day: {VAL_FRACTION}).",
        gt=0.0,
        lt=0.5,
    )
    table_size: list[PositiveInt] | None = key(
        None, "Rows of all tables, or of each one, like 10,1000 (default: the largest id + 1).", min_length=1
    )
    dense_transform: str | None = key(
        None, "How the dense values were made, like 'log(x+3)'; kept as a note in dataset.json."
    )
    verify_mlperf: bool = key(
        False, "Check that these are the files of MLPerf's DLRMv2, all 24 days, by their published MD5s."
    )
    modulo: bool = key(False, "Take ids modulo --table-size when they are read, as TorchRec's loader does.")
    output: str | None = key(
        None, "Write dataset.json to this directory, with links to the files, and not beside them."
    )

    @property
    def recipe(self) -> dict[str, Any]:
        is_no_recipe = {"verify_mlperf", "output"} | ({"modulo"} if not self.modulo else set())
        return {**self.model_dump(exclude=is_no_recipe), "last_day": self.last_day or "val-first"}


class AdoptOptions(TypedDict, total=False):
    last_day: Literal["val-first", "test-first", "none"] | None
    val_fraction: float | None
    table_size: list[int] | None
    dense_transform: str | None
    verify_mlperf: bool
    modulo: bool
    output: str | None


@checked_keywords
def adopt(path: str | Path, **options: Unpack[AdoptOptions]) -> dict[str, Any]:
    """Describe the files in `path` and return the description. Only `dataset.json` is written, and links with `output`.

    Options are those of `recmill adopt --help`, with underscores: adopt("d", last_day="none", table_size=[1000]).
    """
    checked: Options = checked_options("adopt", Options, dict(options))
    path = given_path(path, "DIRECTORY")
    if not path.is_dir():
        near = did_you_mean_path(path)
        raise DataError(f"{path}: no such directory. {near}Give the one that holds day_0_dense.npy or train_data.bin.")
    if checked.modulo and checked.table_size is None:
        raise ConfigError("--modulo needs --table-size: ids are taken modulo it.")
    if checked.output is not None:
        path = _linked(path, given_path(checked.output, "--output"))
    is_adopted = _is_adopted(path, checked)
    if checked.verify_mlperf:
        _check_mlperf(path)
    if is_adopted:
        log.info("%s is already adopted: nothing to do", path)
    else:
        _write_description(path, checked)
        log.info("adopted %s", path)
    return Printed(open_dataset(path).description.model_dump(mode="json"), print_dataset)


def _linked(path: Path, output: Path) -> Path:
    """Return `output`, a directory with links to the files in `path`."""
    _days(path)  # raises an error that names `path`
    output.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        link = output / file.name
        if not _FILE.fullmatch(file.name) and file.name not in _RECORD_NAMES:
            continue
        if not os.path.lexists(link):
            link.symlink_to(file.absolute())
        elif link.resolve() != file.resolve():
            raise DataError(f"{link} exists, and is not a link to {file}. Choose another --output.")
    return output


def _is_adopted(path: Path, options: Options) -> bool:
    file = path / DESCRIPTION_FILE
    if not file.exists():
        if not os.access(path, os.W_OK):  # found now rather than after hours of reading
            raise ResourceError(f"{path}: no permission to write {DESCRIPTION_FILE}. Change that, or adopt a copy.")
        return False
    try:
        description = open_dataset(path).description
        if description.name == ADOPTED and description.recipe == options.recipe:
            open_dataset(path, verify="digests")
            return True
    except DataError as error:
        raise DataError(f"{error}\nIf the files are correct, remove {file} and adopt them again.") from None
    changes = recipe_changes(description, ADOPTED, options.recipe)
    raise DataError(f"{file} exists already:\n{changes}Remove it to adopt the files beside it with other options.")


def _check_mlperf(path: Path) -> None:
    """Raise unless `path` holds every file of MLPerf's dataset, with one-hot or multi-hot ids, and each is the same."""
    days = _days(path)
    sparse = _MULTI_HOT if any((path / f"{day}_{_MULTI_HOT}").exists() for day in days) else _ONE_HOT
    md5s = {
        file: md5 for file, md5 in published_md5s("mlperf_v2").items() if file.endswith((_DENSE, _LABELS, f"_{sparse}"))
    }
    problems = [f"{day}: not one of MLPerf's days" for day in days if f"{day}_{_DENSE}" not in md5s]
    problems += [f"{file}: missing" for file in md5s if not (path / file).is_file()]
    _raise_if_any(path, problems)
    size = sum((path / file).stat().st_size for file in md5s)
    with Progress(f"checking MD5s in {path}", size, "bytes") as progress, ThreadPoolExecutor(num_cores()) as threads:

        def found(name: str) -> str:
            with (path / name).open("rb") as file:
                md5 = hashlib.file_digest(file, "md5").hexdigest()
            progress.advance((path / name).stat().st_size)
            return md5

        results = dict(zip(md5s, threads.map(found, md5s), strict=True))
    _raise_if_any(path, [f"{f}: md5 {m}, MLPerf's is {md5s[f]}" for f, m in results.items() if m != md5s[f]])
    log.info("the MD5s of all %d files are those that MLPerf published", len(md5s))


def _write_description(path: Path, options: Options) -> None:
    """Check names, headers and labels first: their problems should not show up after hours of reading."""
    description = _describe_headers(path, options)
    largest_ids = _largest_ids(Dataset(path, description, fingerprint=""))
    notes = [f"dense values: {options.dense_transform or 'transformed elsewhere; nobody told how'}"]
    for part in description.splits.get(UNLABELLED, []):
        notes.append(f"{part.day}: all labels are -1, so it is split unlabelled")
    if options.verify_mlperf:
        notes.append("the MD5s of all files are those that MLPerf published")
    update: dict[str, Any] = {"notes": notes}
    if options.table_size is None:
        update["sparse"] = _features(largest_ids + 1)
        notes.append("table sizes: the largest id + 1 of each column")
    log.info("all values are valid; reading the files again for their digests")
    rows = {name: info.rows for name, info in description.files.items()}
    seal(path, lambda files: description.model_copy(update={**update, "files": files}), rows)


def _raise_if_any(path: Path, problems: list[str]) -> None:
    if problems:
        remedy = "Write these files again, or move away those that do not belong here; then run the same command again."
        raise DataError(f"{path} cannot be adopted:\n" + "\n".join(f"  {p}" for p in problems) + f"\n{remedy}")


def _features(sizes: np.ndarray) -> list[SparseFeature]:
    names = sparse_names(len(sizes))
    return [SparseFeature(name=name, rows=rows) for name, rows in zip(names, sizes.tolist(), strict=True)]


def _given_features(num_tables: int, options: Options) -> list[SparseFeature]:
    """Return the features with the sizes of their tables, unless these are not known yet."""
    sizes = options.table_size or [_UNKNOWN_SIZE]
    if len(sizes) not in (1, num_tables):
        fact = f"{len(sizes)} sizes, {num_tables} columns of ids"
        raise ConfigError(f"--table-size: {fact}. Give one size for each column, or one for all.")
    return _features(np.broadcast_to(sizes, num_tables))


def _describe_headers(path: Path, options: Options) -> ClicksDescription:
    """Return a description without digests, notes and table sizes, unless options give them."""
    days = _days(path)
    if not days:
        return _describe_records(path, options)
    sparse = _MULTI_HOT if any((path / f"{day}_{_MULTI_HOT}").exists() for day in days) else _ONE_HOT
    shapes = _checked_shapes(path, days, sparse)
    day_rows = {day: shapes[day, _LABELS][0][0] for day in days}
    columns = [shape[1] for shape in shapes[days[0], sparse]]
    num_tables = len(columns) if sparse == _MULTI_HOT else columns[0]
    return ClicksDescription(
        name=ADOPTED,
        made_by=MADE_BY,
        recipe=options.recipe,
        files={f"{day}_{part}": FileInfo(bytes=0, rows=day_rows[day], xxh3="") for day, part in shapes},
        dense=dense_names(shapes[days[0], _DENSE][0][1]),
        sparse=_given_features(num_tables, options),
        multi_hot=columns if sparse == _MULTI_HOT else [],
        modulo=options.modulo or None,
        splits=_splits(path, day_rows, options),
    )


def _describe_records(path: Path, options: Options) -> ClicksDescription:
    if options.last_day or options.val_fraction:
        raise ConfigError(
            f"{path}: train, validation and test are separate files. Leave out --last-day, --val-fraction."
        )
    record_bytes = 4 * (1 + CRITEO.num_dense + CRITEO.num_sparse)
    found = {split: path / f"{day}{RECORDS}" for split, day in _RECORD_FILES.items()}
    file_bytes = {split: file.stat().st_size for split, file in found.items() if file.is_file()}
    problems = [
        f"{found[split].name}: {size:,} bytes, expected a multiple of {record_bytes}: a label, {CRITEO.num_dense} "
        f"dense values and {CRITEO.num_sparse} ids, of 4 bytes each"
        for split, size in file_bytes.items()
        if size % record_bytes or not size
    ]
    _raise_if_any(path, [*problems, *([] if "train" in file_bytes else [f"{found['train'].name}: missing"])])
    rows = {split: size // record_bytes for split, size in file_bytes.items()}
    return ClicksDescription(
        name=ADOPTED,
        made_by=MADE_BY,
        recipe=options.recipe,
        files={found[split].name: FileInfo(bytes=0, rows=count, xxh3="") for split, count in rows.items()},
        layout="bin",
        dense=dense_names(CRITEO.num_dense),
        sparse=_given_features(CRITEO.num_sparse, options),
        modulo=options.modulo or None,
        splits={split: [RowRange(day=_RECORD_FILES[split], start=0, stop=count)] for split, count in rows.items()},
    )


def _days(path: Path) -> list[str]:
    """Return the names of the days in order, or none for files of records; raise if files are missing or ambiguous."""
    parts = defaultdict(set)
    for file in path.iterdir():
        if match := _FILE.fullmatch(file.name):
            parts[match[1]].add(match[2])
    records = [name for day in _RECORD_FILES.values() if (path / (name := f"{day}{RECORDS}")).exists()]
    if records and not parts:
        return []
    if records:
        problem = f"{records[0]}: is it this, or {min(parts)}_{min(parts[min(parts)])}? Keep one kind of files here"
        _raise_if_any(path, [problem])
    if not parts:
        fact = f"{path}: no day_0_dense.npy, no train_dense.npy, no train_data.bin"
        raise DataError(f"{fact}. Give the directory that TorchRec's scripts wrote.")
    numbers = [int(day.removeprefix("day_")) for day in parts if day.startswith("day_")]
    days = [f"day_{number}" for number in range(max(numbers) + 1)] if numbers else sorted(parts, reverse=True)
    problems = [f"{day}: no files; days are numbered from 0 without gaps" for day in days if day not in parts]
    problems += [f"{day}: its files do not belong together with those of {days[0]}" for day in parts if day not in days]
    for day in days:
        kinds = [f"{day}_{kind}" for kind in (_ONE_HOT, _MULTI_HOT, _NOT_RENAMED) if kind in parts[day]]
        if len(kinds) > 1:
            problems.append(f"{day}: its ids are ambiguous, {' or '.join(kinds)}? Keep one of them here")
    _raise_if_any(path, problems)
    return days


def _checked_shapes(path: Path, days: list[str], sparse: str) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return (day, part) -> (rows, columns) of its arrays, which must agree with the labels and the first day."""
    problems: list[str] = []
    parts = (_LABELS, _DENSE, sparse)
    shapes = {(day, part): _shapes(path / f"{day}_{part}", _DTYPES[part], problems) for day in days for part in parts}
    _raise_if_any(path, problems)
    for day, part in shapes:
        rows = shapes[day, _LABELS][0][0]
        expected = [(rows, 1 if part == _LABELS else columns) for _, columns in shapes[days[0], part]]
        if shapes[day, part] != expected:
            found, wanted = (" ".join(str(list(shape)) for shape in which) for which in (shapes[day, part], expected))
            problems.append(f"{day}_{part}: {found}, expected {wanted}, to match its labels and {days[0]}")
    _raise_if_any(path, problems)
    return shapes


def _shapes(file: Path, dtypes: list[str], problems: list[str]) -> list[tuple[int, int]]:
    """Return (rows, columns) of the array in an npy file, or of each one in an npz file; add to `problems`."""
    try:
        if os.path.lexists(file) and not file.is_file():
            raise ValueError("not a regular file")
        arrays = npz_arrays(file) if file.suffix == ".npz" else [npy_array(file)]
    except FileNotFoundError:
        other = file.with_name(file.name.replace(_ONE_HOT, _NOT_RENAMED))
        problems.append(f"{file.name}: missing" + (f"; rename {other.name} to it" if other.exists() else ""))
        return []
    except (DataError, ValueError) as error:
        problems.append(f"{file.name}: not a complete NumPy file ({error})")
        return []
    for array in arrays:
        if array.ndim != 2 or not array.size or str(array.dtype) not in dtypes:
            expected = f"{' or '.join(dtypes)} [rows, columns]"
            problems.append(f"{file.name}: {array.dtype} {list(array.shape)}, expected {expected}")
        elif not array.flags.c_contiguous:
            remedy = "save np.ascontiguousarray(array) instead"
            problems.append(f"{file.name}: in Fortran order (column by column); {remedy}")
    return [array.shape for array in arrays]


def _splits(path: Path, day_rows: dict[str, int], options: Options) -> dict[str, list[RowRange]]:
    """Split the labelled days in their order: the last rows are for validation and test."""
    problems: list[str] = []
    labelled: dict[str, int] = {}
    unlabelled: list[RowRange] = []
    for day, rows in day_rows.items():
        file = f"{day}_{_LABELS}"
        labels = np.load(path / file, mmap_mode="r")[:, 0]
        if (labels == -1).all():
            unlabelled.append(RowRange(day=day, start=0, stop=rows))
            continue
        labelled[day] = rows
        if bad := bad_labels(labels, file, range(rows), "train"):
            problems.append(f"{bad} (nor are all of them -1)")
    if not labelled:
        problems.append("all labels are -1: there is nothing to train on")
    _raise_if_any(path, problems)
    splits = split_rows(labelled, *held_out(options.last_day, options.val_fraction, len(labelled)))
    if not all(splits.values()) and (options.last_day != "none" or options.val_fraction):
        fact = f"{sum(labelled.values()):,} labelled rows are too few for all of train, val and test"
        raise DataError(f"{path}: {fact}. Use --last-day none, or more rows.")
    splits[UNLABELLED] = unlabelled
    return {split: ranges for split, ranges in splits.items() if ranges}


def _largest_ids(dataset: Dataset) -> np.ndarray:
    """Check every value and return the largest id of each table, int64."""
    splits = dataset.clicks.splits
    ids_per_row = dataset.clicks.ids_per_row
    checks = ClickChecks(dataset.clicks)
    largest = np.zeros(sum(ids_per_row), dtype=np.int64)
    problems: dict[str, BadValues] = {}
    num_rows = sum(part.stop - part.start for part in chain(*splits.values()))
    with Progress(f"reading {dataset.path}", num_rows, "rows") as progress:
        for block in split_blocks(dataset, splits):
            for bad in checks.find(block):
                problems.setdefault(bad.file, bad)  # the first one of each file is enough
            np.maximum(largest, block.rows.ids.max(axis=0), out=largest)
            progress.advance(len(block.rows))
    if problems and all(bad.kind == "id" and bad.value >= 0 for bad in problems.values()):
        lines = "".join(f"\n  {bad}" for bad in problems.values())
        raise ConfigError(f"--table-size is too small:{lines}\nGive larger sizes, or leave it out: largest id + 1.")
    _raise_if_any(dataset.path, [_bad_text(bad) for bad in problems.values()])
    return np.maximum.reduceat(largest, np.cumsum([0, *ids_per_row[:-1]]))


def _bad_text(bad: BadValues) -> str:
    if bad.kind == "id" and bad.value < 0:
        return f"{bad.file}: {bad.where}: id {bad.value} is negative; was a hash truncated to int32?"
    return str(bad)
