"""What the tests read from checkpoints."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from recmill.checkpoints.format import Checkpoint, verify
from recmill.checkpoints.incremental import apply_changes, has_table_rows
from recmill.checkpoints.safe_reader import SafeReader
from recmill.commands.checkpoint import list_checkpoints


def newest(run: Path) -> Checkpoint:
    return verify(Path(list_checkpoints(run)[-1]["path"]))


def flip_a_bit(checkpoint: Path) -> Path:
    """In the middle of one of its shards, which comes back."""
    shard = next(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Whole, whatever it was saved as."""

    def read(path: Path) -> dict[str, torch.Tensor]:
        described = SafeReader(path).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(description.size, dtype=description.properties.dtype)
            for key, description in described.items()
        }
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
        return state

    own = read(checkpoint.path)
    if not checkpoint.base:
        return own
    whole = {key: value for key, value in read(checkpoint.base).items() if has_table_rows(key, value)}
    whole |= {key: value for key, value in own.items() if key.startswith(("model.", "optim."))}
    apply_changes(checkpoint, whole)
    return whole
