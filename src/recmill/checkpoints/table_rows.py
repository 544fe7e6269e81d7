"""Read the rows of one table by id, in one process, whatever wrote the checkpoint: a few megabytes at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from recmill import rng
from recmill.checkpoints.format import Checkpoint
from recmill.checkpoints.incremental import dense_pieces, pieces_of
from recmill.checkpoints.row_files import RecordIndex, saved_keys
from recmill.checkpoints.row_writing import unknown_table
from recmill.checkpoints.safe_reader import described_tensors
from recmill.tables.stores.key_table import Entries
from recmill.tables.torchrec_internals import table_of

Columns = dict[str, np.ndarray]


class TableRows(NamedTuple):
    num_rows: int
    pieces: Iterator[Columns]  # in the order of ids


def rows_of_table(checkpoint: Checkpoint, name: str) -> TableRows:
    """Return `id`, `row` and, if the optimizer has one, `state`; of a dynamic table also `count` and `steps_ago`."""
    described = described_tensors(checkpoint)
    keys = {table: key for key in described if key.startswith("model.") and (table := table_of(key))}
    if name not in keys:
        raise unknown_table(checkpoint, name, keys)
    if name in (known := saved_keys(checkpoint)):
        clock, entries = known[name]
        return _dynamic_rows(checkpoint, name, entries, clock)
    rows, dim = described[keys[name]].size
    saved = next((t for _, file in checkpoint.row_files for t in file.tables if t.name == name), None)
    if saved is None:
        states = [key for key in described if table_of(key) == name and key != keys[name]]
        states = [key for key in states if described[key].size[:1] == (rows,)]
        return TableRows(rows, _dense_rows(checkpoint, keys[name], states, rows, dim))
    stream = rng.stream_key(checkpoint.state.origin.seed, "table", name)
    return TableRows(rows, _saved_rows(checkpoint, name, rows, stream, saved.bound))


def _dense_rows(checkpoint: Checkpoint, key: str, states: list[str], rows: int, dim: int) -> Iterator[Columns]:
    row_bytes = 4 * dim * (1 + len(states))
    for first, values in dense_pieces(checkpoint, [key, *states], pieces_of(rows, row_bytes)):
        columns = {"id": np.arange(first, first + len(values[key])), "row": values[key].numpy()}
        state = [values[key].numpy().reshape(len(columns["id"]), -1) for key in states]
        yield columns | ({"state": np.concatenate(state, axis=1)} if states else {})


def _saved_rows(checkpoint: Checkpoint, name: str, rows: int, stream: np.uint64, bound: float) -> Iterator[Columns]:
    index = RecordIndex(checkpoint, name, rows, lambda names: names)
    for first, count in pieces_of(rows, 4 * (index.dim + index.state_columns)):
        values, states, is_saved = index.read(slice(first, first + count))
        if not is_saved.all():  # these still have their first values
            untrained = rng.uniform_floats(stream, first * index.dim, count * index.dim, bound).reshape(count, -1)
            values[~is_saved] = untrained[~is_saved]
        yield _columns(np.arange(first, first + count), values, states)


def _dynamic_rows(checkpoint: Checkpoint, name: str, entries: Entries, clock: int) -> TableRows:
    has_row = np.flatnonzero(entries.rows >= 0)
    by_key = has_row[np.argsort(entries.keys[has_row])]
    keys = entries.keys[by_key]
    ids = rng.ids_of_keys(keys)
    by_id = np.argsort(ids)

    def find(names: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(keys, names), max(len(keys) - 1, 0))
        return np.where(keys[at] == names, at, -1) if len(keys) else np.full(len(names), -1)

    def pieces() -> Iterator[Columns]:
        index = RecordIndex(checkpoint, name, len(keys), find)
        for first, count in pieces_of(max(len(keys), 1), 4 * (index.dim + index.state_columns)):  # one may be empty
            chosen = by_id[first : first + count]
            values, states, _ = index.read(chosen)
            known = {"count": entries.counts[by_key[chosen]], "steps_ago": clock - entries.lasts[by_key[chosen]]}
            columns = _columns(ids[chosen], values, states)
            yield {"id": columns.pop("id")} | known | columns

    return TableRows(len(keys), pieces())


def _columns(ids: np.ndarray, rows: np.ndarray, states: np.ndarray) -> Columns:
    return {"id": ids, "row": rows} | ({"state": states} if states.shape[1] else {})
