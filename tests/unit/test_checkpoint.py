"""Checkpoints of a plain network: commit, damage, evil metadata. Sharded ones are in tests/distributed."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recmill.errors import CheckpointError
from recmill.training import checkpoint
from recmill.training.checkpoint import Position
from recmill.world import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


class NoOptimizer:
    def state_dict(self) -> dict[str, object]:
        return {}


def save(directory: Path, network: nn.Module, step: int, keep: int = 2) -> None:
    position = Position(step=step, epoch=1, batch=2)
    checkpoint.save(directory, network, NoOptimizer(), position, "data", keep, ALONE)


def test_weights_and_position_come_back(tmp_path: Path) -> None:
    network, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path, network, step=7)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.position == Position(step=7, epoch=1, batch=2)
    checkpoint.load(found, other)
    assert torch.equal(network.weight, other.weight)
    assert not dist.is_initialized()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path, nn.Linear(2, 2), step, keep=2)
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-00000010", "step-00000011"]


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync_directory", die)  # all is written, nothing is renamed
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, nn.Linear(2, 2), step=2)
    monkeypatch.undo()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.position.step == 1
    save(tmp_path, nn.Linear(2, 2), step=2)  # over what the dead one left
    assert checkpoint.committed(tmp_path)[-1].name == "step-00000002"


@pytest.mark.parametrize("file", ["state.json", ".metadata", "__0_0.distcp", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_damage_is_named(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    path = tmp_path / "step-00000001" / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "short" else bytes([content[0] ^ 1]) + content[1:])
    if (file, damage) == ("MANIFEST.json", "gone"):
        assert checkpoint.newest(tmp_path) is None  # never committed, as far as anybody can tell
        return
    with pytest.raises(CheckpointError, match="step-00000001"):
        checkpoint.newest(tmp_path)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",)

    save(tmp_path, nn.Linear(2, 2), step=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    (found.path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="which is not data"):
        checkpoint.load(found, nn.Linear(2, 2))
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint.load(found, nn.Linear(3, 2))


def test_no_code_is_stored_beside_the_tensors(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    state = json.loads((tmp_path / "step-00000001" / "state.json").read_text())
    assert state == {"position": {"step": 1, "epoch": 1, "batch": 2}, "dataset": "data"}
