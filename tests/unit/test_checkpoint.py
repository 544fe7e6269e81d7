"""Checkpoints of a plain network: commit, damage, evil metadata. Sharded ones are in tests/distributed."""

import json
import pickle
from dataclasses import replace
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


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Validations of 0.6, 0.8, none, 0.7, 0.8: the second is the best; a tie is not better."""
    position = Position()
    for step, value in ((1, 0.6), (2, 0.8), (3, None), (4, 0.7), (5, 0.8)):
        position = replace(position, step=step)
        if value:
            position = position.judged(value)
        checkpoint.save(tmp_path, nn.Linear(2, 2), NoOptimizer(), position, "data", 2, ALONE, keep_best=True)
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    found = checkpoint.found_for_all(tmp_path, "best", ALONE)
    assert found is not None
    assert (found.position.step, found.position.best) == (2, 0.8)
    assert position.worse_evals == 2
    save(tmp_path, nn.Linear(2, 2), step=6)  # no longer asked for
    assert checkpoint.found_for_all(tmp_path, "best", ALONE) is None


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


def test_the_newest_is_the_highest_step_and_copies_are_left_alone(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, nn.Linear(2, 2), step)
    (tmp_path / "step-99999999").rename(tmp_path / "step-99999999-best")
    save(tmp_path, nn.Linear(2, 2), step=100_000_001)
    save(tmp_path, nn.Linear(2, 2), step=100_000_002)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-100000001",
        "step-100000002",
        "step-99999999-best",
    ]
    assert checkpoint.committed(tmp_path)[-1].name == "step-100000002"


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".saving-step-00000003").mkdir()
    save(tmp_path, nn.Linear(2, 2), step=4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("attack", ["exec", "dotted"])
def test_metadata_that_would_run_code_is_refused(tmp_path: Path, attack: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",)

    dotted = b"\x80\x04\x8c'torch.distributed.checkpoint.filesystem\x8c\x10__builtins__.get\x93\x8c\x04exec\x85R."
    evil = pickle.dumps(Evil()) if attack == "exec" else dotted
    save(tmp_path, nn.Linear(2, 2), step=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    (found.path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match="which is not data"):
        checkpoint.load(found, nn.Linear(2, 2))
    assert not (tmp_path / "pwned").exists()


def test_a_pickle_in_the_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    save(tmp_path, nn.Linear(2, 2), step=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    (found.path / ".metadata").unlink()
    dcp.save({"model": {"weight": {1, 2}, "bias": torch.zeros(2)}}, checkpoint_id=found.path)
    with pytest.raises(CheckpointError, match="not tensors alone"):
        checkpoint.load(found, nn.Linear(2, 2))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint.load(found, nn.Linear(3, 2))


def test_no_code_is_stored_beside_the_tensors(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    state = json.loads((tmp_path / "step-00000001" / "state.json").read_text())
    position: dict[str, object] = {"step": 1, "epoch": 1, "batch": 2, "loss_sum": 0.0, "loss_weight": 0.0}
    position |= {"best": None, "best_step": 0, "worse_evals": 0, "loss_scale": 0.0, "steps_at_scale": 0}
    assert state == {"position": position, "dataset": "data"}
