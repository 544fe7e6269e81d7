"""`recmill checkpoint list | verify | inspect`: what a run directory holds. Changes nothing."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recmill.checkpoints import format as saved
from recmill.commands.assemble import open_trained_run
from recmill.errors import CheckpointError

Facts = dict[str, Any]


def list_checkpoints(run: str | Path, *, digests: bool = False) -> list[Facts]:
    """One of each, oldest first: step, epoch, batch, kind, bytes, saved_at, processes, is_best, health.

    `health` is "complete" or what is wrong; `digests`: every byte is read for it, otherwise names and sizes only.
    """
    directory = open_trained_run(run)[0].checkpoints
    paths = saved.committed(directory)
    try:
        best = saved.best(directory)
    except CheckpointError:
        best = None  # the newest, which knows it, is damaged
    return [_facts(path, path == best, digests) for path in paths]


def _facts(path: Path, is_best: bool, digests: bool) -> Facts:
    facts: Facts = {"step": int(path.name.removeprefix("step-")), "path": str(path), "is_best": is_best}
    facts["bytes"] = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        found = saved.verified(path, digests)
    except CheckpointError as error:
        return facts | {"health": str(error)}
    state = found.state
    kind = f"changes since step {int(state.base.removeprefix('step-')):,}" if state.base else "full"
    at = {"epoch": state.position.epoch, "batch": state.position.batch}
    made = {"kind": kind, "saved_at": state.saved_at, "processes": state.origin.world_size}
    return facts | at | made | {"health": "complete"}


def inspect_checkpoint(run: str | Path, *, step: int | None = None) -> Facts:
    """Of one checkpoint, the newest if no step is given: its state, and size and type of every tensor."""
    from recmill.checkpoints.incremental import table_of
    from recmill.checkpoints.safe_reader import SafeReader

    directory = open_trained_run(run)[0].checkpoints
    paths = saved.committed(directory)
    path = paths[-1] if step is None else saved.path_of(directory, step)
    if path not in paths:
        steps = ", ".join(str(int(known.name.removeprefix("step-"))) for known in paths)
        raise CheckpointError(f"{run}: no checkpoint of step {step}. There are: {steps}.")
    found = saved.verified(path, digests=False)

    def tensors() -> Iterator[Facts]:
        described = SafeReader(path).read_metadata().state_dict_metadata
        if found.base:  # where the tables are; what changed of them has names of its own
            described = SafeReader(found.base).read_metadata().state_dict_metadata | described
        for key, description in sorted(described.items()):
            if not key.startswith(("model.", "optim.")):
                continue
            dtype = description.properties.dtype
            yield {
                "key": key,
                "table": table_of(key),
                "size": list(description.size),
                "dtype": str(dtype).removeprefix("torch."),
                "shards": len(description.chunks),
                "bytes": dtype.itemsize * description.size.numel(),
            }

    state = asdict(found.state)
    changes = state.pop("changes")
    return {"path": str(path), **state, "changed_tensors": len(changes), "tensors": list(tensors())}
