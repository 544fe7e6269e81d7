"""`recmill checkpoint list | verify | inspect`: describe the checkpoints of a run. Changes nothing."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recmill.checkpoints.format import Checkpoint, best_path, committed, step_of, verify
from recmill.commands.assemble import open_trained_run
from recmill.errors import CheckpointError

Facts = dict[str, Any]


def list_checkpoints(run: str | Path, *, digests: bool = False) -> list[Facts]:
    """Describe each checkpoint, oldest first: step, epoch, batch, kind, bytes, saved_at, processes, is_best, health.

    `health` is "complete" or says what is wrong. `digests`: read every byte; otherwise compare names and sizes only.
    """
    directory = open_trained_run(run)[0].checkpoints
    paths = committed(directory)
    try:
        best = best_path(directory)
    except CheckpointError:
        best = None  # the newest, which names it, is corrupt
    return [_describe(path, path == best, digests) for path in paths]


def _describe(path: Path, is_best: bool, digests: bool) -> Facts:
    facts: Facts = {"step": step_of(path), "path": str(path), "is_best": is_best}
    facts["bytes"] = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        checkpoint = verify(path, digests)
    except CheckpointError as error:
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
    """Describe one checkpoint, the newest by default: its state, and the size and type of every tensor."""
    paths = {step_of(path): path for path in committed(open_trained_run(run)[0].checkpoints)}
    step = max(paths) if step is None else step
    if step not in paths:
        raise CheckpointError(f"{run}: no checkpoint of step {step}. There are: {', '.join(map(str, paths))}.")
    checkpoint = verify(paths[step], digests=False)
    state = asdict(checkpoint.state)
    changes = state.pop("changes")
    tensors = list(_describe_tensors(checkpoint))
    return {"path": str(checkpoint.path), **state, "changed_tensors": len(changes), "tensors": tensors}


def _describe_tensors(checkpoint: Checkpoint) -> Iterator[Facts]:
    from recmill.checkpoints.safe_reader import SafeReader
    from recmill.tables.torchrec_internals import table_of

    described = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    if checkpoint.base:  # it holds the tables; changed rows have keys of their own
        described = SafeReader(checkpoint.base).read_metadata().state_dict_metadata | described
    for key, description in sorted(described.items()):
        if key.startswith(("model.", "optim.")):
            dtype = description.properties.dtype
            yield {
                "key": key,
                "table": table_of(key),
                "size": list(description.size),
                "dtype": str(dtype).removeprefix("torch."),
                "shards": len(description.chunks),
                "bytes": dtype.itemsize * description.size.numel(),
            }
