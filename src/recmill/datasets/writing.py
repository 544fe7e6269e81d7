"""Writing prepared datasets: all or nothing, `dataset.json` last."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.lib import format as npy_format

from recmill import __version__
from recmill.errors import DataError, as_user_error
from recmill.schema import DESCRIPTION_FILE, Description, FileInfo, digest, open_dataset, to_json

MADE_BY = f"recmill {__version__}"

Progress = Callable[[int, int], None]  # rows done, rows in all


def is_to_be_written(output: Path, name: str, recipe: dict[str, Any], overwrite: bool) -> bool:
    """False if `output` holds exactly this dataset already; an error if writing would destroy anything else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return True
    if not (output / DESCRIPTION_FILE).is_file():
        raise DataError(f"{output} exists and is not a prepared dataset. Choose another --output, or move it away.")
    if overwrite:
        _check_is_ours(output)
        return True
    about = open_dataset(output).about
    if about.name == name and about.recipe == recipe and about.made_by == MADE_BY:
        return False
    raise DataError(
        f"{output} holds another dataset ({about.name}, {about.recipe}, {about.made_by}). "
        "Choose another --output, or replace it with --overwrite."
    )


def _check_is_ours(output: Path) -> None:
    """Whole or damaged, it must be a prepared dataset and nothing else, or --overwrite would destroy it."""
    try:
        about = json.loads((output / DESCRIPTION_FILE).read_bytes())
        listed = {*about["files"], DESCRIPTION_FILE}
        is_ours = about["made_by"].startswith("recmill ")
    except (ValueError, KeyError, TypeError, AttributeError):
        listed, is_ours = set(), False
    foreign = sorted(path.name for path in output.iterdir() if path.name not in listed)
    if not is_ours or foreign:
        fact = (
            f"{output} holds {foreign[0]}, which is no part of a prepared dataset"
            if is_ours
            else f"{output} is not ours"
        )
        raise DataError(f"{fact}. Choose another --output, or move it away.")


def _remove_leftovers(output: Path) -> None:
    """Of a `prepare` that was killed: its process is gone."""
    for left in output.parent.glob(f".{output.name}.partial-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def dataset_directory(output: Path) -> Iterator[Path]:
    """A new directory beside `output` that takes its place when the block ends well, and vanishes otherwise."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.parent / f".{output.name}.partial-{os.getpid()}"
        _remove_leftovers(output)
        partial.mkdir()
    except OSError as error:
        raise as_user_error(error) or error from error
    try:
        yield partial
        _replace(output, partial)
    except OSError as error:
        error.filename = error.filename or str(output)  # a failing write() does not say where
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(output: Path, partial: Path) -> None:
    old = output.parent / f".{output.name}.old-{os.getpid()}"
    if output.exists():
        os.rename(output, old)
    os.rename(partial, output)
    shutil.rmtree(old, ignore_errors=True)


class NpyWriter:
    """A .npy file of known shape, written row block by row block.

    Plain writes: a memory-mapped file on a full disk ends the process with SIGBUS, numpy's own save with an error
    that has no number.
    """

    def __init__(self, path: Path, dtype: type, shape: tuple[int, ...]) -> None:
        self._file = path.open("wb")
        self._dtype, self._missing = np.dtype(dtype), shape[0]
        header = {"descr": npy_format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(self._file, header)

    def append(self, rows: np.ndarray) -> None:
        self._missing -= len(rows)
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        assert kind or self._missing == 0, f"{self._file.name}: {self._missing} rows missing"


def write_npy(path: Path, values: np.ndarray, dtype: type) -> None:
    with NpyWriter(path, dtype, values.shape) as file:
        file.append(values)


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """By way of memory: Polars would report a full disk as an error of the format."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    path.write_bytes(buffer.getbuffer())


def seal(directory: Path, describe: Callable[[dict[str, FileInfo]], Description], rows: dict[str, int]) -> Description:
    """Digest every file and write the description; `rows` gives the row count of each file."""
    files = {}
    for name in sorted(rows):
        file = directory / name
        files[name] = FileInfo(bytes=file.stat().st_size, rows=rows[name], xxh3=digest(file))
    about = describe(files)
    temporary = directory / f"{DESCRIPTION_FILE}.tmp"
    temporary.write_text(to_json(about), encoding="utf-8")
    os.replace(temporary, directory / DESCRIPTION_FILE)
    return about
