"""`recmill checkpoint list | verify | inspect | rows`: read the checkpoints of a run, without changing anything.

`commands/import_rows.py` has `recmill checkpoint write-rows`.
"""

import math
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from recmill.checkpoints.choosing import best_path, lost_error
from recmill.checkpoints.format import PrunedError, committed, held, read, step_of, step_path, verify
from recmill.commands.assemble import open_trained_directory
from recmill.commands.keywords import checked_keywords
from recmill.config.options import given_path
from recmill.errors import CheckpointError, ResourceError, UserError
from recmill.launch import early
from recmill.tables.libraries import import_libraries

Facts = dict[str, Any]
_GROUP_ROWS = 1 << 16  # so that blocks of a few megabytes can be read without reading much more


def list_checkpoints(run: str | Path, *, digests: bool = False) -> list[Facts]:
    """Describe each checkpoint, oldest first: step, epoch, batch, kind, bytes, saved_at, processes, is_best, health.

    `health` is "complete" or says what is wrong; `kind` may then be "missing" or "copy of step N". Without `digests`,
    names and sizes of files are compared, and the digests of state.json and .metadata.
    """
    directory = open_trained_directory(run)
    saved_step = directory.saved_step()
    best = None
    with suppress(UserError):  # the newest, which names the best one, may be corrupt
        best = best_path(directory.checkpoints)
    found = []
    for path in committed(directory.checkpoints):
        with suppress(PrunedError), held(path):  # the run may still be training, and prune it meanwhile
            found.append(_describe(path, path == best, digests))
    if error := lost_error(directory.checkpoints, saved_step):
        lost: Facts = {"step": saved_step, "path": str(step_path(directory.checkpoints, saved_step)), "bytes": 0}
        found.append(lost | {"is_best": False, "kind": "missing", "health": str(error)})
    return found


def _describe(path: Path, is_best: bool, digests: bool) -> Facts:
    facts: Facts = {"step": step_of(path), "path": str(path), "is_best": is_best, "bytes": 0}
    with suppress(OSError):
        facts["bytes"] = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        checkpoint = verify(path, digests)
    except PrunedError:
        raise
    except UserError as error:
        with suppress(UserError):
            if (found := read(path)).is_copy:
                facts["kind"] = f"copy of step {found.position.step:,}"
        return facts | {"health": str(error)}
    return facts | {
        "epoch": checkpoint.position.epoch,
        "batch": checkpoint.position.batch,
        "kind": f"changes since step {step_of(checkpoint.base):,}" if checkpoint.base else "full",
        "saved_at": checkpoint.state.saved_at,
        "processes": checkpoint.state.origin.world_size,
        "health": "complete",
    }


def inspect_checkpoint(run: str | Path, *, step: int | None = None) -> Facts:
    """Describe one checkpoint, the newest by default: its state, and the size and type of every tensor.

    The size of a dynamic table is the number of ids that have a row; all other ids share `shared_rows` rows.
    """
    from recmill.checkpoints.row_files import saved_keys
    from recmill.checkpoints.safe_reader import described_tensors

    path = chosen_checkpoint(run, step)
    with held(path):
        checkpoint = verify(path, digests=False)
        described = described_tensors(checkpoint)
        num_ids = {table: int((entries.rows >= 0).sum()) for table, (_, entries) in saved_keys(checkpoint).items()}
    state = asdict(checkpoint.state)
    changed = len(state.pop("changes"))
    tensors = [_describe_tensor(key, tensor, num_ids) for key, tensor in sorted(described.items())]
    return {"path": str(checkpoint.path), **state, "changed_tensors": changed, "tensors": tensors}


def chosen_checkpoint(run: str | Path, step: int | None) -> Path:
    """Return the checkpoint of a step, by default the newest."""
    directory = open_trained_directory(run)
    saved_step = directory.saved_step()
    paths = {step_of(path): path for path in committed(directory.checkpoints)}
    if step is None:
        if error := lost_error(directory.checkpoints, saved_step):
            raise error
        step = max(paths)
    if step not in paths:
        raise CheckpointError(f"{run}: no checkpoint of step {step}. There are: {', '.join(map(str, paths))}.")
    return paths[step]


@checked_keywords
def export_rows(run: str | Path, table: str, output: str | Path, *, step: int | None = None) -> Facts:
    """Write the rows of a table to a Parquet file, by id: `id`, `row`, `state` (of the optimizer, if it has one).

    A dynamic table has those ids that have a row, with `count` and `steps_ago`, when they last occurred.
    """
    import polars as pl
    from polars.io.plugins import register_io_source

    from recmill.files.atomic import new_file

    target = given_path(output, "--output")
    path = chosen_checkpoint(run, step)
    import_libraries(in_own_process=early.is_command)
    from recmill.checkpoints.table_rows import rows_of_table

    with held(path), new_file(target) as file:
        found = rows_of_table(verify(path), table)
        frames = map(pl.DataFrame, found.pieces)
        first = next(frames)
        source = register_io_source(lambda *_: chain([first], frames), schema=first.schema)
        try:
            source.sink_parquet(file, row_group_size=_GROUP_ROWS)
        except pl.exceptions.ComputeError as error:
            raise ResourceError(f"{target}: could not be written ({error}). Is the disk full?") from error
    return {"table": table, "rows": found.num_rows, "path": str(target), "step": step_of(path)}


def _describe_tensor(key: str, tensor: Any, num_ids: dict[str, int]) -> Facts:
    from recmill.tables.stores.key_table import SHARED_ROWS
    from recmill.tables.torchrec_internals import table_of

    table, dtype, size = table_of(key), tensor.properties.dtype, list(tensor.size)
    shared_rows = 0
    if table in num_ids:
        size[0], shared_rows = num_ids[table], SHARED_ROWS
    return {
        "key": key,
        "table": table,
        "size": size,
        "shared_rows": shared_rows,
        "dtype": str(dtype).removeprefix("torch."),
        "shards": len(tensor.chunks),
        "bytes": dtype.itemsize * math.prod(([size[0] + shared_rows] if size else []) + size[1:]),
    }
