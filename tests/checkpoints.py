"""Save and read checkpoints in tests."""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recmill.checkpoints.choosing import choose
from recmill.checkpoints.format import Checkpoint, Origin, Position, verify
from recmill.checkpoints.incremental import apply_changes, has_table_rows
from recmill.checkpoints.loading import read_row_files
from recmill.checkpoints.safe_reader import SafeReader, described_tensors
from recmill.checkpoints.saver import Saver
from recmill.commands.checkpoint import list_checkpoints
from recmill.config.sections import CheckpointSection
from recmill.launch.watchdog import Heartbeat
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
ORIGIN = Origin("config", "data", seed=1, global_batch_size=8, world_size=1, versions={"torch": "2"})


class NoOptimizer:
    optimizers: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, object]:
        return {}


def new_saver(directory: Path, network: nn.Module, **section: Any) -> Saver:
    """Saves a plain network in one process, without an optimizer."""
    optimizer: Any = NoOptimizer()
    return Saver(directory, network, optimizer, ORIGIN, CheckpointSection(**section), ALONE, Heartbeat())


def save_network(directory: Path, network: nn.Module, step: int, **section: Any) -> None:
    saver = new_saver(directory, network, **section)
    saver.save(Position(step=step, epoch=1, batch=2))
    saver.finish()


def newest_in(directory: Path) -> Checkpoint:
    found = choose(directory, "newest")
    assert found is not None
    return found


def newest(run: Path) -> Checkpoint:
    return verify(Path(list_checkpoints(run)[-1]["path"]))


def flip_a_bit(checkpoint: Path) -> Path:
    """Flip a bit in the middle of one of its files, and return that file."""
    shard = next(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read all tensors in one process, with the changes of an incremental checkpoint applied."""

    def read(path: Path) -> dict[str, torch.Tensor]:
        described = SafeReader(path).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(description.size, dtype=description.properties.dtype)
            for key, description in described.items()
        }
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
        return state

    own = read(checkpoint.path)
    in_files = {
        key: torch.empty(description.size)
        for key, description in described_tensors(checkpoint).items()
        if key in {key for _, file in checkpoint.row_files for t in file.tables for key in (t.key, *t.state_keys)}
    }
    read_row_files(checkpoint, in_files)
    if not checkpoint.base:
        return own | in_files
    tensors = {key: value for key, value in read(checkpoint.base).items() if has_table_rows(key, value)}
    tensors |= {key: value for key, value in own.items() if key.startswith(("model.", "optim."))} | in_files
    apply_changes(checkpoint, tensors)
    return tensors
