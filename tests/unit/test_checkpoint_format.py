"""Checkpoints on disk: which are kept, chosen and refused. Most are of a plain network in one process."""

import json
import os
import shutil
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from recmill.checkpoints import choosing, loading
from recmill.checkpoints import format as format_module
from recmill.checkpoints.choosing import best_path, choose
from recmill.checkpoints.format import Checkpoint, Position, committed, file_facts
from recmill.errors import CheckpointError, ResourceError

from ..checkpoints import ALONE, ORIGIN, new_saver, newest_in, save_network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save_network(tmp_path, nn.Linear(2, 2), step, keep=2)
    assert [path.name for path in committed(tmp_path)] == ["step-00000010", "step-00000011"]


def test_the_best_is_kept_beside_the_newest_in(tmp_path: Path) -> None:
    """Validations of 0.6, 0.8, none, 0.7, 0.8: the second is the best; a tie is not better."""
    position = Position()
    saver = new_saver(tmp_path, nn.Linear(2, 2), keep_best=True)
    for step, value in ((1, 0.6), (2, 0.8), (3, None), (4, 0.7), (5, 0.8)):
        position = replace(position, step=step)
        if value:
            position = position.after_validation(value)
        saver.save(position)
    saver.finish()
    assert [path.name for path in committed(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    found = loading.find_checkpoint(tmp_path, "best", ALONE)
    assert found is not None
    assert (found.position.step, found.position.best) == (2, 0.8)
    assert position.worse_evals == 2
    save_network(tmp_path, nn.Linear(2, 2), step=6)  # no longer asked for
    assert loading.find_checkpoint(tmp_path, "best", ALONE) is None


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
def test_damage_is_named_and_the_newest_complete_checkpoint_is_found(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_network(tmp_path, nn.Linear(20, 20), step)
    bad = tmp_path / "step-00000002"
    damaged(bad / file, damage)
    with pytest.raises(CheckpointError, match=r"step-00000002/.*--fallback"):
        newest_in(tmp_path)
    found = loading.find_checkpoint(tmp_path, "newest", ALONE, fallback=True)
    assert found is not None
    assert found.position.step == 1
    assert "falling back to" in caplog.text
    assert bad.is_dir()
    loading.find_checkpoint(tmp_path, "newest", ALONE, fallback=True, set_aside_newer=True)  # as training does
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-00000002", "step-00000001"]
    save_network(tmp_path, nn.Linear(20, 20), step=2)
    assert newest_in(tmp_path).position.step == 2


def test_if_none_is_complete_the_newest_s_problem_is_reported(tmp_path: Path) -> None:
    for step in (1, 2):
        save_network(tmp_path, nn.Linear(2, 2), step)
        damaged(tmp_path / f"step-0000000{step}" / "state.json", "truncated")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete. The newest: .*-00000002/state.json"):
        choose(tmp_path, "newest", fallback=True)


def test_a_file_that_cannot_be_read_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_network(tmp_path, nn.Linear(2, 2), step)
    real = format_module.digest

    def on_a_bad_disk(path: Path, *rest: Any) -> str:
        if path.parent.name == "step-00000002" and path.suffix == ".distcp":
            raise OSError(5, "Input/output error", str(path))
        return real(path, *rest)

    monkeypatch.setattr(format_module, "digest", on_a_bad_disk)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: cannot be read \(Input/output error\).*--fallback"):
        newest_in(tmp_path)
    found = choose(tmp_path, "newest", fallback=True)
    assert found is not None
    assert found.position.step == 1


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
        ("state.json", {"position": {"step": 1, "loss_sum": float("nan")}}, "unreadable state.*finite"),
        ("state.json", {"position": {"step": 1, "loss_scale": -1.0}}, "unreadable state"),
        ("state.json", {"position": {"step": 1, "best": 0.5, "best_step": 2}}, "step 1, but best_step 2 and worse"),
        ("state.json", {"position": {"step": 1, "worse_evals": 2}}, "step 1, but best_step 0 and worse_evals 2"),
        ("state.json", {"position": {"step": 1, "best": 0.5}}, "best 0.5, but best_step 0"),
        ("state.json", {"position": {"step": 1, "steps_at_scale": 2}}, "step 1, but steps_at_scale 2"),
    ],
)
def test_a_forged_manifest_or_state_is_refused(tmp_path: Path, file: str, change: dict[str, Any], message: str) -> None:
    """Even if whoever wrote them made the digests fit."""
    save_network(tmp_path, nn.Linear(2, 2), step=1)
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
        newest_in(tmp_path)


NOT_TEXT = bytes(range(128, 256)) * 1000


@pytest.mark.timeout(20)  # a pipe must not be waited for
@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json"])
@pytest.mark.parametrize("instead", [None, "/dev/zero", "itself", "/", b"[" * 100_000, NOT_TEXT, b"9" * 5000])
def test_metadata_that_is_no_small_json_file_is_corrupt(tmp_path: Path, file: str, instead: str | bytes | None) -> None:
    """Even if a new file has the size that the manifest gives; `None` is a pipe."""
    save_network(tmp_path, nn.Linear(2, 2), step=1)
    path = tmp_path / "step-00000001" / file
    path.unlink()
    if instead is None:
        os.mkfifo(path)
    elif isinstance(instead, bytes):
        path.write_bytes(instead)
    else:
        path.symlink_to(file if instead == "itself" else instead)
    with pytest.raises(CheckpointError) as caught:
        newest_in(tmp_path)
    assert f"step-00000001/{file}: " in str(caught.value)
    assert len(str(caught.value)) < 1000
    if file == "state.json":
        with pytest.raises(CheckpointError, match=r"step-00000001/state\.json: "):
            best_path(tmp_path)


def test_the_newest_is_the_highest_step_and_copies_are_left_alone(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save_network(tmp_path, nn.Linear(2, 2), step)
    (tmp_path / "step-99999999").rename(tmp_path / "step-99999999-best")
    save_network(tmp_path, nn.Linear(2, 2), step=100_000_001)
    save_network(tmp_path, nn.Linear(2, 2), step=100_000_002)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-100000001",
        "step-100000002",
        "step-99999999-best",
    ]
    assert committed(tmp_path)[-1].name == "step-100000002"


def test_a_copy_under_the_name_of_another_step_is_refused_and_not_counted(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    for step in (1, 2):
        save_network(tmp_path, network, step)
    copy = tmp_path / "step-90000000"
    shutil.copytree(tmp_path / "step-00000002", copy)
    message = rf"{copy} holds the checkpoint of step 2 \(its state.json says so\): it is a copy, or was renamed"
    with pytest.raises(CheckpointError, match=message):
        newest_in(tmp_path)
    found = choose(tmp_path, "newest", fallback=True)
    assert found is not None
    assert found.path.name == "step-00000002"
    for step in (3, 4, 5):  # a run that is training meanwhile
        save_network(tmp_path, network, step, keep=2)
    assert [path.name for path in committed(tmp_path)] == ["step-00000004", "step-00000005", copy.name]


def test_a_checkpoint_that_was_saved_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 2 was saved, but there is none in .*Restore it"):
        choose(tmp_path, "newest", fallback=True, saved_step=2)
    save_network(tmp_path, nn.Linear(2, 2), step=1)
    with pytest.raises(CheckpointError, match=r"step 2 was saved, but the newest in .* is of step 1.*--fallback"):
        choose(tmp_path, "newest", saved_step=2)
    found = choose(tmp_path, "newest", fallback=True, saved_step=2)
    assert found is not None
    assert found.position.step == 1


def test_the_best_is_found_with_fallback_if_the_newest_is_corrupt(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, nn.Linear(2, 2), keep_best=True)
    for step in (1, 2, 3):
        saver.save(Position(step=step, best=0.5, best_step=1))
    saver.finish()
    state = tmp_path / "step-00000003" / "state.json"
    state.write_text(state.read_text().replace('"best_step": 1', '"best_step": 2'))
    with pytest.raises(CheckpointError, match=r"step-00000003/state.json: its content changed since it was saved"):
        choose(tmp_path, "best")
    found = choose(tmp_path, "best", fallback=True)
    assert found is not None
    assert found.position.step == 1


def choose_while_a_run_saves(directory: Path, hold: ExitStack | None = None) -> Checkpoint | None:
    """A run commits two checkpoints while a reader computes the digests of the first."""
    network = nn.Linear(2, 2)
    save_network(directory, network, step=1)
    steps = iter((2, 3))

    def save_more() -> None:
        for step in steps:
            save_network(directory, network, step, keep=2)

    return choose(directory, "newest", on_block=save_more, hold=hold)


def test_a_checkpoint_that_is_being_read_is_pruned_later(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    with ExitStack() as hold:
        found = choose_while_a_run_saves(tmp_path, hold)
        assert found is not None
        assert found.position.step == 1
        save_network(tmp_path, network, step=4, keep=2)
        assert [path.name[-1] for path in committed(tmp_path)] == ["1", "3", "4"]
    save_network(tmp_path, network, step=5, keep=2)
    assert [path.name[-1] for path in committed(tmp_path)] == ["4", "5"]


def test_a_reader_chooses_again_if_a_checkpoint_is_pruned_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "held", lambda path: nullcontext())
    found = choose_while_a_run_saves(tmp_path)
    assert found is not None
    assert found.position.step == 3


def test_an_unreadable_directory_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for another user; permissions do not bind root, as whom tests may run."""
    save_network(tmp_path, nn.Linear(2, 2), step=1)

    def denied(path: Any, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, denied)
        with pytest.raises(ResourceError, match=rf"{tmp_path}: Permission denied"):
            choose(tmp_path, "newest")
    monkeypatch.setattr(format_module, "digest", denied)
    with pytest.raises(ResourceError, match=r"step-00000001/.*: Permission denied"):
        choose(tmp_path, "newest", fallback=True)


def test_a_link_to_nothing_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"step-00000001/MANIFEST.json: missing"):
        choose(tmp_path, "newest")


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".saving-step-00000003").mkdir()
    (tmp_path / ".removing-step-00000001").mkdir()
    save_network(tmp_path, nn.Linear(2, 2), step=4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_the_state_file_holds_exactly_these_keys(tmp_path: Path) -> None:
    save_network(tmp_path, nn.Linear(2, 2), step=1)
    state = json.loads((tmp_path / "step-00000001" / "state.json").read_text())
    position: dict[str, object] = {"step": 1, "epoch": 1, "batch": 2, "loss_sum": 0.0, "loss_weight": 0.0}
    position |= {"best": None, "best_step": 0, "worse_evals": 0, "rate_cuts": 0}
    position |= {"loss_scale": 0.0, "steps_at_scale": 0}
    assert state.pop("saved_at").endswith("Z")
    whole: dict[str, object] = {"base": None, "base_manifest": "", "changes": [], "row_files": []}
    whole |= {"written_rows": []}
    assert state == {"position": position, "origin": asdict(ORIGIN), **whole}
