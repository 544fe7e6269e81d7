"""Writing prepared datasets: a dataset appears complete or not at all, and `dataset.json` is written last."""

import io
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.lib import format as npy_format

from recmill import __version__
from recmill.config import flat
from recmill.data.opening import open_dataset
from recmill.errors import DataError, ResourceError, as_user_error
from recmill.failpoints import reach
from recmill.files.atomic import remove_leftovers, replace_directory, write_json, write_text
from recmill.files.digests import digest
from recmill.files.locks import exclusive_lock
from recmill.observe.progress import human_bytes
from recmill.schema import DESCRIPTION_FILE, Description, FileInfo, to_json

if TYPE_CHECKING:
    import polars as pl

log = logging.getLogger(__name__)

MADE_BY = f"recmill {__version__}"
PREPARATION_FILE = "preparation.json"  # how long it took; not part of the dataset's fingerprint
_ORIGIN_FILE = "recipe.json"  # in a directory of unfinished work: version, recipe and inputs
_MAX_CHANGES = 10  # lines of a message
_REMEDY = "Choose another --output, or move it away."
ADOPTED = "adopted"  # the name of a dataset whose files a user made: `recmill adopt` wrote only its description


def needs_writing(output: Path, name: str, recipe: dict[str, Any], overwrite: bool) -> bool:
    """Return False if `output` already holds exactly this dataset; raise if writing would destroy anything else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return True
    if not (output / DESCRIPTION_FILE).is_file():
        raise DataError(f"{output} exists and is not a prepared dataset. {_REMEDY}")
    if overwrite:
        _check_only_our_files(output)
        return True
    description = open_dataset(output).description
    if (
        description.name in (name, name.rpartition(".")[2])
        and description.recipe == recipe
        and description.made_by == MADE_BY
    ):
        return False
    changes = recipe_changes(description, name, recipe)
    raise DataError(
        f"{output} holds another dataset:\n{changes}Choose another --output, or replace it with --overwrite."
    )


def recipe_changes(description: Description, name: str, recipe: dict[str, Any]) -> str:
    """Describe how a dataset `name` made by this version with this recipe differs from `description`, in lines."""
    old = {"dataset": description.name, "made by": description.made_by, **description.recipe}
    return _changes(old, {"dataset": name, "made by": MADE_BY, **recipe})


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    def by_key(values: dict[str, Any]) -> dict[str, Any]:
        files = {f"file {file}": facts for file, facts in values.get("files", {}).items()}
        return flat({key: _by_name(value) for key, value in values.items() if key != "files"}) | files

    old, new = by_key(old), by_key(new)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    files = [[key for key in changed if key.startswith("file ") and key not in other] for other in (new, old)]
    lines = []
    if all(files):  # other files: their sizes and digests say nothing
        was, now = (", ".join(key.removeprefix("file ") for key in names[:_MAX_CHANGES]) for names in files)
        lines.append(f"  it was made from {was}, and now from {now}\n")
        changed = [key for key in changed if (key in old and key in new) or not key.startswith("file ")]
    lines += [f"  {key}: was {old.get(key)}, is {new.get(key)}\n" for key in changed]
    rest = [f"  and {len(lines) - _MAX_CHANGES:,} more\n"] if len(lines) > _MAX_CHANGES else []
    return "".join([*lines[:_MAX_CHANGES], *rest])


def _by_name(value: Any) -> Any:
    """Return mappings in which a list of named things, like the features of a schema, is a mapping by their names."""
    if isinstance(value, dict):
        return {key: _by_name(part) for key, part in value.items()}
    if isinstance(value, list) and value and all(isinstance(part, dict) and "name" in part for part in value):
        return {part["name"]: part for part in value}
    return value


def _check_only_our_files(output: Path) -> None:
    """Raise if `output` holds anything but a prepared dataset, corrupt or not: --overwrite would destroy it."""
    try:
        description = json.loads((output / DESCRIPTION_FILE).read_bytes())
        listed = {*description["files"], DESCRIPTION_FILE, PREPARATION_FILE}
        is_ours = description["made_by"].startswith("recmill ") and description["name"] != ADOPTED
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise DataError(f"{output} holds files that recmill did not write. {_REMEDY}")
    if foreign := sorted(path.name for path in output.iterdir() if path.name not in listed):
        raise DataError(f"{output} holds {foreign[0]}, which is not part of a prepared dataset. {_REMEDY}")


class Work:
    """A preparation that may be interrupted and run again: `data` becomes the dataset, `scratch` is removed at the end.

    Long work is done in named parts. A part's note is written when it is complete, and the part is not done again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.scratch = directory / "scratch"
        self._phases: dict[str, tuple[float, float]] = {}  # when their parts began and ended
        self.data.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)

    def give_up(self) -> None:
        """Let the next call start over, because this work cannot be completed with its inputs or options."""
        (self.directory / _ORIGIN_FILE).unlink(missing_ok=True)

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, as JSON values; if this part was completed before, what it returned then."""
        if not self.is_done(name):
            started = time.monotonic()
            made = make()
            reach("prepare.part")
            write_json(self._note(name), made)
            phase = name.partition("-")[0]
            self._phases[phase] = min(started, self._phases.get(phase, (started, 0.0))[0]), time.monotonic()
        return json.loads(self._note(name).read_bytes())

    def is_done(self, name: str) -> bool:
        return self._note(name).is_file()

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took: parts like read-day_0 and read-day_1 are of one, and may be done in parallel."""
        return {phase: end - start for phase, (start, end) in self._phases.items()}

    def _note(self, name: str) -> Path:
        return self.directory / f"done-{name}.json"


def check_disk(work: Work, needed: int, rows: int) -> None:
    """Raise if the disk has less free space than the `needed` bytes, at the peak, of preparing `rows` rows."""
    free = shutil.disk_usage(work.directory).free
    missing = needed - sum(path.stat().st_size for path in work.directory.rglob("*") if path.is_file())
    if missing > free:
        raise ResourceError(
            f"{work.directory.parent}: about {missing:,} bytes of disk are needed for {rows:,} rows, {free:,} are "
            "free. Choose another disk for --output, or free some space."
        )
    log.info("about %s rows; at most %s of disk, %s are free", f"{rows:,}", human_bytes(needed), human_bytes(free))


@contextmanager
def resumable_directory(output: Path, recipe: dict[str, Any], inputs: dict[str, Any], discard: bool) -> Iterator[Work]:
    """Yield the work on `output`, new or resumed; its data replaces `output` if the block succeeds.

    Otherwise completed parts are kept for the next run, which must have the same recipe and inputs. They are removed
    after a DataError, because the input has to change first, and if `discard` says to start over.
    """
    remedy = "Wait for that `recmill prepare` to end, or choose another --output."
    with resumable_work(output, recipe, inputs, "always" if discard else "never", remedy) as work:
        reach("prepare.begin")
        yield work
        replace_directory(output, work.data)


@contextmanager
def resumable_work(
    output: Path,
    recipe: dict[str, Any],
    inputs: dict[str, Any],
    discard: Literal["always", "changed", "never"],
    remedy: str,
) -> Iterator[Work]:
    """Yield the work on `output`, new or resumed. If the block leaves no `data` behind, the work is finished.

    `discard`: when to start over; with "never", work with another recipe or other inputs is an error.
    """
    directory = _unfinished(output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output)
    except OSError as error:
        raise as_user_error(error) or error from error
    with exclusive_lock(directory / "lock", remedy):
        _resume_or_start_over(directory, {"made_by": MADE_BY, "recipe": recipe, "inputs": inputs}, discard)
        work = Work(directory)
        try:
            yield work
        except DataError:
            work.give_up()
            raise
        except OSError as error:
            error.filename = error.filename or str(output)  # a failing write() does not name its file
            raise
        finally:
            if not _is_resumable(directory):
                shutil.rmtree(directory, ignore_errors=True)


def remove_finished_work(output: Path) -> None:
    """Remove what a run left beside `output` if it was killed after the last rename; keep work that can be resumed."""
    directory = _unfinished(output)
    with suppress(OSError, ResourceError):  # in use, or read-only: nothing depends on it
        remove_leftovers(output)
        if directory.is_dir():
            with exclusive_lock(directory / "lock", ""):
                if not _is_resumable(directory):
                    shutil.rmtree(directory)


def _unfinished(output: Path) -> Path:
    return output.parent / f".{output.name}.unfinished"


def _is_resumable(directory: Path) -> bool:
    has_data = (directory / _ORIGIN_FILE).is_file() and (directory / "data").is_dir()
    return has_data and any(directory.glob("done-*.json"))


def _resume_or_start_over(
    directory: Path, origin: dict[str, Any], discard: Literal["always", "changed", "never"]
) -> None:
    """Keep the completed parts of a run of the same origin, raise if they have another; remove anything else."""
    if _is_resumable(directory) and discard != "always":
        changes = _origin_changes(directory, origin)
        if not changes:
            log.info("resuming the unfinished work in %s", directory)
            return
        if discard == "never":
            raise DataError(
                f"{directory} holds unfinished work of another run:\n{changes}"
                "Run it with the options and files of that run to resume, or start over with --overwrite."
            )
    (directory / _ORIGIN_FILE).unlink(missing_ok=True)  # first: what is half removed cannot be resumed
    for left in directory.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != "lock":
            left.unlink()
    write_json(directory / _ORIGIN_FILE, origin)


def _origin_changes(directory: Path, origin: dict[str, Any]) -> str:
    def flat(origin: dict[str, Any]) -> dict[str, Any]:
        inputs = {f"input {name}": facts for name, facts in origin["inputs"].items()}
        return {"made by": origin["made_by"], **origin["recipe"], **inputs}

    old = flat(json.loads((directory / _ORIGIN_FILE).read_bytes()))
    return _changes(old, flat(json.loads(json.dumps(origin))))


class NpyWriter(AbstractContextManager["NpyWriter"]):
    """Writes a .npy file in blocks of rows. Their number may be None: it is written into the header at the end.

    It uses plain writes because, on a full disk, a memory-mapped file ends the process with SIGBUS and numpy's own
    save raises an error without errno.
    """

    def __init__(self, path: Path, dtype: type, shape: tuple[int | None, *tuple[int, ...]]) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self._rows = 0
        self._write_header(shape[0] or 0)

    def _write_header(self, rows: int) -> None:  # of the same length for any number of rows
        shape = (rows, *self._shape[1:])
        header = {"descr": npy_format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(self._file, header)

    def append(self, rows: np.ndarray) -> None:
        self._rows += len(rows)
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._shape[0] is None:
            self._file.seek(0)
            self._write_header(self._rows)
        self._file.close()
        assert kind or self._shape[0] in (None, self._rows), f"{self._file.name}: {self._rows} rows, not {self._shape}"


def write_npy(path: Path, values: np.ndarray, dtype: type) -> None:
    with NpyWriter(path, dtype, values.shape) as file:
        file.append(values)


def write_parquet(
    path: Path,
    frame: "pl.DataFrame",
    row_group_size: int = 1 << 18,
    compression: Literal["zstd", "uncompressed"] = "zstd",
) -> None:
    """Write `frame` through a buffer in memory: Polars itself would report a full disk as a format error.

    Row groups have a fixed size, because those that Polars chooses depend on the number of cores.
    """
    buffer = io.BytesIO()
    frame.write_parquet(buffer, row_group_size=row_group_size, compression=compression)
    path.write_bytes(buffer.getbuffer())


def seal(directory: Path, describe: Callable[[dict[str, FileInfo]], Description], rows: dict[str, int]) -> Description:
    """Digest every file of `rows` (name -> number of rows) and write the description that `describe` makes of them."""
    reach("prepare.written")
    files = {
        name: FileInfo(bytes=(directory / name).stat().st_size, rows=rows[name], xxh3=digest(directory / name))
        for name in sorted(rows)
    }
    description = describe(files)
    write_text(directory / DESCRIPTION_FILE, to_json(description))
    return description
