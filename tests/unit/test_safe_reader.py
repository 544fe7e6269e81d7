"""Checkpoints that somebody tampered with are refused, and nothing in them is executed."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recmill.checkpoints import loading
from recmill.errors import CheckpointError

from ..checkpoints import newest_in, save_network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant


def test_metadata_may_not_point_elsewhere(tmp_path: Path) -> None:
    save_network(tmp_path, nn.Linear(2, 2), step=1)
    found = newest_in(tmp_path)
    metadata = (found.path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in metadata
    (found.path / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"points to '\.\./\.\./secret', which is no file of this checkpoint"):
        loading.load(found, nn.Linear(2, 2))


def test_metadata_without_its_storage_is_read(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    save_network(tmp_path, network, step=1)
    found = newest_in(tmp_path)
    metadata = pickle.loads((found.path / ".metadata").read_bytes())
    metadata.storage_meta = None
    (found.path / ".metadata").write_bytes(pickle.dumps(metadata))
    other = nn.Linear(2, 2)
    loading.load(found, other)
    assert other.weight.equal(network.weight)


@pytest.mark.parametrize("attack", ["exec", "dotted"])
def test_metadata_that_would_run_code_is_refused(tmp_path: Path, attack: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",)

    dotted = b"\x80\x04\x8c'torch.distributed.checkpoint.filesystem\x8c\x10__builtins__.get\x93\x8c\x04exec\x85R."
    evil = pickle.dumps(Evil()) if attack == "exec" else dotted
    save_network(tmp_path, nn.Linear(2, 2), step=1)
    found = newest_in(tmp_path)
    (found.path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match="which is not data"):
        loading.load(found, nn.Linear(2, 2))
    assert not (tmp_path / "pwned").exists()


def test_a_pickle_instead_of_a_tensor_is_refused(tmp_path: Path) -> None:

    save_network(tmp_path, nn.Linear(2, 2), step=1)
    found = newest_in(tmp_path)
    (found.path / ".metadata").unlink()
    dcp.save({"model": {"weight": {1, 2}, "bias": torch.zeros(2)}}, checkpoint_id=found.path)
    with pytest.raises(CheckpointError, match="holds pickled objects besides tensors"):
        loading.load(found, nn.Linear(2, 2))
