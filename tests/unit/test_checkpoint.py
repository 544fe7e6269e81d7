"""Checkpoints of a plain network: commit, damage, evil metadata. Sharded ones are in tests/distributed."""

import json
import pickle
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recmill import failpoints
from recmill.checkpoints import format as format_module
from recmill.checkpoints import loading as checkpoint
from recmill.checkpoints import saver as saver_module
from recmill.checkpoints.format import Checkpoint, Origin, Position, choose, committed, file_facts
from recmill.checkpoints.saver import Saver
from recmill.config.sections import CheckpointSection
from recmill.errors import CheckpointError, ResourceError, UserError
from recmill.failpoints import PLACES, VARIABLE
from recmill.world import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


ORIGIN = Origin("config", "data", seed=1, global_batch_size=8, world_size=1, versions={"torch": "2"})


class NoOptimizer:
    optimizers: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, object]:
        return {}


def saver_of(directory: Path, network: nn.Module, **section: Any) -> Saver:
    optimizer: Any = NoOptimizer()
    return Saver(directory, network, optimizer, ORIGIN, CheckpointSection(**section), ALONE)


def save(directory: Path, network: nn.Module, step: int, **section: Any) -> None:
    saver = saver_of(directory, network, **section)
    saver.save(Position(step=step, epoch=1, batch=2))
    saver.finish()


def newest(directory: Path) -> Checkpoint:
    found = choose(directory, "newest")
    assert found is not None
    return found


def test_weights_and_position_come_back(tmp_path: Path) -> None:
    network, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path, network, step=7)
    found = newest(tmp_path)
    assert found.position == Position(step=7, epoch=1, batch=2)
    checkpoint.load(found, other)
    assert torch.equal(network.weight, other.weight)
    assert not dist.is_initialized()


def test_what_is_saved_is_the_state_of_the_moment_not_of_the_writing(tmp_path: Path) -> None:
    """Training goes on at once, on the same tensors."""
    network, other = nn.Linear(300, 200), nn.Linear(300, 200)
    saver = saver_of(tmp_path, network)
    for step in (1, 2):  # the second copy takes the place of the first
        expected = network.weight.detach().clone()
        saver.save(Position(step=step))
        with torch.no_grad():
            network.weight += 1
        saver.finish()
        checkpoint.load(newest(tmp_path), other)
        assert torch.equal(other.weight, expected)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path, nn.Linear(2, 2), step, keep=2)
    assert [path.name for path in committed(tmp_path)] == ["step-00000010", "step-00000011"]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Validations of 0.6, 0.8, none, 0.7, 0.8: the second is the best; a tie is not better."""
    position = Position()
    saver = saver_of(tmp_path, nn.Linear(2, 2), keep_best=True)
    for step, value in ((1, 0.6), (2, 0.8), (3, None), (4, 0.7), (5, 0.8)):
        position = replace(position, step=step)
        if value:
            position = position.after_validation(value)
        saver.save(position)
    saver.finish()
    assert [path.name for path in committed(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    found = checkpoint.find_checkpoint(tmp_path, "best", ALONE)
    assert found is not None
    assert (found.position.step, found.position.best) == (2, 0.8)
    assert position.worse_evals == 2
    save(tmp_path, nn.Linear(2, 2), step=6)  # no longer asked for
    assert checkpoint.find_checkpoint(tmp_path, "best", ALONE) is None


def test_memory_for_no_copy_means_that_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "available_memory_bytes", lambda: 10)
    saver = saver_of(tmp_path, nn.Linear(2, 2))
    saver.save(Position(step=3))
    assert newest(tmp_path).position.step == 3  # nobody waited for it


def test_a_bad_number_is_never_saved(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    saver = saver_of(tmp_path, network, on_error="continue")  # which is about disks
    saver.save(Position(step=1))
    with torch.no_grad():
        network.bias[1] = torch.nan
    saver.save(Position(step=2))
    with pytest.raises(UserError, match=r"After step 2 bias holds values that are not finite numbers \(on rank 0\)"):
        saver.handle_failure()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def damaged(path: Path, damage: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        path.unlink()
    elif damage == "swapped":
        other = path.parent.parent / "step-00000001" / path.name
        path.write_bytes(other.read_bytes())
    else:
        one_bit = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"truncated": content[:-1], "zeroed": bytes(len(content)), "one bit": one_bit}[damage])


@pytest.mark.parametrize("file", ["state.json", ".metadata", "__0_0.distcp", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "zeroed", "one bit", "swapped"])
def test_damage_is_named_and_the_newest_whole_one_is_found(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, nn.Linear(20, 20), step)
    bad = tmp_path / "step-00000002"
    damaged(bad / file, damage)
    if (file, damage) == ("MANIFEST.json", "missing"):
        assert newest(tmp_path).position.step == 1  # never committed, as far as anybody can tell
        return
    with pytest.raises(CheckpointError, match=r"step-00000002/.*--fallback"):
        newest(tmp_path)
    found = checkpoint.find_checkpoint(tmp_path, "newest", ALONE, fallback=True)
    assert found is not None
    assert found.position.step == 1
    assert "falling back to" in caplog.text
    assert bad.is_dir()
    checkpoint.find_checkpoint(tmp_path, "newest", ALONE, fallback=True, set_aside_newer=True)  # as training does
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-00000002", "step-00000001"]
    save(tmp_path, nn.Linear(20, 20), step=2)
    assert newest(tmp_path).position.step == 2


def test_if_none_is_whole_the_newest_s_problem_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, nn.Linear(2, 2), step)
        damaged(tmp_path / f"step-0000000{step}" / "state.json", "truncated")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete. The newest: .*-00000002/state.json"):
        choose(tmp_path, "newest", fallback=True)


@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("ckpt.")])
@pytest.mark.parametrize("action", ["raise", "nospace", "eio"])
def test_an_error_at_any_place_is_told_and_the_one_before_stays(
    tmp_path: Path, place: str, action: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = nn.Linear(20, 20)
    saver = saver_of(tmp_path, network, on_error="continue")
    saver.save(Position(step=1))
    saver.finish()
    monkeypatch.setenv(VARIABLE, f"{place}:{action}")
    monkeypatch.setattr(failpoints, "_failures", None)
    told = {"raise": "asked for by RECMILL_FAIL", "nospace": "No space left on device", "eio": "Input/output error"}
    with pytest.raises((UserError, RuntimeError, OSError), match=told[action]) as caught:
        saver.save(Position(step=2))
        saver.finish()
    is_renamed = place in ("ckpt.committed", "ckpt.pruned")
    assert newest(tmp_path).position.step == (2 if is_renamed else 1)
    assert not list(tmp_path.glob(".saving-*"))
    assert "committed step=2" not in caplog.text
    if action != "raise" and place not in ("ckpt.begin", "ckpt.copied"):
        assert isinstance(caught.value, ResourceError)
        assert re.search(r"It needs 1,680 bytes, [\d,]+ are free. Earlier checkpoints", str(caught.value))
        saver.handle_failure()  # training goes on by configuration
        assert "Training continues" in caplog.text
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(failpoints, "_failures", None)
    monkeypatch.setattr(saver, "_error", None)
    saver.save(Position(step=3))
    saver.finish()
    assert newest(tmp_path).position.step == 3


def test_a_last_checkpoint_that_training_waited_for_is_not_given_up_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "ckpt.written:nospace")
    monkeypatch.setattr(failpoints, "_failures", None)
    saver = saver_of(tmp_path, nn.Linear(2, 2), on_error="continue", background=False)
    saver.save(Position(step=1))
    with pytest.raises(ResourceError, match="No space left on device"):
        saver.finish()


def test_a_defect_of_ours_is_no_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ckpt.written:raise")
    monkeypatch.setattr(failpoints, "_failures", None)
    saver = saver_of(tmp_path, nn.Linear(2, 2), on_error="continue")
    saver.save(Position(step=1))
    with pytest.raises(RuntimeError, match=r"rank 0 could not save:\n(?s:.)*asked for by RECMILL_FAIL"):
        saver.handle_failure()


def test_a_place_that_is_gone_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saver_of(tmp_path / "gone" / "checkpoints", nn.Linear(2, 2))
    saver.save(Position(step=1))
    with pytest.raises(ResourceError, match=r"\(No such file or directory\). It needs 24 bytes, an unknown number"):
        saver.finish()


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, nn.Linear(2, 2), step)
    real = format_module.digest

    def on_a_bad_disk(path: Path, *rest: Any) -> str:
        if path.parent.name == "step-00000002" and path.suffix == ".distcp":
            raise OSError(5, "Input/output error", str(path))
        return real(path, *rest)

    monkeypatch.setattr(format_module, "digest", on_a_bad_disk)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: cannot be read \(Input/output error\).*--fallback"):
        newest(tmp_path)
    found = choose(tmp_path, "newest", fallback=True)
    assert found is not None
    assert found.position.step == 1


def test_room_for_a_full_copy_is_looked_for_after_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saver_of(tmp_path, nn.Linear(20, 20))
    saver._buffers = [torch.empty(3)]  # of changes
    monkeypatch.setattr(saver_module, "available_memory_bytes", lambda: 1500)
    assert not saver._has_memory_for_copy({"w": torch.empty(400)})
    assert saver._has_memory_for_copy({"w": torch.empty(300)})


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("MANIFEST.json", {"format": 1}, "format 1, but this version of recmill reads 2"),
        ("MANIFEST.json", {"files": {}}, r"does not list (state.json|.metadata)"),
        ("MANIFEST.json", {"files": []}, "unreadable manifest"),
        ("MANIFEST.json", {"files": {"../secret": {"bytes": 1, "xxh3": ""}}}, r"\.\./secret: missing"),
        ("state.json", {"base": "../../elsewhere"}, r"unreadable state \(base"),
        ("state.json", {"position": {"step": -1}}, "unreadable state"),
        ("state.json", {"surprise": 1}, "unreadable state"),
    ],
)
def test_words_that_nobody_of_ours_wrote_are_refused(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    """Even if whoever wrote them made the digests fit."""
    save(tmp_path, nn.Linear(2, 2), step=1)
    path = tmp_path / "step-00000001"
    content = json.loads((path / file).read_text())
    if change.get("files"):
        change = {"files": content["files"] | change["files"]}
    (path / file).write_text(json.dumps(content | change))
    if file == "state.json":
        manifest = json.loads((path / "MANIFEST.json").read_text())
        manifest["files"]["state.json"] = file_facts(path / "state.json")
        (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        newest(tmp_path)


def test_metadata_may_not_point_elsewhere(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    found = newest(tmp_path)
    metadata = (found.path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in metadata
    (found.path / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"points to '\.\./\.\./secret', which is no file of this checkpoint"):
        checkpoint.load(found, nn.Linear(2, 2))


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
    assert committed(tmp_path)[-1].name == "step-100000002"


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
    found = newest(tmp_path)
    (found.path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match="which is not data"):
        checkpoint.load(found, nn.Linear(2, 2))
    assert not (tmp_path / "pwned").exists()


def test_a_pickle_in_the_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    save(tmp_path, nn.Linear(2, 2), step=1)
    found = newest(tmp_path)
    (found.path / ".metadata").unlink()
    dcp.save({"model": {"weight": {1, 2}, "bias": torch.zeros(2)}}, checkpoint_id=found.path)
    with pytest.raises(CheckpointError, match="holds pickled objects besides tensors"):
        checkpoint.load(found, nn.Linear(2, 2))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    found = newest(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint.load(found, nn.Linear(3, 2))


def optimizer_of(network: nn.Module) -> CombinedOptimizer:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5)

    return CombinedOptimizer([("dense", KeyedOptimizerWrapper(dict(network.named_parameters()), make))])


def trained(hidden: int) -> tuple[nn.Module, CombinedOptimizer]:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, hidden))
    optimizer = optimizer_of(network)
    for _ in range(5):
        optimizer.zero_grad()
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return network, optimizer


def test_what_is_taken_in_part_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    """Layer 1 has another width: neither its values nor its count of steps come from there, nor are they changed."""
    old, old_optimizer = trained(hidden=2)
    saver = Saver(tmp_path, old, old_optimizer, ORIGIN, CheckpointSection(), ALONE)
    saver.save(Position(step=5))
    saver.finish()
    new = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6))
    optimizer = optimizer_of(new)
    before = {key: value.clone() for key, value in new.state_dict().items()}
    checkpoint.load(newest(tmp_path), new, optimizer, allow_partial=True)
    assert [key for key, value in new.state_dict().items() if torch.equal(value, before[key])] == ["1.weight", "1.bias"]
    (dense,) = [part for _, part in optimizer.optimizers]
    expected = old_optimizer.state_dict()["state"]["dense.0.weight"]
    found = dense.state_dict()["state"]["0.weight"]
    assert all(torch.equal(found[name], expected[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert [float(value.abs().sum()) for value in dense.state[new[1].weight].values()] == [0.0, 0.0, 0.0]
    saver = Saver(tmp_path, new, optimizer, ORIGIN, CheckpointSection(), ALONE)
    saver.save(Position(step=6))
    saver.finish()
    again = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6))
    checkpoint.load(newest(tmp_path), again, optimizer_of(again))


def test_all_that_is_no_tensor_is_json(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), step=1)
    state = json.loads((tmp_path / "step-00000001" / "state.json").read_text())
    position: dict[str, object] = {"step": 1, "epoch": 1, "batch": 2, "loss_sum": 0.0, "loss_weight": 0.0}
    position |= {"best": None, "best_step": 0, "worse_evals": 0, "loss_scale": 0.0, "steps_at_scale": 0}
    assert state.pop("saved_at").endswith("Z")
    whole: dict[str, object] = {"base": None, "base_manifest": "", "changes": []}
    assert state == {"position": position, "origin": asdict(ORIGIN), **whole}
