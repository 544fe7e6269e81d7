"""Read the rows of one table by id, in one process, whatever wrote the checkpoint."""

import numpy as np
import torch

from recmill import rng
from recmill.checkpoints.format import Checkpoint
from recmill.checkpoints.loading import read_alone
from recmill.checkpoints.row_files import saved_keys, saved_rows
from recmill.checkpoints.row_writing import unknown_table
from recmill.checkpoints.safe_reader import described_tensors
from recmill.tables.torchrec_internals import table_of

Columns = dict[str, np.ndarray]


def rows_of_table(checkpoint: Checkpoint, name: str) -> Columns:
    """Return `id`, `row` and, if the optimizer has one, `state`; of a dynamic table also `count` and `steps_ago`."""
    described = described_tensors(checkpoint)
    keys = {table: key for key in described if key.startswith("model.") and (table := table_of(key))}
    if name not in keys:
        raise unknown_table(checkpoint, name, keys)
    if name in (known := saved_keys(checkpoint)):
        clock, entries = known[name]
        return _dynamic_rows(checkpoint, name, dict(zip(entries._fields, entries, strict=True)), clock)
    wanted = [key for key in described if table_of(key) == name and described[key].size]
    state = {key: torch.empty(described[key].size, dtype=described[key].properties.dtype) for key in wanted}
    read_alone(checkpoint, state)
    rows = state.pop(keys[name])
    columns = {"id": np.arange(len(rows)), "row": rows.numpy()}
    states = [values.reshape(len(rows), -1) for values in state.values() if values.shape[0] == len(rows)]
    return columns | ({"state": torch.cat(states, dim=1).numpy()} if states else {})


def _dynamic_rows(checkpoint: Checkpoint, name: str, entries: Columns, clock: int) -> Columns:
    order = np.argsort(entries["keys"])
    order = order[entries["rows"][order] >= 0]
    keys = entries["keys"][order]
    (dim,) = {file.dim for _, file in checkpoint.row_files if name in file.keys}
    (state_columns,) = {file.state_columns for _, file in checkpoint.row_files if name in file.keys}
    rows, state = (np.empty((len(keys), columns), np.float32) for columns in (dim, state_columns))
    for directory, file in checkpoint.row_files:
        for table, own_keys, own_rows, own_state in saved_rows(directory, file):
            if table.name != name:
                continue
            at = np.searchsorted(keys, own_keys)
            is_known = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == own_keys) if len(keys) else at < 0
            rows[at[is_known]], state[at[is_known]] = own_rows[is_known], own_state[is_known]
    columns = {
        "id": rng.ids_of_keys(keys),
        "count": entries["counts"][order],
        "steps_ago": clock - entries["lasts"][order],
        "row": rows,
    }
    return columns | ({"state": state} if state_columns else {})
