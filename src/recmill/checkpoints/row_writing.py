"""Write a copy of a checkpoint in which rows of one table are replaced. The checkpoint itself stays as it is.

The copy has the files of the checkpoint, as hard links where the file system allows, and a row file more, which is read
last: with the new rows and, of a table that was saved as a tensor, all other rows of it. Only a few megabytes of rows
are in memory at a time, and some bytes for each new id.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recmill import rng
from recmill.checkpoints import format as on_disk
from recmill.checkpoints.format import Checkpoint, FileFacts, KeyList, RowFile, SavedTable, WrittenRows
from recmill.checkpoints.incremental import dense_pieces, pieces_of
from recmill.checkpoints.row_files import saved_keys
from recmill.checkpoints.safe_reader import described_tensors
from recmill.errors import CheckpointError, did_you_mean
from recmill.failpoints import reach
from recmill.files.atomic import sync_directory
from recmill.files.reading import read_json
from recmill.files.timestamps import utc_now
from recmill.tables.stores.key_table import Entries
from recmill.tables.torchrec_internals import table_of

# Other disk, no hard links on the file system, too many of one file, or the file of another user (protected_hardlinks).
_CANNOT_LINK = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EPERM, errno.EACCES}


class NewRows(NamedTuple):
    """Rows to write: ids [n], rows [n, dim] and states [n, columns]; without states, these are 0."""

    ids: np.ndarray
    rows: np.ndarray
    state: np.ndarray | None


class NewKeys(NamedTuple):
    """All ids to write and, of a dynamic table, their counts and the steps since they occurred, if these are given."""

    ids: np.ndarray
    counts: np.ndarray | None
    steps_ago: np.ndarray | None


@dataclass(frozen=True)
class TableLayout:
    table: SavedTable
    dim: int
    state_columns: int
    clock: int | None  # batches that a dynamic table was trained with; None: it is not dynamic
    is_tensor: bool  # whether it is saved as a tensor, not in row files

    @property
    def record_bytes(self) -> int:
        return 8 + 4 * (self.dim + self.state_columns)


def table_layout(checkpoint: Checkpoint, name: str) -> TableLayout:
    """Describe a table of a checkpoint, or raise CheckpointError if its rows cannot be written."""
    for _, file in reversed(checkpoint.row_files):
        for table in file.tables:
            if table.name == name:
                clock = file.keys[name].clock if name in file.keys else None
                return TableLayout(table, file.dim, file.state_columns, clock, is_tensor=False)
    sizes = {key: tensor.size for key, tensor in described_tensors(checkpoint).items() if tensor.size}
    keys = {owner: key for key in sizes if key.startswith("model.") and (owner := table_of(key))}
    if name not in keys:
        raise unknown_table(checkpoint, name, keys)
    rows, dim = sizes[keys[name]]
    states = [key for key in sizes if table_of(key) == name and key != keys[name]]
    if {sizes[key] for key in states} not in (set(), {(rows, dim)}) and [sizes[key] for key in states] != [(rows,)]:
        described = " and ".join(f"{key.rpartition('.')[2]} {[*sizes[key]]}" for key in states)
        raise CheckpointError(
            f"{checkpoint.path}: table '{name}' has the optimizer state {described}, and rows can be written only with "
            "one value for each row, or for each value of a row. Use a checkpoint without column-wise sharding."
        )
    columns = sum(sizes[key].numel() for key in states) // rows
    table = SavedTable(name, keys[name], next(iter(states), ""), rows, 0.0, states[1:])
    return TableLayout(table, dim, columns, None, is_tensor=True)


def unknown_table(checkpoint: Checkpoint, name: str, known: Iterable[str]) -> CheckpointError:
    tables = sorted(known)
    near = did_you_mean(name, tables)
    return CheckpointError(f"{checkpoint.path} has no table '{name}'. {near}It has {', '.join(tables)}.")


def write_copy(
    source: Checkpoint,
    layout: TableLayout,
    new_rows: Iterable[NewRows],
    keys: NewKeys,
    directory: Path,
    written: WrittenRows,
) -> Checkpoint:
    """Commit the copy to `directory`. `keys` are those of all `new_rows`; `written` says where these are from."""
    step = source.position.step
    partial = on_disk.partial_path(directory, step)
    on_disk.begin(partial)
    if source.base:
        _link(source.base, directory / source.base.name, [*_listed(source.base), on_disk.MANIFEST])
    files = _listed(source.path)
    del files[on_disk.STATE]
    _link(source.path, partial, files)
    path = partial / f"__written_{len(source.state.row_files)}.rows"
    row_file = _write_row_file(path, source, layout, new_rows, keys)
    files[path.name] = on_disk.file_facts(path)
    own_keys = (layout.table.key, *layout.table.state_keys)
    state = replace(
        source.state,
        # An earlier validation was of other rows.
        position=replace(source.position, best=None, best_step=0, worse_evals=0),
        saved_at=utc_now(),
        changes=[change for change in source.state.changes if change.key not in own_keys],
        row_files=[*source.state.row_files, row_file],
        written_rows=[*source.state.written_rows, written],
    )
    return Checkpoint(on_disk.commit(partial, state, files), state)


def _listed(checkpoint: Path) -> dict[str, FileFacts]:
    """Return what the manifest says about each file."""
    files: dict[str, FileFacts] = read_json(checkpoint / on_disk.MANIFEST)["files"]
    return files


def _link(source: Path, target: Path, names: Iterable[str]) -> None:
    """Link files, or copy them if that is impossible."""
    target.mkdir(exist_ok=True)
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            shutil.copyfile(source / name, target / name)
            with (target / name).open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(target)


def _write_row_file(
    path: Path, source: Checkpoint, layout: TableLayout, new_rows: Iterable[NewRows], keys: NewKeys
) -> RowFile:
    counts: list[int] = []
    key_lists: dict[str, KeyList] = {}
    with path.open("xb") as file:
        for ids, rows, state in _all_rows(source, layout, new_rows, keys):
            states = np.zeros((len(ids), layout.state_columns), np.float32) if state is None else state
            names = [ids] if layout.clock is None else [np.zeros_like(ids), rng.keys_of_ids(ids)]
            for values in (*names, rows, states):
                file.write(np.ascontiguousarray(values).data)
            counts.append(len(ids))
            reach("ckpt.rows", source.position.step)
        if layout.clock is not None:
            key_lists[layout.table.name] = KeyList(layout.clock, len(keys.ids))
            for values in _entries(source, layout, keys):
                file.write(np.ascontiguousarray(values, np.int64).data)
        file.flush()
        os.fsync(file.fileno())
    return RowFile(path.name, [layout.table], layout.dim, layout.state_columns, counts, key_lists)


def _all_rows(source: Checkpoint, layout: TableLayout, new_rows: Iterable[NewRows], keys: NewKeys) -> Iterator[NewRows]:
    """Yield the rows that are kept, if the source has them in a tensor, and the new ones."""
    table = layout.table
    if layout.is_tensor:
        is_kept = np.ones(table.rows, bool)
        is_kept[keys.ids] = False
        pieces = pieces_of(table.rows, layout.record_bytes)
        for first, values in dense_pieces(source, [table.key, *table.state_keys], pieces):
            rows = values[table.key].numpy()
            kept = np.flatnonzero(is_kept[first : first + len(rows)])
            states = [values[key].numpy().reshape(len(rows), -1)[kept] for key in table.state_keys]
            yield NewRows(first + kept, rows[kept], np.concatenate(states, axis=1) if states else None)
    yield from new_rows


def _entries(source: Checkpoint, layout: TableLayout, keys: NewKeys) -> Entries:
    """Return what is to be known about the new keys: what is given, what was known, or that they occurred just now."""
    clock, known = saved_keys(source)[layout.table.name]
    own = rng.keys_of_ids(keys.ids)
    lasts, counts = np.full(len(own), max(clock - 1, 0)), np.ones(len(own), np.int64)
    _, at, at_known = np.intersect1d(own, known.keys, assume_unique=True, return_indices=True)
    lasts[at], counts[at] = known.lasts[at_known], known.counts[at_known]
    if keys.steps_ago is not None:
        lasts = clock - keys.steps_ago
    return Entries(own, lasts, counts if keys.counts is None else keys.counts, np.zeros(len(own), np.int64))
