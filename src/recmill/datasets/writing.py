"""Writing prepared datasets: all or nothing, `dataset.json` last."""

import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.lib import format as npy_format

from recmill import __version__
from recmill.data.opening import open_dataset
from recmill.errors import DataError, ResourceError, as_user_error
from recmill.failpoints import reach
from recmill.files.atomic import remove_leftovers, replace_directory, write_json, write_text
from recmill.files.digests import digest
from recmill.files.locks import exclusive_lock
from recmill.schema import DESCRIPTION_FILE, Description, FileInfo, to_json

if TYPE_CHECKING:
    import polars as pl

log = logging.getLogger(__name__)

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
    description = open_dataset(output).description
    if description.name == name and description.recipe == recipe and description.made_by == MADE_BY:
        return False
    raise DataError(
        f"{output} holds another dataset ({description.name}, {description.recipe}, {description.made_by}). "
        "Choose another --output, or replace it with --overwrite."
    )


def _check_is_ours(output: Path) -> None:
    """Whole or damaged, it must be a prepared dataset and nothing else, or --overwrite would destroy it."""
    try:
        description = json.loads((output / DESCRIPTION_FILE).read_bytes())
        listed = {*description["files"], DESCRIPTION_FILE}
        is_ours = description["made_by"].startswith("recmill ")
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


class Work:
    """A long preparation that can be killed and run again: `data` becomes the dataset, `scratch` vanishes at the end.

    What is done is done in named parts; the note of a part is written when it is whole.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.data, self.scratch = directory, directory / "data", directory / "scratch"
        self.data.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned (JSON) when this part was finished; it is called now if it never was."""
        note = self.directory / f"done-{name}.json"
        if not note.is_file():
            write_json(note, make())
        return json.loads(note.read_bytes())

    def is_done(self, name: str) -> bool:
        return (self.directory / f"done-{name}.json").is_file()

    def bytes_written(self) -> int:
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


def check_disk(work: Work, needed: int, rows: int) -> None:
    """An error before any work if the bytes that so many rows need at the worst moment are not free."""
    free = shutil.disk_usage(work.directory).free
    missing = needed - work.bytes_written()
    if missing > free:
        raise ResourceError(
            f"{work.directory.parent}: about {missing:,} bytes of disk are needed for {rows:,} rows, {free:,} are "
            "free. Choose another disk for --output, or free some space."
        )
    log.info("about %s rows; at most %.1f GB of disk, %.1f GB are free", f"{rows:,}", needed / 1e9, free / 1e9)


def unfinished_directory(output: Path) -> Path:
    return output.parent / f".{output.name}.unfinished"


@contextmanager
def resumable_directory(output: Path, recipe: dict[str, Any], inputs: dict[str, Any], discard: bool) -> Iterator[Work]:
    """The work on `output`, begun or continued. It takes its place when the block ends well.

    Otherwise what is finished is kept for the next run, which must have the same recipe and the same inputs; after an
    error in the data it is not, since the data will have to change. `discard`: begin anew.
    """
    directory = unfinished_directory(output)

    def busy(holder: str) -> str:
        return f"{directory}: another `recmill prepare` ({holder}) works here. Wait for it, or choose another --output."

    try:
        if discard and directory.exists():
            with exclusive_lock(directory / "lock", busy):
                shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output)
    except OSError as error:
        raise as_user_error(error) or error from error
    with exclusive_lock(directory / "lock", busy):
        note = directory / "recipe.json"
        if note.is_file() and not (directory / "data").is_dir():  # left by a run that was killed at its very end
            for left in directory.glob("done-*.json"):
                left.unlink()
        now = json.loads(json.dumps({"made_by": MADE_BY, "recipe": recipe, "inputs": inputs}))
        if note.is_file():
            _check_unchanged(directory, json.loads(note.read_bytes()), now)
            log.info("going on with the unfinished work in %s", directory)
        else:
            write_json(note, now)
        try:
            work = Work(directory)
            reach("prepare.begin")
            yield work
            replace_directory(output, work.data)
        except BaseException as error:
            if isinstance(error, DataError) or not any(directory.glob("done-*.json")):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


def _check_unchanged(directory: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    def flat(values: dict[str, Any]) -> dict[str, Any]:
        return {
            "made by": values["made_by"],
            **values["recipe"],
            **{f"input {k}": v for k, v in values["inputs"].items()},
        }

    old, new = flat(before), flat(now)
    changes = [f"{k}: was {old.get(k)}, is {new.get(k)}" for k in {**old, **new} if old.get(k) != new.get(k)]
    if changes:
        raise DataError(
            f"{directory} holds unfinished work of another run:\n"
            + "\n".join(f"  {change}" for change in changes)
            + "\nRun it as before to go on with it, or begin anew with --overwrite."
        )


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


def write_parquet(
    path: Path,
    frame: "pl.DataFrame",
    row_group_size: int | None = None,
    compression: Literal["zstd", "uncompressed"] = "zstd",
) -> None:
    """By way of memory: Polars would report a full disk as an error of the format."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, row_group_size=row_group_size, compression=compression)
    path.write_bytes(buffer.getbuffer())


def seal(directory: Path, describe: Callable[[dict[str, FileInfo]], Description], rows: dict[str, int]) -> Description:
    """Digest every file and write the description; `rows` gives the row count of each file."""
    reach("prepare.written")
    files = {}
    for name in sorted(rows):
        file = directory / name
        files[name] = FileInfo(bytes=file.stat().st_size, rows=rows[name], xxh3=digest(file))
    description = describe(files)
    write_text(directory / DESCRIPTION_FILE, to_json(description))
    return description
